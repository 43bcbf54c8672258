"""Timing things in turn, the machine's matrix rate, and the form of a report."""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from towers.build import Parts
from towers.config.checks import nearest
from towers.data.streams import without_tuning
from towers.parallel.devices import Devices, configure

# Products of these shapes (m, k, n); the best rate counts, because no one shape suits
# every machine.
MATRIX_SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 1024, 1024))
PRODUCTS = 4  # of a shape, timed together


def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of an option of `argparse`: known names with commas between them."""

    def names_in(text):
        names = text.split(",")
        for name in names:
            if name not in known:
                near = nearest(name, list(known))
                raise argparse.ArgumentTypeError(
                    f"{name!r}: {near}must be one of {', '.join(known)}"
                )
        return names

    return names_in


def all_devices(device: str, most_on_cpu: int) -> Devices:
    """Every GPU, or so many logical devices of the CPU where there is none or `device`
    is "cpu"; each of them may compute with all cores."""
    has_gpu = device != "cpu" and tf.config.list_physical_devices("GPU")
    return configure(device, 0 if has_gpu else most_on_cpu, own_cores=False)


def in_turn(
    things: Mapping[str, Callable[[], None]], rounds: int, warm_up: int = 1
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Runs each thing once per round, in turn.

    Returns:
        Seconds of each in every round, by the wall clock and of processor time. Beside
        other work on the machine the second is the steadier; it leaves out waiting.

    The order is reversed from one round to the next, so that a machine that becomes
    slower or faster treats all alike. The first `warm_up` rounds do not count.
    """
    wall, processor = {name: [] for name in things}, {name: [] for name in things}
    for number in range(-warm_up, rounds):
        names = list(things) if number % 2 else list(reversed(things))
        for name in names:
            started, used = time.perf_counter(), time.process_time()
            things[name]()
            if number >= 0:
                wall[name].append(time.perf_counter() - started)
                processor[name].append(time.process_time() - used)
    return wall, processor


class StillBatches:
    """The same batch for ever, in memory."""

    def __init__(self, batch: dict[str, tf.Tensor]):
        self.batch = batch

    def stream(self, first_step: int) -> tf.data.Dataset:
        return without_tuning(tf.data.Dataset.from_tensors(self.batch).repeat())


def on_still_batch(parts: Parts) -> Parts:
    """The same parts whose training batches are the first one for ever."""
    batch = parts.train_batches(tf.constant(0, tf.int64))
    return dataclasses.replace(parts, train_batches=StillBatches(batch))


def matrix_rate(
    dtype: tf.DType = tf.float32, devices: Sequence[str] = ("/CPU:0",)
) -> float:
    """The best rate of plain matrix products, all devices together, in FLOP/s.

    All compute at the same time: towers that share the cores of a CPU can take no more
    than there is, and one whose products have a single thread needs the others.
    """

    def seconds(device, m, k, n):
        with tf.device(device):
            a = tf.cast(tf.random.uniform([m, k]), dtype)
            b = tf.cast(tf.random.uniform([k, n]), dtype)
            tf.linalg.matmul(a, b).numpy()
            found = []
            for _ in range(3):
                together.wait(timeout=60)  # one of them may have failed
                started = time.perf_counter()
                for _ in range(PRODUCTS):
                    c = tf.linalg.matmul(a, b)
                c[0, 0].numpy()
                found.append(time.perf_counter() - started)
            return found

    best = 0.0
    together = threading.Barrier(len(devices))
    with concurrent.futures.ThreadPoolExecutor(len(devices)) as threads:
        for m, k, n in MATRIX_SHAPES:
            flops = 2 * m * k * n * PRODUCTS * len(devices)
            futures = [threads.submit(seconds, d, m, k, n) for d in devices]
            rounds = zip(*(future.result() for future in futures), strict=True)
            best = max(best, *(flops / max(secs) for secs in rounds))
    return best


class PeakMemory:
    """How much more memory was taken at once since this was made: of the fullest GPU,
    or of the process."""

    def __init__(self, chosen: Devices):
        self._gpus = [x.strip("/") for x in chosen.towers if chosen.kind == "GPU"]
        for gpu in self._gpus:
            tf.config.experimental.reset_memory_stats(gpu)
        if not self._gpus:
            pathlib.Path("/proc/self/clear_refs").write_text("5")
        self._before = self._bytes("VmRSS", "current")

    def more_bytes(self) -> int:
        return self._bytes("VmHWM", "peak") - self._before

    def _bytes(self, of_process, of_gpu):
        if self._gpus:
            infos = map(tf.config.experimental.get_memory_info, self._gpus)
            return max(info[of_gpu] for info in infos)
        status = pathlib.Path("/proc/self/status").read_text()
        return 1024 * int(re.search(rf"{of_process}:\s+(\d+)", status)[1])


def ratios(seconds: dict[str, list[float]], name: str, base: str) -> tuple[float, ...]:
    """Lowest, median and highest of `name`'s time over `base`'s, round by round."""
    quotients = np.divide(seconds[name], seconds[base])
    return tuple(np.percentile(quotients, (0, 50, 100)))


def machine() -> str:
    """Processor, cores and memory in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":")[1].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    gpus = tf.config.list_physical_devices("GPU")
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, {len(gpus)} GPU(s)"


def told_rates(before: float, after: float) -> str:
    """Matrix rates in FLOP/s, in the words of every report."""
    return f"matrix rate {before / 1e9:.0f} GFLOP/s before and {after / 1e9:.0f} after"


def report_head(title: str) -> str:
    """The first lines of every report: machine, versions, date, command."""
    command = pathlib.Path(sys.argv[0]).stem
    arguments = " ".join(sys.argv[1:])
    return "\n".join(
        [
            f"# {title}",
            "",
            f"- date: {time.strftime('%Y-%m-%d')}",
            f"- machine: {machine()}",
            f"- versions: TensorFlow {tf.__version__}, Keras {keras.__version__}, "
            f"NumPy {np.__version__}, Python {platform.python_version()}",
            f"- command: `python -m benchmarks.{command} {arguments}`".rstrip("` ")
            + "`",
            "",
        ]
    )

"""The one way to measure: things in turn, the machine's matrix rate, a form of report.

Speeds are ratios of things that run in turn, or stand next to the matrix rate of the
same minutes, because machines differ from day to day.
"""

import argparse
import concurrent.futures
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

from towers.errors import TowersError
from towers.parallel.devices import Devices, configure

# Products of these shapes (m, k, n); the best rate counts, because no one shape suits
# every machine.
MATRIX_SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 1024, 1024))
# A GPU is idle between products as small as those.
GPU_MATRIX_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192))
PRODUCTS = 4  # of a shape, timed together

PROC_STAT = pathlib.Path("/proc/stat")
IDLE_BELOW = 0.1  # share of the processor time that others take on an idle machine
OTHERS = []  # that share before each turn of this program


# Options.


def create_parser(doc: str, **defaults) -> argparse.ArgumentParser:
    """The parser of a benchmark, with the options that several of them have."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_dir", default="", help="CIFAR-10; synthetic without it")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "gpu"))
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.set_defaults(**defaults)
    return parser


def dataset(options: argparse.Namespace) -> dict[str, str]:
    """The fields of Config that name the data set of a benchmark."""
    name = "cifar10" if options.data_dir else "synthetic"
    return {"dataset": name, "data_dir": options.data_dir}


def names(text: str) -> list[str]:
    """The type of an option that is a list with commas."""
    return text.split(",")


def numbers(text: str) -> list[int]:
    """The type of an option that is a list of numbers with commas."""
    return [int(number) for number in text.split(",")]


def run(main: Callable[[], None]) -> None:
    """Calls it; says if the machine was not idle; a user's mistake ends in one line."""
    try:
        main()
    except TowersError as error:
        sys.exit(f"{pathlib.Path(sys.argv[0]).stem}: {error}")
    print(busy_text(OTHERS), end="")


def all_devices(
    device: str, num_cpu_devices: int, core_per_tower: bool = False
) -> Devices:
    """Every GPU, or logical devices of the CPU where there is none.

    With `core_per_tower` they are as in a training with so many towers; otherwise each
    of them may compute with all cores.
    """
    has_gpu = device != "cpu" and tf.config.list_physical_devices("GPU")
    return configure(
        device, 0 if has_gpu else num_cpu_devices, core_per_tower=core_per_tower
    )


# Time and memory.


def others_share(secs: float = 0.2) -> float:
    """The share of the machine's processor time that others take while this process
    waits: other processes, and other machines on the same host (steal). 0 without
    /proc/stat."""
    if not PROC_STAT.exists():
        return 0.0

    def ticks():  # user, nice, system, idle, iowait, irq, softirq, steal
        return np.array(PROC_STAT.read_text().split()[1:9], float)

    before, used = ticks(), time.process_time()
    time.sleep(secs)
    spent = ticks() - before
    own = (time.process_time() - used) * os.sysconf("SC_CLK_TCK")
    busy = spent.sum() - spent[3:5].sum() - own
    return max(float(busy), 0.0) / max(float(spent.sum()), 1.0)


def wait_until_idle(windows: int = 10) -> None:
    """Waits for others to end, but two seconds at most; notes the share they take."""
    for _ in range(windows):
        share = others_share()
        if share < IDLE_BELOW:
            break
    OTHERS.append(share)


def busy_text(shares: Sequence[float]) -> str:
    """The line of a report about turns before which the machine was not idle."""
    busy = [share for share in shares if share >= IDLE_BELOW]
    if not busy:
        return ""
    return (
        f"\nThe machine was not idle before {len(busy)} of {len(shares)} turns: others "
        f"took {min(busy):.0%} to {max(busy):.0%} of its processor time.\n"
    )


def in_turn(
    things: Mapping[str, Callable[[], None]], rounds: int, warm_up: int = 1
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Runs each thing once per round, in turn, on a machine that is idle if it can be.

    Returns:
        Seconds of each in every round, by the wall clock and of processor time. Next to
        other work on the machine the second is the steadier; it leaves out waiting.

    The order is reversed from one round to the next, so that a machine that becomes
    slower or faster treats all alike. The first `warm_up` rounds do not count.
    """
    wall, processor = {name: [] for name in things}, {name: [] for name in things}
    for number in range(-warm_up, rounds):
        order = list(things) if number % 2 else list(reversed(things))
        for name in order:
            wait_until_idle()
            started, used = time.perf_counter(), time.process_time()
            things[name]()
            if number >= 0:
                wall[name].append(time.perf_counter() - started)
                processor[name].append(time.process_time() - used)
    return wall, processor


def ratios(
    seconds: Mapping[str, list[float]],
    name: str,
    base: str,
    percentiles: Sequence[float] = (0, 50, 100),
) -> tuple[float, ...]:
    """Percentiles of `name`'s time over `base`'s, round by round: by default lowest,
    median and highest."""
    return tuple(np.percentile(np.divide(seconds[name], seconds[base]), percentiles))


def ratios_text(seconds: Mapping[str, list[float]], name: str, base: str) -> str:
    """`ratios`, as a table has them."""
    return " ".join(f"{x:.3f}" for x in ratios(seconds, name, base))


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
            rounds = []
            for _ in range(3):
                together.wait(timeout=60)  # another device may have failed
                started = time.perf_counter()
                for _ in range(PRODUCTS):
                    c = tf.linalg.matmul(a, b)
                c[0, 0].numpy()
                rounds.append(time.perf_counter() - started)
            return rounds

    best = 0.0
    together = threading.Barrier(len(devices))
    with concurrent.futures.ThreadPoolExecutor(len(devices)) as threads:
        for m, k, n in GPU_MATRIX_SHAPES if "GPU" in devices[0] else MATRIX_SHAPES:
            flops = 2 * m * k * n * PRODUCTS * len(devices)
            futures = [threads.submit(seconds, d, m, k, n) for d in devices]
            rounds = zip(*(future.result() for future in futures), strict=True)
            best = max(best, *(flops / max(secs) for secs in rounds))
    return best


def process_bytes(field: str, pid: int | str = "self") -> int:
    """The memory of a process: "VmRSS", resident now, or "VmHWM", the most so far."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", status)[1])


class PeakMemory:
    """The growth of memory at its peak since this was made: of the fullest GPU, or of
    the process."""

    def __init__(self, chosen: Devices):
        self._gpus = [x.strip("/") for x in chosen.towers if chosen.kind == "GPU"]
        for gpu in self._gpus:
            tf.config.experimental.reset_memory_stats(gpu)
        if not self._gpus:
            pathlib.Path("/proc/self/clear_refs").write_text("5")
        self._before = self._bytes("VmRSS", "current")

    def growth_bytes(self) -> int:
        return self._bytes("VmHWM", "peak") - self._before

    def _bytes(self, process_field, gpu_field):
        if self._gpus:
            infos = map(tf.config.experimental.get_memory_info, self._gpus)
            return max(info[gpu_field] for info in infos)
        return process_bytes(process_field)


# Reports.


def machine() -> str:
    """Processor, cores and memory in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = re.findall(r"^model name\s*:\s*(.*)$", cpuinfo.read_text(), re.M)
        model = models[0] if models else model
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    gpus = [
        tf.config.experimental.get_device_details(gpu).get("device_name", "unknown")
        for gpu in tf.config.list_physical_devices("GPU")
    ]
    names = f": {', '.join(sorted(set(gpus)))}" if gpus else ""
    return (
        f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, {len(gpus)} GPU(s){names}"
    )


def rates_text(rates: Sequence[float]) -> str:
    """Matrix rates of a run in FLOP/s, as a report says them."""
    return f"matrix rate {', '.join(f'{rate / 1e9:.0f}' for rate in rates)} GFLOP/s"


def report_head(title: str) -> str:
    """The first lines of every report: date, machine, versions, command."""
    program = pathlib.Path(sys.argv[0]).stem
    command = " ".join([f"python -m benchmarks.{program}", *sys.argv[1:]])
    return (
        f"# {title}\n\n- date: {time.strftime('%Y-%m-%d')}\n- machine: {machine()}\n"
        f"- versions: TensorFlow {tf.__version__}, Keras {keras.__version__}, "
        f"NumPy {np.__version__}, Python {platform.python_version()}\n"
        f"- command: `{command}`\n"
    )


def table_head(columns: str) -> str:
    """The first lines of a table, from names of columns with bars between them."""
    return f"| {columns} |\n|{' --- |' * len(columns.split(' | '))}"


def table_row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"

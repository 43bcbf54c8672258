"""Processes that train together on loopback, on command; on CPUs.

They are started as `python -m towers.launch` does: the same ports, the same cores. As a
program this file is one of them.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from benchmarks import trainers
from benchmarks.graphs.graphs import called
from towers import build
from towers.config import Config
from towers.errors import TowersError
from towers.launch.local import divide, free_ports
from towers.parallel import devices
from towers.parallel.connect import connect
from towers.parallel.trainer import Trainer
from towers.parallel.workers import ALONE, Workers

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOOPBACK = re.compile(r"^\s*lo:(.*)$", re.M)
END_SECS = 30.0


class Processes:
    """Processes of one training; a context manager.

    Args:
        count: of the processes. Of several each is a worker with its part of the batch;
            the cores are divided among them where there are enough.
        fields: of Config, with the batch over all processes.

    Attributes:
        described: what the first one says of itself, see `serve`.
    """

    def __init__(self, count: int, fields: dict[str, Any]):
        self._errors = [tempfile.TemporaryFile("w+") for _ in range(count)]
        self._processes = []
        try:
            with free_ports(count) as ports:
                addresses = [f"127.0.0.1:{port}" for port in ports]
                for index, share in enumerate(divide(count, os.environ, "cpu")):
                    self._start(index, share)
                    first = {"fields": fields, "index": index, "addresses": addresses}
                    self._send(index, first)
                self.described = self._answers()[0]
        except BaseException:
            self.close()
            raise

    def _start(self, index, share):
        pinned = {}
        if share.cores:
            set_cores = functools.partial(os.sched_setaffinity, 0, share.cores)
            pinned = {"preexec_fn": set_cores}
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.processes"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors[index],
                text=True,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
                **pinned,
            )
        )

    def all(self, what: str, num_calls: int, num_steps: int) -> "Timed":
        """All of them do something at the same time; see `serve`."""
        for index in range(len(self._processes)):
            self._send(index, [what, num_calls, num_steps])
        return Timed(self._answers())

    def first(self, what: str, num_calls: int, num_steps: int) -> "Timed":
        """The first one does something, while the others wait."""
        self._send(0, [what, num_calls, num_steps])
        return Timed([self._answer(0)])

    def _send(self, index, message):
        try:
            print(json.dumps(message), file=self._processes[index].stdin, flush=True)
        except BrokenPipeError:
            pass  # the answer will be missing

    def _answers(self):
        return [self._answer(index) for index in range(len(self._processes))]

    def _answer(self, index):
        line = self._processes[index].stdout.readline()
        if not line:
            self._errors[index].seek(0)
            lines = self._errors[index].read().strip().splitlines() or ["killed"]
            raise TowersError(f"process {index}: {lines[-1]}")
        return json.loads(line)

    def close(self) -> None:
        """Ends all of them and waits for that."""
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # what it was sent is lost
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(END_SECS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        for file in self._errors:
            file.close()

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_) -> None:
        self.close()


class Timed:
    """What processes have measured.

    Attributes:
        wall: for every call the seconds of the slowest process.
        processor: seconds of processor time of all calls, per process.
    """

    def __init__(self, answers: Sequence[dict[str, Any]]):
        walls = [answer["wall"] for answer in answers]
        self.wall = [max(secs) for secs in zip(*walls, strict=True)]
        self.processor = [answer["processor"] for answer in answers]

    @property
    def mean_processor(self) -> float:
        return statistics.mean(self.processor)


def loopback_bytes() -> int:
    """Bytes that were sent through the loopback device so far, by anybody."""
    counters = LOOPBACK.search(pathlib.Path("/proc/net/dev").read_text())[1]
    return int(counters.split()[8])


def serve() -> None:
    """Trains on commands, each a line of JSON that is answered by one.

    The first line has "fields" of Config, "addresses" of all workers and the "index" of
    this one. It is answered with "cores" of this process, "images" of its part of the
    batch, "buffers" that are all-reduced in a step, and their "bytes".

    A later line is [what, number of calls, number of steps of each]. It is answered
    with "wall", the seconds of every call, and "processor", the processor time of all:
        train       steps of the workers together
        alone       of this one by itself, with its part of the batch as the whole one
        all_reduce  the sums of a step, without the step
        number      the sum of a single number
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what TensorFlow prints is no answer
    first = json.loads(sys.stdin.readline())
    things, described = create_things(**first)
    print(json.dumps(described), file=answers, flush=True)
    for line in sys.stdin:
        what, num_calls, num_steps = json.loads(line)
        wall, used = [], time.process_time()
        for _ in range(num_calls):
            started = time.perf_counter()
            things[what](num_steps)
            wall.append(time.perf_counter() - started)
        answer = {"wall": wall, "processor": time.process_time() - used}
        print(json.dumps(answer), file=answers, flush=True)


def create_things(
    fields: dict, addresses: list[str], index: int
) -> tuple[dict[str, Callable[[int], object]], dict[str, int]]:
    """The functions of the commands by name, and the answer to the first line."""
    tf.get_logger().setLevel("ERROR")  # every trainer traces a step of its own
    config = Config(**fields)
    chosen = devices.configure("cpu", config.num_towers)
    workers = ALONE
    if len(addresses) > 1:
        workers = connect(
            addresses, index, num_gpus=0, communication="auto", wait_secs=120
        )
    part = build.part_of(config, chosen, workers)
    parts = trainers.on_still_batch(build.build(config, part=part))
    together = trainers.create_trainer(config, parts, chosen, workers=workers)
    summed, things = buffers(together), {"train": together.train}
    if config.num_towers == 1:
        own = dataclasses.replace(config, batch_size=part.size)
        things["alone"] = trainers.create_trainer(own, parts, chosen).train
    if workers.size > 1:
        things["all_reduce"] = summing(workers, summed)
        things["number"] = summing(workers, [(tf.float32, [])])
    for thing in things.values():
        thing(2)  # traces, and connects
    described = {
        "cores": devices.num_cores(),
        "images": part.size,
        "buffers": len(summed),
        "bytes": sum(
            dtype.size * tf.TensorShape(shape).num_elements() for dtype, shape in summed
        ),
    }
    return things, described


def buffers(trainer: Trainer) -> list[tuple[tf.DType, list[int]]]:
    """Type and shape of every buffer that the workers add up in a step, as traced."""
    found, to_visit = [], trainer.trace()
    while to_visit:
        graph = to_visit.pop()
        for op in graph.get_operations():
            to_visit += called(graph, op).values()
            if op.type.startswith("CollectiveReduce"):
                found.append((op.inputs[0].dtype, op.inputs[0].shape.as_list()))
    return found


def summing(
    workers: Workers, shapes: Sequence[tuple[tf.DType, list[int]]]
) -> Callable[[int], object]:
    """A function of a number of times: so often buffers are summed, in turn."""

    @tf.function(autograph=False)
    def run(num_times):
        def body(number, *sums):
            sums = [workers.sums([[x]])[0][0] for x in sums]  # of zeros
            return number + 1, *sums

        zeros = [tf.zeros(shape, dtype) for dtype, shape in shapes]
        _, summed, *_ = tf.while_loop(
            lambda number, *_: number < num_times, body, (0, *zeros)
        )
        return summed

    return lambda num_times: run(tf.constant(num_times)).numpy()


if __name__ == "__main__":
    serve()

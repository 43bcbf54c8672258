"""A trainer in a process of its own, to measure it beside others."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile


class TrainerProcess:
    """The trainer of a checkout's `benchmarks.trainers`, which takes steps on command.

    It starts by itself; several may do so at a time.

    Args:
        checkout: the folder with its `towers` and `benchmarks`.
        fields: of its Config.
        device: auto, cpu or gpu.
        steps: how many it takes to warm up, at least one.
        ready: whether on a batch that lies ready, not on a stream.
        options: others of the first line, see `trainers.serve`.

    Attributes:
        first_step_secs: time of the first step, with tracing it and all else; None
            before `wait`.
        processor: seconds of processor time of each call of `train`.
    """

    def __init__(
        self,
        checkout: pathlib.Path,
        fields: dict,
        device: str,
        steps: int,
        ready: bool = True,
        **options,
    ):
        self.first_step_secs, self.processor = None, []
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "benchmarks.trainers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout)},
        )
        first = {"fields": fields, "device": device, "steps": steps, "ready": ready}
        self._say(json.dumps(first | options))

    def wait(self) -> None:
        """Waits for the steps that warm up."""
        self.first_step_secs = self._answer()

    def train(self, num_steps: int) -> None:
        self._say(str(num_steps))
        self.processor.append(self._answer())

    def close(self) -> None:
        """Ends the process and waits for it."""
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._errors.close()

    def _say(self, line):
        with contextlib.suppress(BrokenPipeError):  # the answer will be missing
            print(line, file=self._process.stdin, flush=True)

    def _answer(self):
        answer = self._process.stdout.readline()
        if not answer:
            self._errors.seek(0)
            lines = self._errors.read().strip().splitlines() or ["killed"]
            raise RuntimeError(lines[-1])
        return float(answer)

"""A run of 20,000 steps holds as much at its end as at its beginning.

As a program, this is the run: with everything on, and the smallest network, data and
steps there are, so that many of them take minutes. Every EVERY_STEPS steps a line of
JSON on the standard error says what the process holds.
"""

import ctypes
import gc
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import small_runs
from processes import environ_of

from towers import callbacks
from towers.training.train import train

NUM_STEPS, EVERY_STEPS = 20_000, 1000
# Native memory of the summaries settles after about 600 of them.
WARM_UP_STEPS = 14_000
OPTIONS = {
    "num_epochs": NUM_STEPS * 10 / 50,
    "num_towers": 2,
    "batch_size": 10,
    "learning_rate": 0.01,
    "clip_norm": 1.0,
    "log_every_steps": 20,
    "summary_every_steps": 20,
    "eval_every_epochs": 8.0,  # 40 steps
    "checkpoint_every_secs": 3.0,
    "keep_checkpoints": 2,
}


class Sample(callbacks.Callback):
    def on_log(self, step, metrics):
        if step % EVERY_STEPS:
            return
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed
        status = pathlib.Path("/proc/self/status").read_text()
        held = {
            "step": step,
            "rss_mb": int(re.search(r"VmRSS:\s*(\d+) kB", status)[1]) / 1024,
            "threads": len(os.listdir("/proc/self/task")),
            "files": len(os.listdir("/proc/self/fd")),
            "objects": len(gc.get_objects()),
        }
        print(json.dumps(held), file=sys.stderr, flush=True)


@pytest.mark.slow
def test_a_long_run_grows_neither_in_memory_nor_in_what_it_holds(tmp_path):
    done = subprocess.run(
        [sys.executable, __file__, tmp_path / "run"],
        # glibc then gives back what was freed; else it keeps 8 MB more now and then.
        env=environ_of({"MALLOC_MMAP_THRESHOLD_": "1000000"}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("{")]
    samples = list(map(json.loads, lines))
    assert len(samples) == NUM_STEPS // EVERY_STEPS
    steady = [sample for sample in samples if sample["step"] >= WARM_UP_STEPS]
    ranges = {
        name: max(x[name] for x in steady) - min(x[name] for x in steady)
        for name in ("rss_mb", "threads", "files")
    }
    # A checkpoint that is being written has a thread, and up to three open files.
    assert ranges["rss_mb"] < 5 and ranges["threads"] <= 2 and ranges["files"] <= 6
    assert steady[-1]["objects"] - steady[0]["objects"] < 500


if __name__ == "__main__":
    small_runs.use(pytest.MonkeyPatch(), small_runs.full_network)
    train(sys.argv[1], small_runs.small_config(**OPTIONS), callbacks=[Sample()])

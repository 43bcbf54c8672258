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
import time

import pytest
import small_runs
from processes import environ_of

from towers import callbacks
from towers.training.train import train

NUM_STEPS, EVERY_STEPS = 20_000, 1000
# Native memory of the summaries settles after about 600 of them.
WARM_UP_STEPS = 14_000
NUM_TOWERS, BATCH_SIZE, TRAIN_IMAGES = 2, 10, 50
LOG_EVERY, SUMMARY_EVERY, EVAL_EVERY = 20, 20, 40  # steps


def soak_config():
    options = {
        "num_epochs": NUM_STEPS * BATCH_SIZE / TRAIN_IMAGES,
        "num_towers": NUM_TOWERS,
        "batch_size": BATCH_SIZE,
        "learning_rate": 0.01,
        "clip_norm": 1.0,
        "log_every_steps": LOG_EVERY,
        "summary_every_steps": SUMMARY_EVERY,
        "eval_every_epochs": EVAL_EVERY * BATCH_SIZE / TRAIN_IMAGES,
        "checkpoint_every_secs": 3.0,
        "keep_checkpoints": 2,
    }
    return small_runs.small_config(**options)


def resident_mb() -> float:
    [line] = re.findall(
        r"VmRSS:\s*(\d+) kB", pathlib.Path("/proc/self/status").read_text()
    )
    return round(int(line) / 1024, 2)


def held(started: float) -> dict[str, float]:
    """What this process holds now.

    The allocator keeps memory that was freed, per thread: `rss_mb` is what is resident
    once it has given that back, `untrimmed_mb` what was before.
    """
    gc.collect()
    untrimmed_mb = resident_mb()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return {
        "secs": round(time.monotonic() - started, 1),
        "rss_mb": resident_mb(),
        "untrimmed_mb": untrimmed_mb,
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
    }


@pytest.mark.slow
def test_a_long_run_grows_neither_in_memory_nor_in_what_it_holds(tmp_path):
    workdir = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, __file__, workdir],
        # glibc then gives back what was freed; else it keeps 8 MB more now and then.
        env=environ_of({"MALLOC_MMAP_THRESHOLD_": "1000000"}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("{")]
    samples = [json.loads(line) for line in said]
    assert [s["step"] for s in samples] == [
        *range(EVERY_STEPS, NUM_STEPS + 1, EVERY_STEPS)
    ]
    steady = [sample for sample in samples if sample["step"] >= WARM_UP_STEPS]
    first = steady[0]

    rss_mb = [sample["rss_mb"] for sample in steady]
    assert max(rss_mb) - min(rss_mb) < 5, rss_mb
    # A checkpoint that is being written has a thread, and up to three open files.
    assert {s["threads"] - first["threads"] for s in steady} <= {-1, 0, 1}
    assert {s["files"] - first["files"] for s in steady} <= {*range(-3, 4)}
    assert steady[-1]["objects"] - first["objects"] < 500


def main() -> None:
    small_runs.use(pytest.MonkeyPatch(), small_runs.full_network)
    started = time.monotonic()

    class Sample(callbacks.Callback):
        def on_log(self, step, metrics):
            if step % EVERY_STEPS == 0:
                line = json.dumps({"step": step, **held(started)})
                print(line, file=sys.stderr, flush=True)

    train(sys.argv[1], soak_config(), callbacks=[Sample()])


if __name__ == "__main__":
    main()

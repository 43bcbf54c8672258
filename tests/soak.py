"""A long run with everything on; for test_soak.py, which has it in its own process.

python soak.py WORKDIR NUM_STEPS EVERY_STEPS [FIELD=VALUE ...]

The network, the data and the steps are the smallest there are, so that many of them
take minutes. Every EVERY_STEPS steps a line of JSON on the standard error says what the
process holds; further arguments change fields of Config.
"""

import collections
import ctypes
import gc
import json
import os
import pathlib
import re
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from towers import quiet_imports

NUM_TOWERS, BATCH_SIZE, TRAIN_IMAGES = 2, 10, 50
LOG_EVERY, SUMMARY_EVERY, EVAL_EVERY = 20, 50, 40  # steps


def soak_config(num_steps: int, **changes):
    import small_runs

    options = {
        "num_epochs": num_steps * BATCH_SIZE / TRAIN_IMAGES,
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
    return small_runs.small_config(**options | changes)


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


def main() -> None:
    workdir, num_steps, every_steps = sys.argv[1], *map(int, sys.argv[2:4])
    changes = {k: json.loads(v) for k, v in (x.split("=") for x in sys.argv[4:])}
    with quiet_imports():
        import pytest
        import small_runs

        from towers import training
        from towers.run import metrics
    small_runs.use(pytest.MonkeyPatch(), small_runs.full_network)
    started, step = time.monotonic(), collections.deque([0], 1)
    append = metrics.MetricsFile.append

    def counted(self, record):
        step.append(record["step"])
        append(self, record)

    metrics.MetricsFile.append = counted
    reported = [0]

    def after_call():
        if step[0] >= reported[0] + every_steps:
            reported[0] = step[0] // every_steps * every_steps
            print(
                json.dumps({"step": step[0], **held(started)}),
                file=sys.stderr,
                flush=True,
            )

    training.train(workdir, soak_config(num_steps, **changes), after_call=after_call)


if __name__ == "__main__":
    main()

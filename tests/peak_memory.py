"""A child process of test_memory: trains a few steps and says how much it took.

peak_memory.py STRATEGY NUM_TOWERS GROUP_SIZE
"""

import dataclasses
import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import tensorflow as tf

from benchmarks import measure
from towers import build
from towers.config import Config
from towers.parallel import devices


def resident_bytes(field):
    """VmRSS, or its peak VmHWM, of this process."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", status)[1])


def main(strategy, num_towers, group_size):
    config = Config(
        dataset="synthetic",
        augment="none",
        batch_size=1024,
        optimizer="nesterov",
        momentum=0.9,
        device="cpu",
        strategy=strategy,
        num_towers=int(num_towers),
        group_size=int(group_size),
    )
    chosen = devices.configure("cpu", config.num_towers)
    parts = build.build(config)
    batch = parts.train_batches(tf.constant(0, tf.int64))
    parts = dataclasses.replace(parts, train_batches=measure.StillBatches(batch))

    # From here on, and not while the data were made.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    trained = build.create_strategy(config, parts, chosen)
    accounts = trained.memory()
    trained.train(3)
    peak = resident_bytes("VmHWM") - before
    accounted = sum(account.total for account in accounts)
    print(json.dumps({"peak": peak, "accounted": accounted}))


if __name__ == "__main__":
    main(*sys.argv[1:])

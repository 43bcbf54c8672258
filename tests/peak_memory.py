"""A child process of test_memory: trains a few steps and prints its peak of memory.

peak_memory.py STRATEGY NUM_TOWERS GROUP_SIZE
"""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks import measure, trainers
from benchmarks.graphs.memory import trainer_accounts
from towers import build
from towers.config import Config
from towers.parallel import devices


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

    # Measured from here on, not while the data are made.
    memory = measure.PeakMemory(chosen)
    trainer = trainers.create_on_constant_batch(config, parts, chosen)
    accounts = trainer_accounts(trainer)
    accounted = sum(account.total for account in accounts)
    # Next to other work on the machine the towers seldom compute all at once.
    for _ in range(5):
        trainer.train(3)
        peak = memory.growth_bytes()
        if peak > 0.9 * accounted:
            break
    print(json.dumps({"peak": peak, "accounted": accounted}))


if __name__ == "__main__":
    main(*sys.argv[1:])

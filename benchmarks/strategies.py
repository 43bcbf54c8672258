"""Time and memory of a step of every strategy, at one global batch.

    python -m benchmarks.strategies --data_dir=DATA

In turn in one process, on a batch that lies ready: every strategy on 1, 2, 4 and 8
devices, as a ratio to one tower. The devices are GPUs where there are any, else logical
devices of the CPU: these share its cores, so that the best that can be had is a ratio
of 1, and the table shows what the parallel form costs. On GPUs it shows scaling.

Memory is accounted (see `towers.parallel.memory`), in megabytes of the fullest device.
"""

import argparse
import dataclasses
import functools
import statistics

import towers  # noqa: F401  (before Keras: settles its backend)
from benchmarks import measure
from towers import build
from towers.config import config


def variants(most_devices: int) -> dict[str, dict]:
    """Name -> options, one tower first."""
    counts = [n for n in (1, 2, 4, 8) if n <= most_devices]
    found = {f"towers {n}": {"num_towers": n} for n in counts}
    for strategy in ("replicated", "async_towers"):
        for n in counts[1:]:
            found[f"{strategy} {n}"] = {"strategy": strategy, "num_towers": n}
    for group_size in (2, 4):
        for n in counts:
            if n >= group_size:
                found[f"model_parallel {n}, K={group_size}"] = {
                    "strategy": "model_parallel",
                    "num_towers": n,
                    "group_size": group_size,
                }
    return found


def create_strategies(settings, parts, chosen, options) -> dict:
    """Name -> strategy, all on the same batch."""
    parts = measure.on_still_batch(parts)
    return {
        name: build.create_strategy(
            dataclasses.replace(settings, **changes),
            parts,
            dataclasses.replace(chosen, towers=chosen.towers[: changes["num_towers"]]),
        )
        for name, changes in options.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", default="", help="CIFAR-10; synthetic without it")
    parser.add_argument("--model", default="cnn", choices=config.MODELS)
    parser.add_argument("--augment", default="tutorial", choices=config.AUGMENTS)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--device", default="auto", choices=config.DEVICES)
    parser.add_argument("--towers", type=int, default=8, help="most devices, on a CPU")
    parser.add_argument("--only", default="", help="variants that contain this word")
    parser.add_argument("--steps", type=int, default=20, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()

    chosen = measure.all_devices(options.device, options.towers)
    settings = config.Config(
        dataset="cifar10" if options.data_dir else "synthetic",
        data_dir=options.data_dir,
        model=options.model,
        augment=options.augment,
        batch_size=options.batch_size,
        input="stream",
    )
    found = variants(len(chosen.towers))
    found = {n: v for n, v in found.items() if n == "towers 1" or options.only in n}
    strategies = create_strategies(settings, build.build(settings), chosen, found)
    things = {
        name: functools.partial(strategy.train, options.steps)
        for name, strategy in strategies.items()
    }
    rates = [measure.matrix_rate(devices=chosen.towers)]
    wall, processor = measure.in_turn(things, options.rounds)
    rates.append(measure.matrix_rate(devices=chosen.towers))

    print(measure.report_head("Time and memory of every strategy"))
    print(
        f"{options.model}, float32, batch {options.batch_size} over all devices of "
        f"kind {chosen.kind}; {options.rounds} rounds of {options.steps} steps, one "
        f"more to warm up; {measure.told_rates(*rates)}\n"
    )
    print(
        "| strategy, devices | ms a step, median | time / one tower (min, median, max)"
        " | processor time / one tower | MB, fullest device | MB, all |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for name, strategy in strategies.items():
        accounts = [account.total / 1e6 for account in strategy.memory()]
        cells = [
            f"{1e3 * statistics.median(wall[name]) / options.steps:.1f}",
            " ".join(f"{x:.3f}" for x in measure.ratios(wall, name, "towers 1")),
            f"{measure.ratios(processor, name, 'towers 1')[1]:.3f}",
            f"{max(accounts):.1f}",
            f"{sum(accounts):.1f}",
        ]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

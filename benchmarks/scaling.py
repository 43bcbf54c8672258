"""What more towers bring, and what holds them back.

    python -m benchmarks.scaling --model=cnn

For 1, 2, 4 and 8 towers, in turn in one process: images/s at one batch for all (strong)
and at a batch that grows with the towers (weak), and where the time of a step goes:
- input: training on the stream less the step on a batch that lies ready;
- meeting: that step less one in which towers compute their gradients and never meet
  (with one tower: the update alone);
- compute: the rest.

The devices are GPUs where there are any. Logical devices of a CPU share its cores: the
best that can be had there is the speed of one tower, and that is what the efficiency is
against.
"""

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Mapping
from unittest import mock

import tensorflow as tf

import towers  # noqa: F401  (before Keras: settles its backend)
from benchmarks import measure
from towers import build
from towers.config import config
from towers.parallel import STRATEGIES, devices
from towers.parallel.gradients import squared_norm
from towers.parallel.synchronous import Met
from towers.parallel.towers import Towers

GOOD_EFFICIENCY = 0.95


class WithoutMeeting(Towers):
    """Towers that compute their gradients and update nothing."""

    def _meet(self, stage, batch):
        results = self._results(stage, self._fetch(), batch)
        norms = []
        for device, result in zip(self._devices, results, strict=True):
            with tf.device(device):
                norms.append(squared_norm(result.gradients))
        with tf.device(devices.HOST):
            norm, no_decay = tf.add_n(norms), tf.zeros([])
        return Met([[r] for r in results], no_decay, norm, [], [], [])

    def _apply(self, step, met):
        return []


def things_of(settings: config.Config, chosen: devices.Devices, num_steps: int) -> dict:
    """What is timed for one number of towers: name -> a call of so many steps."""
    parts = build.build(settings)
    still = measure.on_still_batch(parts)
    ready = dataclasses.replace(settings, input="stream")
    strategies = {
        "loop": build.create_strategy(settings, parts, chosen),
        "step": build.create_strategy(ready, still, chosen),
    }
    with mock.patch.dict(STRATEGIES, towers=WithoutMeeting):
        strategies["compute"] = build.create_strategy(ready, still, chosen)
    return {
        name: functools.partial(strategy.train, num_steps)
        for name, strategy in strategies.items()
    }


def verdict(efficiency: float, shares: Mapping[str, float], kind: str) -> str:
    """One sentence: what keeps the most towers from the speed that they could have."""
    said = f"Efficiency {efficiency:.2f} at the most towers: "
    if efficiency >= GOOD_EFFICIENCY:
        return said + "nothing holds this machine back."
    lost = 1 - efficiency
    if shares["input"] >= max(shares["meeting"], lost / 2):
        return said + "the input holds this machine back (see docs/input.md)."
    if shares["meeting"] >= lost / 2:
        return said + (
            "the transfer of variables and gradients holds this machine back; try "
            "--strategy=replicated, or a larger batch."
        )
    small = "a step of each tower that is too small"
    shared = " for cores that all of them share" if kind == "CPU" else ""
    return f"{said}{small}{shared} holds this machine back; try a larger batch."


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", default="", help="CIFAR-10; synthetic without it")
    parser.add_argument("--model", default="cnn", choices=config.MODELS)
    parser.add_argument("--augment", default="tutorial", choices=config.AUGMENTS)
    parser.add_argument("--batch_size", type=int, default=128, help="of one tower")
    parser.add_argument("--towers", type=int, default=8, help="most devices, on a CPU")
    parser.add_argument("--device", default="auto", choices=config.DEVICES)
    parser.add_argument("--steps", type=int, default=10, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    chosen = measure.all_devices(options.device, options.towers)
    counts = [n for n in (1, 2, 4, 8) if n <= len(chosen.towers)]
    cases, things = [], {}
    for scaling in ("strong", "weak"):
        for n in counts:
            if scaling == "weak" and n == 1:
                continue
            settings = config.Config(
                dataset="cifar10" if options.data_dir else "synthetic",
                data_dir=options.data_dir,
                model=options.model,
                augment=options.augment,
                batch_size=options.batch_size * (n if scaling == "weak" else 1),
                num_epochs=1000.0,
            )
            first = dataclasses.replace(chosen, towers=chosen.towers[:n])
            cases.append((scaling, n, settings.batch_size))
            for name, call in things_of(settings, first, options.steps).items():
                things[scaling, n, name] = call
    rates = [measure.matrix_rate(devices=chosen.towers)]
    wall, _ = measure.in_turn(things, options.rounds)
    rates.append(measure.matrix_rate(devices=chosen.towers))

    print(measure.report_head("Scaling"))
    print(
        f"{options.model}, float32, {len(chosen.towers)} device(s) of kind "
        f"{chosen.kind}; {options.rounds} rounds of {options.steps} steps, one more to "
        f"warm up; {measure.told_rates(*rates)}\n"
    )
    print(
        "| scaling | towers | batch | images/s, median (min, max) | efficiency | "
        "input | meeting | compute |\n|" + " --- |" * 8
    )
    medians = {k: statistics.median(v) / options.steps for k, v in wall.items()}
    one = options.batch_size / medians["strong", 1, "loop"]
    found = {}
    for scaling, n, batch in cases:
        loop, step, compute = (
            medians[scaling, n, name] for name in ("loop", "step", "compute")
        )
        speeds = sorted(batch * options.steps / s for s in wall[scaling, n, "loop"])
        ideal = one * (n if chosen.kind == "GPU" else 1)
        shares = {"input": (loop - step) / loop, "meeting": (step - compute) / loop}
        shares["compute"] = 1 - sum(shares.values())
        found[scaling, n] = batch / loop / ideal, shares
        print(
            f"| {scaling} | {n} | {batch} | {batch / loop:.0f} ({speeds[0]:.0f}, "
            f"{speeds[-1]:.0f}) | {batch / loop / ideal:.3f} | "
            + " | ".join(f"{share:.1%}" for share in shares.values())
            + " |"
        )
    efficiency, shares = found["weak" if len(counts) > 1 else "strong", counts[-1]]
    update = found["strong", 1][1]["meeting"]  # which one tower has as well
    shares = shares | {"meeting": shares["meeting"] - update}
    print("\n" + verdict(efficiency, shares, chosen.kind))


if __name__ == "__main__":
    main()

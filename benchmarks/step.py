"""The time and memory of a step: of networks, strategies, precisions and towers.

    python -m benchmarks.step --models=cnn,resnet20 --precisions=float32,bfloat16

Every combination in turn in one process, on a batch that lies ready: its time as a
ratio to the first combination with that network, its arithmetic per second (three times
that of the forward pass), and the share of that in the rate of plain matrix products of
the same type, which are measured in every round. Of memory the table shows the
variables of the fullest device, and the peak: the growth of the fullest GPU, or of the
process, until the first steps are done. Of several combinations the later ones take
memory that the earlier ones have freed: for the peak of one, measure it alone.

With several numbers of towers each logical device of a CPU may use all cores, otherwise
devices are as in a training with so many. They share the cores: the best ratio there is
1, and the table shows what the parallel form costs. On GPUs it shows scaling.

With `--scaling`: speed at one batch for all towers (strong) and at one that grows with
them (weak), and where the time of a step goes:
- input: training on the stream less the step on a batch that lies ready;
- communication: that step less one of a single tower with its share of the batch
  (where towers share a CPU: with the whole batch; the cost of the parallel form);
- compute: the rest.

With `--against=CHECKOUT`: the trainers of this checkout and of another, built alike in
two processes, take turns; the ratios of each pair, this over the other. Next to other
work on the machine those of processor time are the steadier. The checkout
itself, `--against=.`, shows how far chance alone carries the ratio; so do several runs,
because one process may be faster than the next.

With `--against=CHECKOUT --first_step`: the time of the first step, tracing included, in
a new process for every trainer and round.
"""

import argparse
import functools
import itertools
import json
import pathlib
import statistics

import tensorflow as tf

from benchmarks import checkouts, measure, trainers
from benchmarks.flops import flops_per_image
from towers import build
from towers.config import Config
from towers.errors import TowersError


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = measure.create_parser(__doc__)
    for name, default in (
        ("--models", "cnn"),
        ("--strategies", "towers"),
        ("--precisions", "float32"),
        ("--compilers", "none"),
    ):
        parser.add_argument(name, type=measure.names, default=default)
    parser.add_argument("--towers", type=measure.numbers, default="1")
    parser.add_argument("--group_sizes", type=measure.numbers, default="2")
    parser.add_argument(
        "--fields", default="{}", help="other fields of Config, as JSON"
    )
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--against", type=pathlib.Path, help="another checkout")
    parser.add_argument("--first_step", action="store_true")
    return parser.parse_args(argv)


def combinations(options: argparse.Namespace) -> list[dict]:
    """The fields of Config of every combination."""
    common = trainers.STEP_ALONE | measure.dataset(options)
    common |= {"batch_size": options.batch_size, "device": options.device}
    common |= json.loads(options.fields)
    axes = {
        "model": options.models,
        "precision": options.precisions,
        "compile": options.compilers,
        "strategy": options.strategies,
        "num_towers": options.towers,
    }
    result = []
    for values in itertools.product(*axes.values()):
        fields = common | dict(zip(axes, values, strict=True))
        sizes, num_towers = [1], fields["num_towers"]
        if fields["strategy"] == "model_parallel":
            sizes = [k for k in options.group_sizes if k <= num_towers] or [num_towers]
        result += [fields | {"group_size": size} for size in sizes]
    for fields in result:
        Config(**fields)  # refuses what does not fit before anything is measured
    return result


def cells(fields: dict) -> tuple:
    """The first columns of a row."""
    parts = f", K={fields['group_size']}" if fields["group_size"] > 1 else ""
    return (
        fields["model"],
        f"{fields['strategy']}{parts}",
        fields["num_towers"],
        fields["precision"] + (", xla" if fields["compile"] == "xla" else ""),
    )


COLUMNS = "network | strategy | towers | precision"


def compare_steps(options: argparse.Namespace) -> None:
    """Every combination against the matrix rate, and against the first one."""
    combined = combinations(options)
    chosen = measure.all_devices(
        options.device,
        max(options.towers),
        core_per_tower=len(set(options.towers)) == 1,
    )
    made, refused = {}, []
    for fields in combined:
        config = Config(**fields)
        try:
            parts = trainers.on_still_batch(
                build.build(config, device_kind=chosen.kind)
            )
            memory = measure.PeakMemory(chosen)
            trainer = trainers.create_trainer(config, parts, chosen)
            trainer.train(2)
        except (TowersError, tf.errors.OpError) as error:
            refused.append((cells(fields), str(error).splitlines()[0]))
            continue
        flops = 3 * flops_per_image(parts.model) * config.batch_size
        made[cells(fields)] = trainer, flops, memory.growth_bytes()

    rates = {precision: [] for precision in options.precisions}

    def add_rate(precision):
        rate = measure.matrix_rate(tf.as_dtype(precision), chosen.towers)
        rates[precision].append(rate)

    things = {p: functools.partial(add_rate, p) for p in rates}
    for name, (trainer, *_) in made.items():
        things[name] = functools.partial(trainer.train, options.steps)
    wall, processor = measure.in_turn(things, options.rounds)
    rates = {p: values[1:] for p, values in rates.items()}  # without the warm-up

    print(measure.report_head("A training step"))
    print(
        f"Batch {options.batch_size} over all devices of kind {chosen.kind}; "
        f"{options.rounds} rounds of {options.steps} steps, one more to warm up\n\n"
        + measure.table_head(
            f"{COLUMNS} | ms a step, median | images/s, median (min, max) | time / "
            "first (min, median, max) | processor time / first | GFLOP/s | matrix "
            "rate, GFLOP/s | share, round by round (of the best rate) | MB of "
            "variables, fullest device | MB at the peak"
        )
    )
    for name, (trainer, flops, peak) in made.items():
        first = next(other for other in made if other[0] == name[0])
        secs = [seconds / options.steps for seconds in wall[name]]
        speeds = sorted(options.batch_size / s for s in secs)
        rate = rates[name[-1].removesuffix(", xla")]
        shares = [flops / s / r for s, r in zip(secs, rate, strict=True)]
        median = statistics.median(secs)
        print(
            measure.table_row(
                *name,
                f"{1e3 * median:.1f}",
                f"{options.batch_size / median:.1f} "
                f"({speeds[0]:.1f}, {speeds[-1]:.1f})",
                " ".join(f"{x:.3f}" for x in measure.ratios(wall, name, first)),
                f"{measure.ratios(processor, name, first)[1]:.3f}",
                f"{flops / median / 1e9:.0f}",
                f"{statistics.median(rate) / 1e9:.0f}",
                f"{statistics.median(shares):.3f} ({flops / median / max(rate):.3f})",
                f"{max(trainer.variable_bytes().values()) / 1e6:.1f}",
                f"{peak / 1e6:.0f}",
            )
        )
    for name, reason in refused:
        print(measure.table_row(*name, reason))


def measure_scaling(options: argparse.Namespace) -> None:
    """Strong and weak scaling of the first network and strategy."""
    [fields, *_] = combinations(options)
    if options.data_dir:
        fields |= {"augment": "tutorial"}
    chosen = measure.all_devices(options.device, max(options.towers))
    counts = [n for n in options.towers if n <= len(chosen.towers)]
    cases = [("strong", n, options.batch_size) for n in counts]
    cases += [("weak", n, n * options.batch_size) for n in counts if n > 1]

    def thing(input_kind, num_towers, batch_size):
        changes = {"num_towers": num_towers, "batch_size": batch_size}
        config = Config(**fields | changes)
        parts = build.build(config, device_kind=chosen.kind)
        if input_kind == "ready":
            parts = trainers.on_still_batch(parts)
        trainer = trainers.create_trainer(config, parts, chosen)
        return functools.partial(trainer.train, options.steps)

    def keys(n, batch_size):
        share = max(1, batch_size // n) if chosen.kind == "GPU" else batch_size
        alone = "ready", 1, share
        return ("stream", n, batch_size), ("ready", n, batch_size), alone

    things = {key: thing(*key) for _, *case in cases for key in keys(*case)}
    rates = [measure.matrix_rate(devices=chosen.towers)]
    wall, _ = measure.in_turn(things, options.rounds)
    rates.append(measure.matrix_rate(devices=chosen.towers))

    print(measure.report_head("Scaling"))
    print(
        f"{fields['model']}, {fields['strategy']}, {fields['precision']}, "
        f"{len(chosen.towers)} device(s) of kind {chosen.kind}; {options.rounds} "
        f"rounds of {options.steps} steps, one more to warm up; "
        f"{measure.rates_text(rates)}\n\n"
        + measure.table_head(
            "scaling | towers | batch | images/s, median (min, max) | efficiency | "
            "input | communication | compute"
        )
    )
    medians = {key: statistics.median(s) / options.steps for key, s in wall.items()}
    one = options.batch_size / medians["stream", counts[0], options.batch_size]
    for kind, n, batch_size in cases:
        stream, ready, alone = (medians[key] for key in keys(n, batch_size))
        secs = wall["stream", n, batch_size]
        speeds = sorted(batch_size * options.steps / s for s in secs)
        times = n / counts[0] if chosen.kind == "GPU" else 1
        efficiency = batch_size / stream / one / times
        print(
            measure.table_row(
                kind,
                n,
                batch_size,
                f"{batch_size / stream:.0f} ({speeds[0]:.0f}, {speeds[-1]:.0f})",
                f"{efficiency:.3f}",
                f"{(stream - ready) / stream:.1%}",
                f"{(ready - alone) / stream:.1%}",
                f"{alone / stream:.1%}",
            )
        )


def main() -> None:
    options = parse_options()
    if options.against:
        compare = checkouts.compare_steps
        if options.first_step:
            compare = checkouts.compare_first_steps
        cases = {cells(fields): fields for fields in combinations(options)}
        compare(options, cases, COLUMNS)
    elif options.scaling:
        measure_scaling(options)
    else:
        compare_steps(options)


if __name__ == "__main__":
    measure.run(main)

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

With `--against=COMMIT`: the trainers of this checkout and of a commit, built alike in
two processes, take turns; the ratios of each pair, this over the other. Next to other
work on the machine those of processor time are the steadier. `--against=HEAD` of an
unchanged checkout shows how far chance alone carries the ratio; so do several runs,
because one process may be faster than the next.
"""

import argparse
import contextlib
import functools
import io
import itertools
import json
import pathlib
import statistics
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator

import tensorflow as tf

from benchmarks import measure, trainers
from benchmarks.operations import flops_per_image
from towers.build import builder
from towers.config import Config
from towers.errors import ConfigError, TowersError


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
    parser.add_argument("--against", help="a commit")
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
        if config.num_towers > len(chosen.towers):
            refused.append((cells(fields), f"{len(chosen.towers)} device(s)"))
            continue
        try:
            parts = builder.build(config, device_kind=chosen.kind)
            memory = measure.PeakMemory(chosen)
            trainer = trainers.create_on_constant_batch(config, parts, chosen)
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
                measure.ratios_text(wall, name, first),
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


@contextlib.contextmanager
def files_of(commit: str) -> Iterator[pathlib.Path]:
    """A folder with the files of a commit of this repository."""
    command = ["git", "archive", commit]
    done = subprocess.run(command, cwd=trainers.ROOT, capture_output=True, check=False)
    if done.returncode:
        reason = done.stderr.decode().strip().splitlines()[-1]
        raise ConfigError(f"--against={commit}: git says {reason!r}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
            files.extractall(folder, filter="data")
        yield pathlib.Path(folder)


def compare_commits(options: argparse.Namespace, other: pathlib.Path) -> None:
    """The steps of this checkout and of another one, of the same trainers in turn."""
    print(measure.report_head(f"A training step against {options.against}"))
    print(
        f"Batch {options.batch_size}; {options.rounds} pairs of {options.steps} steps, "
        "half of them with new processes made in the other order, two more to warm up "
        "each\n\n"
        + measure.table_head(
            f"{COLUMNS} | ms a step, this | ms, other | this / other, median "
            "(quartiles) | 95 % interval of the median | of processor time | 95 % | "
            "first step, s: this, other"
        )
    )
    for fields in combinations(options):
        try:
            wall, processor, first = measure_pairs(options, fields, other)
        except TowersError as error:
            print(measure.table_row(*cells(fields), error), flush=True)
            continue
        medians = [1e3 * statistics.median(s) / options.steps for s in wall.values()]
        reach = min(50, 98 / options.rounds**0.5)  # of percentiles, by order statistics
        percentiles = (25, 50, 75, 50 - reach, 50 + reach)
        ratios = []
        for seconds in (wall, processor):
            q1, median, q3, low, high = measure.ratios(
                seconds, "this", "other", percentiles
            )
            ratios += [f"{median:.4f} ({q1:.3f}, {q3:.3f})", f"{low:.4f}, {high:.4f}"]
        firsts = ", ".join(f"{statistics.mean(secs):.1f}" for secs in first.values())
        print(
            measure.table_row(
                *cells(fields), *(f"{ms:.2f}" for ms in medians), *ratios, firsts
            ),
            flush=True,
        )


def measure_pairs(options, fields, other) -> tuple[dict, dict, dict]:
    """Seconds of every round, by the wall clock and of processor time, and of each
    first step.

    In two halves with new processes, because the one that is made first is slower than
    the other by two percent, whichever checkout it is of.
    """
    wall, processor, first = ({"this": [], "other": []} for _ in range(3))
    checkouts = {"this": trainers.ROOT, "other": other}
    for names in (list(checkouts), list(reversed(checkouts))):
        with contextlib.ExitStack() as stack:
            processes = {}
            for name in names:
                processes[name] = trainers.TrainerProcess(
                    fields, options.device, options.steps, checkouts[name]
                )
                stack.callback(processes[name].close)
                processes[name].wait()
            things = {
                name: functools.partial(process.train, options.steps)
                for name, process in processes.items()
            }
            rounds = -(-options.rounds // 2)
            seconds, _ = measure.in_turn(things, rounds, warm_up=2)
        for name, process in processes.items():
            wall[name] += seconds[name]
            processor[name] += process.processor[-rounds:]
            first[name].append(process.first_step_secs)
    return wall, processor, first


def main() -> None:
    options = parse_options()
    if options.against:
        with files_of(options.against) as folder:
            compare_commits(options, folder)
    else:
        compare_steps(options)


if __name__ == "__main__":
    measure.run(main)

"""The comparison of runs: a table in the terminal, and a web page."""

import dataclasses
import math
import os
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from towers import console, store
from towers.config import FIELDS, Config, parse_json
from towers.config.metrics import recorded_metrics, title_of
from towers.errors import ConfigError
from towers.metrics.results import reported_figure, with_interval
from towers.report import page
from towers.report.run_page import curve_chart, metric_series
from towers.report.run_report import curves_of, result_of_records
from towers.run.folder import RunFolder
from towers.run.records import read_metrics
from towers.run.stored_config import stored_config

# Options without influence on the result.
_PERIODS = {
    *("log_every_steps", "summary_every_steps", "summary_every_secs"),
    *("checkpoint_every_secs", "checkpoint_every_steps", "keep_checkpoints"),
}

_SPLITS = ("test", "validation")

# Student's t, the 97.5 % quantiles for 1 to 9 degrees of freedom.
_QUANTILES = 12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622


class ComparedRun(NamedTuple):
    """A run in a comparison."""

    name: str  # of its folder
    config: Config
    results: Mapping[str, Mapping[str, Any]]  # split -> as in `result.json`
    curves: Mapping[str, Any]  # as in `report.json`


def compare(workdirs: Sequence[str | os.PathLike]) -> pathlib.Path:
    """Print a table of runs, and write a page with their results, curves and options.

    If the runs are two groups that differ in more than the seed, and have the same
    seeds, also the mean difference of their results with its 95 % interval.

    Args:
        workdirs: folders of two or more runs.

    Returns:
        The path of the page, `report/compare.html` in the first folder.

    Raises:
        TowersError: such as a ConfigError if a folder holds no run.
    """
    if len(workdirs) < 2:
        names = ",".join(map(str, workdirs))
        raise ConfigError(f"compare={names}: give two runs or more")
    folders = [RunFolder(workdir) for workdir in workdirs]
    runs = []
    for name, folder in zip(_names(folders), folders, strict=True):
        records = read_metrics(folder.metrics)[0]
        results, curves = _results(folder, records), curves_of(records)
        runs.append(ComparedRun(name, stored_config(folder), results, curves))
    rows, differing = list(_rows(runs)), _differing(runs)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{x:{width}}" for x, width in zip(row, widths, strict=True))
        console.line("  ".join(cells).rstrip())
    for name, values in differing.items():
        console.line(f"{name}: {' | '.join(str(x) or 'empty' for x in values)}")
    if difference := paired_difference(runs):
        console.line(difference)
    path = folders[0].report / "compare.html"
    text = _page(runs, rows, differing, difference)
    try:
        store.make_folders(path.parent)
        store.write_aside(path, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    console.line(f"comparison: {path}")
    return path


def paired_difference(runs: Sequence[ComparedRun]) -> str:
    """Describe the mean difference of two groups of runs with the same seeds."""
    split = next((x for x in _SPLITS if all(x in run.results for run in runs)), None)
    groups: dict[tuple, dict[int, ComparedRun]] = {}  # other options -> seed -> run
    for run in runs:
        same = dataclasses.asdict(run.config) | dict.fromkeys(["seed", *_PERIODS])
        groups.setdefault(tuple(same.values()), {})[run.config.seed] = run
    if split is None or len(groups) != 2:
        return ""
    one_group, other_group = groups.values()
    seeds = sorted(one_group.keys() & other_group.keys())
    if not seeds or len(one_group) + len(other_group) < len(runs):
        return ""
    name = "map" if all(_figure(run, split, "map") for run in runs) else "accuracy"
    names = [option for option in _differing(runs) if option != "seed"]
    one, other = (
        " ".join(f"{x}={getattr(group[seeds[0]].config, x)}" for x in names)
        for group in (one_group, other_group)
    )
    differences = [
        reported_figure(other_group[seed].results[split], name)
        - reported_figure(one_group[seed].results[split], name)
        for seed in seeds
    ]
    mean = statistics.fmean(differences)
    text = f"{split.capitalize()} {title_of(name)} with {other} minus {one}: "
    text += f"{mean:+.4f}"
    if len(seeds) > 1:
        error = statistics.stdev(differences) / math.sqrt(len(seeds))
        reach = t_quantile(len(seeds) - 1) * error
        text += f", 95 % interval {mean - reach:+.4f} to {mean + reach:+.4f}"
    return f"{text}; mean over pairs of the same seed ({', '.join(map(str, seeds))})"


def _names(folders):
    """Return the last part of each path, or whole paths if some are alike."""
    paths = [os.path.normpath(folder.path) for folder in folders]
    names = list(map(os.path.basename, paths))
    return names if len(set(names)) == len(names) else paths


def _results(folder, records):
    """Return split -> its last evaluation, of held-out images the best step's."""
    try:
        best = int(folder.best.read_text().removeprefix("step-"))
    except (OSError, ValueError):
        best = None
    best_records = [record for record in records if record.get("step") == best]
    candidates = [
        result_of_records(some, [split])
        for some in (records, best_records)
        for split in _SPLITS
    ]
    for path, key in ((folder.report / "report.json", "result"), (folder.result, None)):
        try:
            content = parse_json(path.read_bytes())
            candidates.append({"step": 0} | (content[key] if key else content))
        except (OSError, ValueError, LookupError, TypeError):
            continue
    ranks, results = {}, {}
    for result in candidates:
        split = str(result.get("reported")).partition("_")[0]
        if split in _SPLITS and reported_figure(result, "accuracy") is not None:
            rank = result["step"] == best, result["step"]
            if rank >= ranks.get(split, rank):
                ranks[split], results[split] = rank, result
    return results


def t_quantile(freedom: int) -> float:
    """Return Student's t at 97.5 %, to 0.003 (Abramowitz and Stegun 26.7.5)."""
    if freedom <= len(_QUANTILES):
        return _QUANTILES[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


def _differing(runs):
    """Return option -> its values in the runs, if they differ."""
    names = [name for name in FIELDS if name not in _PERIODS]
    values = {name: [getattr(run.config, name) for run in runs] for name in names}
    return {name: x for name, x in values.items() if len(set(x)) > 1}


def _rows(runs) -> Iterator[list[str]]:
    """Yield the rows of the table: a column for each split and metric."""
    kinds = [
        (split, name)
        for split in _SPLITS
        for name in recorded_metrics()
        if any(_figure(run, split, name) for run in runs)
    ]
    titles = [f"{split} {title_of(name)}" for split, name in kinds]
    yield ["run", *titles, "weights", "step", "images/s"]
    for run in runs:
        result = run.results.get("test") or run.results.get("validation", {})
        speed, reported = result.get("images_per_sec"), result.get("reported", "")
        yield [
            run.name,
            *(_figure(run, *kind) for kind in kinds),
            ("EMA" if reported.endswith("_ema") else "raw") if reported else "",
            f"{result.get('step', 'not evaluated')}",
            f"{speed:,.0f}" if speed else "",
        ]


def _figure(run, split, name):
    """Return a figure with its 95 % interval as a text; empty if unknown."""
    result = run.results.get(split, {"reported": None})
    value = reported_figure(result, name)
    interval = reported_figure(result, f"{name}_interval")
    return "" if value is None else with_interval(value, interval)


def _page(runs, rows, differing, difference):
    head, *rows = rows
    names = [run.name for run in runs]
    options = page.paragraph("All options are alike.")
    if differing:
        cells = [[name, *map(str, x)] for name, x in differing.items()]
        options = page.table(["option", *names], cells)
    return page.page(
        f"Comparison of {', '.join(names)}",
        [
            f"<h1>Comparison of {len(runs)} runs</h1>",
            page.table(head, rows),
            page.paragraph(f"{difference}.") if difference else "",
            _curves(runs),
            page.section("Options that differ", options),
        ],
    )


def _curves(runs):
    # A color per run.
    kinds = [
        (f"{split} {title_of(name)}", name, [f"{split}_{name}_ema", f"{split}_{name}"])
        for name in recorded_metrics()
        for split in _SPLITS
    ]
    kinds.append(("training loss", "loss", ["epoch_loss", "loss"]))
    kinds.append(("learning rate", "learning_rate", ["learning_rate"]))
    panels = []
    for title, metric, names in kinds:
        series = []
        for color, run in enumerate(runs):
            curves = (metric_series(run.curves, x, run.name, color) for x in names)
            series += next(filter(None, curves), [])
        if series:
            panels.append(curve_chart(title, series, metric))
    return page.section("Curves", page.grid(*panels)) if panels else ""

"""The formulas of `benchmarks.scaling --paper` against computations of another kind."""

import itertools
import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import loopback, measure, paper, scaling
from towers import build
from towers.config import Config

HOUR = 3600.0
ROOT = pathlib.Path(__file__).parents[1]


def network(**changes):
    fields = {
        "gpus_per_machine": 4,
        "inner_bytes_per_sec": 50e9,
        "outer_bytes_per_sec": 50e9,
        "inner_hop_secs": 3e-6,
        "outer_hop_secs": 20e-6,
    }
    return paper.Network(**fields | changes)


class Wire:
    """Counts what is sent.

    Attributes:
        inner: bytes of every GPU to others of its machine.
        outer: bytes of every machine to others.
    """

    def __init__(self, num_gpus, gpus_per_machine):
        self._per_machine = gpus_per_machine
        self.inner = np.zeros(num_gpus)
        self.outer = np.zeros(-(-num_gpus // gpus_per_machine))

    def send(self, values, sender, receiver):
        machine = sender // self._per_machine
        if machine == receiver // self._per_machine:
            self.inner[sender] += values.nbytes
        else:
            self.outer[machine] += values.nbytes
        return values.copy()


def reduce_scatter(pieces, gpus, wire):
    """Around a ring of GPUs: then the i-th has the sum of piece (i + 1) mod n."""
    n = len(gpus)
    for step in range(n - 1):
        sent = [
            wire.send(pieces[gpus[i]][(i - step) % n], gpus[i], gpus[(i + 1) % n])
            for i in range(n)
        ]
        for i in range(n):
            pieces[gpus[(i + 1) % n]][(i - step) % n] += sent[i]


def all_gather(pieces, gpus, wire):
    n = len(gpus)
    for step in range(n - 1):
        sent = [
            wire.send(pieces[gpus[i]][(i + 1 - step) % n], gpus[i], gpus[(i + 1) % n])
            for i in range(n)
        ]
        for i in range(n):
            pieces[gpus[(i + 1) % n]][(i + 1 - step) % n] = sent[i]


def ring(vectors, gpus, wire):
    """The sums of vectors of GPUs, all-reduced around a ring of them."""
    pieces = {gpu: np.split(vectors[gpu].copy(), len(gpus)) for gpu in gpus}
    reduce_scatter(pieces, gpus, wire)
    all_gather(pieces, gpus, wire)
    return {gpu: np.concatenate(pieces[gpu]) for gpu in gpus}


def test_bytes_of_a_ring_are_those_of_one_that_sends_them():
    for n, per_machine in ((2, 8), (3, 8), (8, 8), (8, 4), (12, 4), (6, 1), (2, 1)):
        vectors = np.random.default_rng(n).normal(size=(n, 240))
        wire = Wire(n, per_machine)
        for summed in ring(dict(enumerate(vectors)), range(n), wire).values():
            np.testing.assert_allclose(summed, vectors.sum(0), rtol=1e-12)
        formula = paper.ring(
            n, vectors[0].nbytes, network(gpus_per_machine=per_machine)
        )
        # The last GPU of a machine sends to the next one instead.
        assert formula.inner_bytes == pytest.approx(wire.inner.max())
        np.testing.assert_allclose(wire.outer, formula.outer_bytes)


def test_bytes_within_and_between_machines_are_those_of_an_all_reduce_that_sends_them():
    for machines, per_machine in ((1, 4), (2, 4), (3, 8), (5, 2), (4, 1)):
        n = machines * per_machine
        vectors = np.random.default_rng(n).normal(size=(n, 240))
        wire = Wire(n, per_machine)
        rows = np.arange(n).reshape(machines, per_machine)
        pieces = {gpu: np.split(vectors[gpu].copy(), per_machine) for gpu in range(n)}
        for row in rows:
            reduce_scatter(pieces, row, wire)
        for place, column in enumerate(rows.T):
            piece = (place + 1) % per_machine
            sums = ring({gpu: pieces[gpu][piece] for gpu in column}, column, wire)
            for gpu in column:
                pieces[gpu][piece] = sums[gpu]
        for row in rows:
            all_gather(pieces, row, wire)
        for gpu in range(n):
            np.testing.assert_allclose(
                np.concatenate(pieces[gpu]), vectors.sum(0), rtol=1e-12
            )
        formula = paper.hierarchical(
            n, vectors[0].nbytes, network(gpus_per_machine=per_machine)
        )
        np.testing.assert_allclose(wire.inner, formula.inner_bytes)
        np.testing.assert_allclose(wire.outer, formula.outer_bytes)


def secs_until_all_have(sizes_secs, hop_secs, num_steps):
    """The time of a ring by its events.

    Args:
        sizes_secs: per link, how long a message occupies it.
        hop_secs: per link, how long it takes to arrive after that.
        num_steps: messages of each GPU; it sends the next one when the one before has
            left and the one that it passes on has come.
    """
    n = len(hop_secs)
    free, arrived = [0.0] * n, [0.0] * n
    for _ in range(num_steps):
        begun = [max(free[i], arrived[i]) for i in range(n)]
        free = [begun[i] + sizes_secs[i] for i in range(n)]
        arrived = [free[i - 1] + hop_secs[i - 1] for i in range(n)]
    return max(arrived)


def test_time_of_a_ring_is_that_of_its_events():
    net, num_bytes = network(), 24e6
    for n in (3, 4, 8, 16, 32):
        hops = [
            net.outer_hop_secs if n > 4 and i % 4 == 3 else net.inner_hop_secs
            for i in range(n)
        ]
        size_secs = num_bytes / n / net.inner_bytes_per_sec
        expected = secs_until_all_have([size_secs] * n, hops, 2 * (n - 1))
        formula = paper.ring(n, num_bytes, net)
        assert paper.secs_of_ring(formula, net) == pytest.approx(expected)


def test_the_slowest_link_of_a_ring_decides():
    net = network(outer_bytes_per_sec=5e9)
    num_bytes, n = 24e6, 32
    hops = [net.outer_hop_secs if i % 4 == 3 else net.inner_hop_secs for i in range(n)]
    sizes = [num_bytes / n / (5e9 if i % 4 == 3 else 50e9) for i in range(n)]
    events = secs_until_all_have(sizes, hops, 2 * (n - 1))
    formula = paper.secs_of_ring(paper.ring(n, num_bytes, net), net)
    # Messages need not wait for all hops and for the slowest link at once.
    assert 0.85 * formula < events < formula


def test_time_of_a_hierarchical_all_reduce_is_that_of_its_events():
    net, num_bytes, g, m = network(outer_bytes_per_sec=5e9), 24e6, 4, 6
    inner_secs = num_bytes / g / net.inner_bytes_per_sec
    inner = secs_until_all_have([inner_secs] * g, [net.inner_hop_secs] * g, g - 1)
    # All GPUs of a machine share its link.
    outer_secs = num_bytes / g / m / (net.outer_bytes_per_sec / g)
    steps = 2 * (m - 1)
    outer = secs_until_all_have([outer_secs] * m, [net.outer_hop_secs] * m, steps)
    formula = paper.hierarchical(g * m, num_bytes, net)
    expected = inner + outer + inner
    assert paper.secs_of_hierarchical(formula, net) == pytest.approx(expected)


def test_buffers_pay_latency_each_and_bandwidth_together():
    net = network()
    small, whole = (paper.ring(8, size, net) for size in (1e6, 3e6))
    assert paper.secs_of_ring(whole, net, 3) == pytest.approx(
        3 * paper.secs_of_ring(small, net)
    )


def test_machines_that_are_not_full_are_refused():
    with pytest.raises(ValueError, match="10 GPUs do not fill 3 machines"):
        paper.hierarchical(10, 1.0, network())


# Stragglers.


def test_expected_maximum_is_the_mean_over_all_draws():
    secs = [5.0, 1.0, 2.0, 2.5]
    for n in (1, 2, 3, 5):
        draws = itertools.product(secs, repeat=n)
        expected = np.mean([max(draw) for draw in draws])
        assert paper.expected_max(secs, n) == pytest.approx(expected, rel=1e-12)


def test_expected_maximum_is_that_of_a_simulation():
    rng = np.random.default_rng(0)
    secs = rng.gamma(20.0, 0.005, size=200)
    for n in (8, 64, 512):
        slowest = rng.choice(secs, size=(20_000, n)).max(axis=1)
        error = slowest.std() / math.sqrt(len(slowest))
        assert abs(paper.expected_max(secs, n) - slowest.mean()) < 5 * error
    assert paper.expected_max(secs, 10**6) == pytest.approx(secs.max())


# Failures.


def numeric_minimum(function, low, high):
    """Where a function of one minimum has it, by golden sections."""
    ratio = (math.sqrt(5) - 1) / 2
    while high - low > 1e-9 * high:
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if function(a) < function(b) else (a, high)
    return (low + high) / 2


@pytest.mark.parametrize("save_secs", [0.01, 1.0, 60.0, 600.0])
def test_daly_interval_is_where_the_time_is_least(save_secs):
    mtbf_secs = 2 * HOUR

    def factor(interval_secs):
        return paper.time_factor(interval_secs, save_secs, 100.0, mtbf_secs)

    best = numeric_minimum(factor, 1e-3, 10 * mtbf_secs)
    daly = paper.daly_interval(save_secs, mtbf_secs)
    assert daly == pytest.approx(best, rel=2e-3)
    assert factor(daly) <= factor(best) * (1 + 1e-6)
    young = paper.young_interval(save_secs, mtbf_secs)
    assert abs(young - best) > abs(daly - best)


def test_where_saving_takes_longer_than_failures_let_it_the_interval_is_theirs():
    assert paper.daly_interval(300.0, 100.0) == 100.0


def test_time_with_failures_is_that_of_a_simulation():
    rng = np.random.default_rng(1)
    interval, save, restart, mtbf, num_segments = 90.0, 10.0, 30.0, 200.0, 20_000
    clock, failure = 0.0, rng.exponential(mtbf)
    per_segment = []

    def work(secs):
        """True if it ends before the next failure; else the clock stands there."""
        nonlocal clock, failure
        if clock + secs <= failure:
            clock += secs
            return True
        clock = failure
        failure = clock + rng.exponential(mtbf)
        return False

    for _ in range(num_segments):
        begun = clock
        while not work(interval + save):
            while not work(restart):
                pass
        per_segment.append(clock - begun)
    error = np.std(per_segment) / math.sqrt(num_segments) / interval
    factor = paper.time_factor(interval, save, restart, mtbf)
    assert abs(np.mean(per_segment) / interval - factor) < 5 * error
    assert 5 * error < 0.05 * factor


# A step, and the tables.


def compute(**changes):
    fields = {
        "step_secs": [0.1, 0.1, 0.1],
        "images": 128,
        "num_bytes": 4_000_000,
        "num_buffers": 1,
        "input_images_per_sec": math.inf,
        "save_secs": 0.1,
        "restart_secs": 70.0,
    }
    return paper.Compute(**fields | changes)


def test_a_step_on_a_perfect_network_takes_as_long_as_on_one_gpu():
    perfect = paper.Network(8, math.inf, math.inf, 0.0, 0.0)
    cost = paper.cost(512, compute(), perfect, gpu_mtbf_secs=1e20)
    assert cost.straggler_secs == pytest.approx(0.0)
    assert cost.total_secs == pytest.approx(0.1)


def test_a_slow_input_is_the_step():
    cost = paper.cost(64, compute(input_images_per_sec=1000.0), network(), 1e12)
    assert cost.step_secs == cost.input_secs == 4 * 128 / 1000


def test_the_faster_all_reduce_counts():
    latent = network(inner_hop_secs=0.0, outer_bytes_per_sec=1e15)
    for num_gpus in (8, 4096):
        cost = paper.cost(num_gpus, compute(), latent, 1e12)
        faster = min(cost.ring_secs, cost.hierarchical_secs)
        assert cost.step_secs == pytest.approx(0.1 + faster)
        assert cost.ring_secs != cost.hierarchical_secs


def alone(**changes):
    fields = {"step_secs": [0.02], "processor_secs": 0.02}
    return loopback.Alone(
        **fields | {"num_bytes": 1_000_000, "num_buffers": 1} | changes
    )


def test_two_processes_are_predicted_to_reduce_as_measured():
    net = loopback.fitted(0.001, 0.004, 1_000_000, 1)
    assert loopback.predicted(2, alone(), net, 2) == pytest.approx((0.02, 0.004))
    assert loopback.predicted(1, alone(), net, 2) == pytest.approx((0.02, 0.0))


def test_more_processes_than_cores_share_them():
    net = loopback.fitted(0.001, 0.004, 1_000_000, 1)
    compute_secs, reduce_secs = loopback.predicted(4, alone(), net, 2)
    assert compute_secs == pytest.approx(4 * 0.02 / 2)
    hops, transfer = 6 * 0.0005, 2 * 3 / 4 * 0.003
    assert reduce_secs == pytest.approx(2 * (hops + transfer))


ROW = {
    "model": "cnn",
    "workers": 2,
    "batch_size": 128,
    "machine_cores": 2,
    "bytes": 1_000_000,
    "buffers": 1,
    "alone_secs": [0.02],
    "alone_processor_secs": 0.02,
    "processes_secs": [0.03],
    "towers_secs": [0.025],
    "all_reduce_secs": [0.005],
    "number_secs": [0.001],
}


@pytest.fixture
def files(tmp_path):
    """Options that name files of measured numbers."""
    numbers = {"date": "2026-11-23", "machine": "some", "load": 0.0}
    one = {
        "kind": "CPU",
        "images": 128,
        "step_secs": [0.09, 0.1, 0.12],
        "num_bytes": 4_000_000,
        "input_images_per_sec": 1e6,
        "save_secs": 0.1,
        "start_secs": 10.0,
    }
    paths = tmp_path / "compute.json", tmp_path / "workers.json"
    paths[0].write_text(json.dumps(numbers | {"models": {"cnn": one}}))
    paths[1].write_text(json.dumps(numbers | {"rows": [ROW]}))
    return [f"--compute={paths[0]}", f"--workers={paths[1]}", "--models=cnn"]


def test_tables_say_that_they_are_on_paper_and_explain_every_column(files, capsys):
    scaling.print_paper(scaling.parse_options(["--paper", *files]))
    text = capsys.readouterr().out
    assert "## On paper: cnn on 8 to 4,096 GPUs" in text
    for start in ("| 8 | 1,024 |", "| 64 |", "| 512 |", "| 4,096 | 524,288 |"):
        assert start in text
    heads = [line for line in text.splitlines() if line.startswith("| GPUs |")]
    heads += [line for line in text.splitlines() if line.startswith("| network,")]
    assert len(heads) == 2
    for column in "".join(heads).strip("| ").replace("||", "|").split(" | "):
        assert f"\n- {column.strip('| ')}: " in text
    # 20 ms and the measured all-reduce of 5 ms, where the step was 30 ms.
    assert "| cnn, 2 | 20.00 | 5.00 | 5.00, +0.0% | 25.00 | 30.00, -16.7% |" in text


def test_options_replace_what_was_measured(files):
    options = scaling.parse_options(
        ["--paper", *files, "--step_ms=5", "--spread=0.5", "--num_bytes=60000000"]
    )
    numbers = json.loads(options.compute.read_text())["models"]["cnn"]
    chosen = scaling.compute_of(options, numbers)
    assert np.median(chosen.step_secs) == pytest.approx(0.005)
    measured, mean = np.array([0.09, 0.1, 0.12]), 0.31 / 3
    expected = (mean + 0.5 * (measured - mean)) / (mean + 0.5 * (0.1 - mean)) * 0.005
    np.testing.assert_allclose(chosen.step_secs, expected)
    assert chosen.num_buffers == 3  # of 25 MiB
    assert chosen.restart_secs == 60 + 10.0


def test_options_that_make_no_sense_end_in_one_line(files, capsys):
    options = scaling.parse_options(["--paper", *files, "--spread=50"])
    with pytest.raises(SystemExit, match="spread=50: a step would take no time"):
        measure.run(lambda: scaling.print_paper(options))
    with pytest.raises(SystemExit):
        scaling.parse_options(["--paper", *files, "--gpus=12"])
    assert "--gpus=12 do not fill machines of 8" in capsys.readouterr().err


def test_a_row_without_two_processes_predicts_nothing():
    assert loopback.network_of([ROW | {"workers": 3}], "cnn") is None
    assert loopback.network_of([ROW], "resnet20") is None
    assert loopback.network_of([ROW], "cnn").outer_hop_secs == 0.0005


@pytest.mark.slow
def test_processes_and_a_device_are_measured_for_the_tables(tmp_path):
    paths = {name: tmp_path / f"{name}.json" for name in ("workers", "compute")}
    run(
        "workers --workers=1,2 --models=lenet --batch_size=9 --steps=2 --rounds=2 "
        f"--output={paths['workers'].with_suffix('.md')}"
    )
    report = paths["workers"].with_suffix(".md").read_text()
    assert "| lenet | 1 | " in report and report.count("| lenet | 2 | ") == 2
    one, two = json.loads(paths["workers"].read_text())["rows"]
    assert one["buffers"] == 0 and one["images"] == 9
    assert two["buffers"] == 1 and two["images"] == 5
    model = build.build(
        Config(dataset="synthetic", model="lenet", augment="none")
    ).model
    # Two losses and the number of correct predictions travel with the gradients.
    assert two["bytes"] == 4 * (model.count_params() + 3)
    # A ring sends them, and a little around them; other processes send, too.
    assert two["loopback_bytes"] > 2 * two["bytes"]
    run(f"scaling --measure={paths['compute']} --models=lenet --device=cpu --calls=3")
    files = [f"--{name}={path}" for name, path in paths.items()]
    text = run("scaling --paper --models=lenet", *files)
    assert "## On paper: lenet" in text and "| lenet, 2 | " in text
    compute = json.loads(paths["compute"].read_text())["models"]["lenet"]
    assert compute["num_bytes"] == 4 * model.count_params()
    assert len(compute["step_secs"]) == 3


def run(command, *arguments):
    command = [sys.executable, "-m", *f"benchmarks.{command}".split(), *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout

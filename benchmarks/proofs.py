"""Proofs on the devices at hand: placement, kernels, equality, repetition.

Each takes a `Setting`, writes its table and returns whether something is amiss; a part
of `python -m benchmarks.gpu`.
"""

import collections
import dataclasses
import functools
import os
import pathlib
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from benchmarks import measure, trainers
from benchmarks.graphs import executed, interruptions, optimized, placement, traced
from benchmarks.graphs.crossings import HOST_MEMORY, per_step, summed
from towers.build import assembly, builder
from towers.config import Config
from towers.config.choices import POLICIES
from towers.data.batches import EvalBatches
from towers.parallel.asynchronous import AsynchronousTrainer
from towers.parallel.devices import Devices, configure, enable_determinism, show_gpus
from towers.parallel.trainer import Trainer

NUM_LOGICAL = 4  # two groups of two
STEPS = 3
XLA = {"precision": "bfloat16", "compile": "xla"}
GRAPHS = ("resnet20", "resnet18", "speedrun", "vit_tiny")
PERSISTENT = "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"
# Share of the largest change in training; rounding gives far less, a wrong mean more.
EQUAL_WITHIN = 0.01
KINDS = ("params", "state", "slots", "averages")


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a proof runs, and where its lines go.

    Attributes:
        device: "cpu", for tiny sizes on logical devices, or "gpu".
        write: takes a line of the report.
        data_dir: CIFAR-10; empty for synthetic images.
        logical_mb: memory of each device where one GPU is cut into several.
    """

    device: str
    write: Callable[[str], None]
    data_dir: str = ""
    logical_mb: float = 3000.0

    @property
    def is_tiny(self) -> bool:
        return self.device == "cpu"

    @functools.cached_property
    def devices(self) -> Devices:
        """Every GPU; logical devices of the CPU, or of a single GPU."""
        if self.is_tiny:
            return configure("cpu", NUM_LOGICAL, core_per_tower=False)
        if self.shares_device:
            return configure("gpu", NUM_LOGICAL, device_memory_mb=self.logical_mb)
        return configure("gpu", 0)

    @property
    def shares_device(self) -> bool:
        """Whether all towers are logical devices of one physical device."""
        return self.is_tiny or len(tf.config.list_physical_devices("GPU")) == 1

    def trainer(self, model: str, fields: Mapping, devices: Devices | None = None):
        """A trainer whose parameters move."""
        return self.made(model, fields, devices)[-1]

    def made(self, model: str, fields: Mapping, devices: Devices | None = None):
        """Config, parts and trainer."""
        devices = devices or self.devices
        common = trainers.STEP_ALONE | measure.dataset(self)
        common |= {"batch_size": 16 if self.is_tiny else 128, "model": model}
        common |= {"learning_rate": 0.003, "ema_decay": 0.9, "num_towers": 1}
        common |= {"width": 0.25 if self.is_tiny and model != "lenet" else 1.0}
        config = Config(**common | dict(fields))
        parts = builder.build(config, device_kind=devices.kind)
        return config, parts, trainers.create_trainer(config, parts, devices)

    def table(
        self, columns: str, cases: Mapping[tuple, Callable[[], tuple]]
    ) -> list[tuple]:
        """Writes a table with a row for each case as soon as it is measured.

        A case that fails has the reason in its row; the others are still measured.

        Args:
            columns: names of all columns, with bars between them.
            cases: the first cells of a row -> a function that gives the other cells.

        Returns:
            The first cells of cases that failed.
        """
        self.write(measure.table_head(columns))
        failed = []
        for cells, case in cases.items():
            try:
                self.write(measure.table_row(*cells, *case()))
            except Exception as error:  # such as no memory left: a report goes on
                traceback.print_exc()
                failed.append(cells)
                self.write(measure.table_row(*cells, f"not measured: {reason(error)}"))
        return failed


def reason(error: BaseException) -> str:
    """An error in one line that fits a table.

    TensorFlow's message ends with nodes, after stacks of Python; the line before the
    first node says what is wrong.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    nodes = [place for place, line in enumerate(lines) if line.startswith("[[")]
    line = lines[max(0, nodes[0] - 1) if nodes else 0]
    return f"{type(error).__name__}: {line.replace('|', '/')}"[:300]


# Proofs.


def strategies(setting: Setting) -> dict[str, dict]:
    """Name -> fields of Config, of synchronous strategies on several devices."""
    count = len(setting.devices.towers)
    if count < 2:
        return {"towers": {"strategy": "towers", "num_towers": count}}
    several = {"num_towers": count}
    algorithms = ["star", "tree", "ring"] + ([] if setting.shares_device else ["nccl"])
    result = {"towers": {"strategy": "towers"} | several}
    for name in algorithms:
        fields = {"strategy": "replicated", "all_reduce": name}
        result[f"replicated, {name}"] = fields | several
    split = {"strategy": "model_parallel", "group_size": 2}
    result["model_parallel, 1 group of 2"] = split | {"num_towers": 2}
    if count >= 4:
        result["model_parallel, 2 groups of 2"] = split | {"num_towers": 4}
    return result


def prove_placement(setting: Setting) -> bool:
    """Whether every tower computes on its device in a step of each strategy."""
    devices, model, amiss = setting.devices, "cnn", []
    towers = [device.strip("/") for device in devices.towers]
    several = {"num_towers": len(towers)}
    cases = {"one device": {"strategy": "towers", "num_towers": 1}}
    cases |= strategies(setting)
    cases["async_towers"] = {"strategy": "async_towers"} | several
    cases["towers, resident input"] = {"strategy": "towers", "input": "resident"}
    cases["towers, resident input"] |= several
    expected = {}  # of the first case

    def row(name, fields):
        trainer = setting.trainer(model, fields)
        requested = executed.requested_devices(trainer.trace())
        graphs = executed.executed_step(trainer, devices)
        counts, moved = (
            executed.heavy_operations(graphs),
            executed.moved_operations(requested, graphs),
        )
        expected.update({} if expected else counts.get(towers[0], {"none": 0}))
        wanted = dict.fromkeys(towers[: fields["num_towers"]], expected)
        is_right = counts == wanted
        if fields["strategy"] == "model_parallel":  # of other shapes, hence numbers
            is_right = set(counts) == set(wanted)
        if not is_right or moved:
            amiss.append(name)
        texts = [f"{device}: {described(counts[device])}" for device in sorted(counts)]
        texts_moved = [f"{count} {what}" for what, count in moved.most_common(5)]
        return (
            # Alike on all of them, in one text.
            f"each of {', '.join(sorted(counts))}: {described(expected)}"
            if is_right and counts == wanted
            else "; ".join(texts),
            "yes" if is_right else f"NO, expected {described(expected)} on each tower",
            f"{moved.total()}: {'; '.join(texts_moved)}" if moved else "none",
        )

    failed = setting.table(
        f"strategy, {model} | convolutions and products by device | on each tower's "
        "device, and nowhere else | operations that run elsewhere than requested",
        {(name,): functools.partial(row, name, f) for name, f in cases.items()},
    )
    return bool(amiss or failed)


def described(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def trained(trainer, steps: int) -> tuple[dict, dict]:
    """The states before and after some steps."""
    before = trainer.state()
    trainer.train(steps)
    return before, trainer.state()


def differences(before: dict, after: dict, other: dict) -> dict[str, float]:
    """Kind of state -> the largest difference over the largest change since before."""
    largest = collections.defaultdict(lambda: [0.0, 0.0])
    for name, value in after.items():
        kind, _, rest = name.partition("/")
        if not rest:
            continue  # the step
        difference = np.max(np.abs(np.subtract(other[name], value, dtype=np.float64)))
        change = np.max(np.abs(np.subtract(value, before[name], dtype=np.float64)))
        largest[kind] = list(np.fmax(largest[kind], [difference, change]))
        if not np.isfinite(difference):
            largest[kind][0] = np.inf
    return {k: d / c if c else float(d > 0) for k, (d, c) in largest.items()}


def prove_equality(setting: Setting, must_repeat: bool = False) -> bool:
    """Every strategy against one device and against itself, in float32 without TF32."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    devices, amiss = setting.devices, []
    plain, normalized = ("lenet", "resnet20")
    references = {}

    def reference(model):
        if model not in references:
            references[model] = trained(setting.trainer(model, {}), STEPS)
        return references[model]

    def row(model, fields, on):
        trainer = setting.trainer(model, fields, on)
        before, after = trained(trainer, STEPS)
        found = differences(*reference(model), after)
        trainer.load(before)
        _, again = trained(trainer, STEPS)
        unequal = [n for n, x in after.items() if not np.array_equal(x, again[n])]
        if (unequal and must_repeat) or not max(found.values()) <= EQUAL_WITHIN:
            amiss.append(fields)
        cells = [f"{found[kind]:.1e}" if kind in found else "" for kind in KINDS]
        return *cells, f"no: {', '.join(unequal[:3])}" if unequal else "yes"

    cases = {
        (plain, name): functools.partial(row, plain, fields, devices)
        for name, fields in strategies(setting).items()
    }
    cpu = Devices("CPU", ("/CPU:0",))
    for model in (plain, normalized):
        cases[model, "one CPU"] = functools.partial(row, model, {}, cpu)
    count = {"num_towers": len(devices.towers), "batch_norm": "sync"}
    for strategy in ("towers", "replicated"):
        name = f"{strategy}, synchronized batch normalization"
        fields = {"strategy": strategy, "all_reduce": "star"} | count
        cases[normalized, name] = functools.partial(row, normalized, fields, devices)
    setting.write(
        f"{STEPS} steps, float32, TF32 off: the largest difference from one device "
        "over the largest change in training; and whether the same steps from the same "
        "state give the same bits.\n"
    )
    failed = setting.table(f"network | strategy | {' | '.join(KINDS)} | repeats", cases)
    return bool(amiss or failed)


def prove_repetition(setting: Setting) -> bool:
    """The same with deterministic operations, which must repeat."""
    enable_determinism()
    return prove_equality(setting, must_repeat=True)


# Kernels, of graphs traced for GPUs.

TRAINERS = {
    "one": {"num_towers": 1},
    "towers": {},
    "parameters_on_gpu": {"parameter_device": "gpu"},
    "async_towers": {"strategy": "async_towers"},
    "star": {"strategy": "replicated", "all_reduce": "star"},
    "ring": {"strategy": "replicated", "all_reduce": "ring"},
    "model_parallel": {"strategy": "model_parallel", "group_size": 2},
}
INPUTS = ("stream", "resident")
# They launch nothing: they hold a value, name one, or give it another shape or type.
NO_LAUNCH = {
    "AssignVariableOp",
    "Bitcast",
    "Const",
    "EnsureShape",
    "ExpandDims",
    "Identity",
    "IteratorGetNext",
    "NoOp",
    "Placeholder",
    "ReadVariableOp",
    "Reshape",
    "Shape",
    "Squeeze",
}


def prove_kernels(setting: Setting) -> bool:
    """Whether every operation of a step has a kernel on a GPU, and a device.

    A row counts the operations that GPUs compute in a step, each of which the host
    launches; those of them that have no kernel there (TensorFlow would move them to the
    host, with their inputs); those that nothing asks onto a device although their
    result is not small; and those that the host computes by intention. An edge from a
    GPU to the host is one where the host waits. The bytes are those of a step.
    """
    show_gpus()  # they are not needed, and a process that uses one takes all of it
    remarks, model = [], "lenet" if setting.is_tiny else "resnet20"

    def row(fields):
        common = {"model": model, "dataset": "synthetic", "augment": "pad_crop_flip"}
        config = Config(**common | {"batch_size": 16, "num_towers": 2} | fields)
        trained = traced.on_gpus(config)
        counts, lines = _operations(trained)
        remarks.extend(line for line in lines if line not in remarks)
        return *counts, *_transfers(trained)

    cases = {
        (name, source): functools.partial(row, fields | {"input": source})
        for name, fields in TRAINERS.items()
        for source in INPUTS
        if (name, source) != ("async_towers", "resident")
    }
    setting.write(f"{model} on two GPUs, batch 16.\n")
    failed = setting.table(
        "trainer | input | launches of a step, all GPUs | no kernel | no device | on "
        "the host | edges from GPUs to the host | bytes host to GPUs | GPUs to host | "
        "GPUs to GPUs | busiest GPU",
        cases,
    )
    for line in remarks or ["every operation on a GPU has a kernel there"]:
        setting.write(f"\n{line}")
    return bool(remarks or failed)


def _operations(trained):
    """(counts: launches, without a kernel, without a device, host; what is amiss)."""
    launches, missing, unasked, on_host = 0, [], [], []
    of_towers = isinstance(trained.trainer, AsynchronousTrainer)  # a call is a step
    for call in trained.calls():
        where = (call.graph, call.device)
        launches += sum(
            p.on_gpu and p.op.type not in NO_LAUNCH and bool(p.path or of_towers)
            for p in placement.placements(*where)
        )
        missing += placement.without_kernel(*where)
        unasked += placement.unasked(*where)
        on_host += placement.on_host_alone(*where)
    counts = [sum(x.count for x in y) for y in (missing, unasked, on_host)]
    lines = [f"no kernel: {group}" for group in missing]
    lines += [f"no device: {group}" for group in unasked]
    lines += [
        f"on the host: {group}"
        for group in on_host
        if group.type not in placement.HOST_OPERATIONS
    ]
    return [launches, *counts], lines


def _transfers(trained):
    """Edges to the host; bytes by kind, and the most of one GPU, both ways."""
    crossed = [x for x in trained.crossings() if x.is_per_step and x.is_usual]
    totals, per_gpu = per_step(crossed), {}
    for pair, count in totals.items():
        for device in set(pair) - {HOST_MEMORY}:
            per_gpu[device] = per_gpu.get(device, 0) + count
    busiest = max(per_gpu.values(), default=0)
    edges = sum(x.destination == HOST_MEMORY for x in crossed)
    return [edges, *(f"{count:,}" for count in (*summed(totals).values(), busiest))]


def prove_graphs(setting: Setting) -> bool:
    """Whether, as Grappler leaves a step for an H100, nothing goes from the host to a
    GPU and back but a streamed batch, and no kernel of batch normalization transposes.

    A program of XLA counts as one launch: XLA launches its kernels. Then what keeps a
    step from being one program.
    """
    show_gpus()
    amiss, common = [], {"dataset": "synthetic", "num_towers": 1, "compile": "none"}
    common |= {"augment": "pad_crop_flip", "input": "resident", "batch_size": 128}
    networks = ["lenet"] if setting.is_tiny else GRAPHS
    cases = {(x,): {"model": x, "precision": "bfloat16"} for x in networks}
    cases |= {(f"{x}, XLA",): {"model": x} | XLA for x in networks}
    cases["resnet20, XLA, stream",] = {"model": "resnet20", "input": "stream"} | XLA
    cases["resnet20, stream",] = {"model": "resnet20", "input": "stream"}
    policies = [name for name in POLICIES if name != "none"]
    cases |= {(f"lenet, {x}",): {"model": "lenet", "policy": x} for x in policies}

    def row(fields):
        os.environ.pop(PERSISTENT, None)
        step = optimized.optimized(traced.on_gpus(Config(**common | fields)))
        is_persistent = os.environ.get(PERSISTENT) == "1"
        hidden = step.num_hidden_transposes(is_persistent)
        launches = sum(op.type not in NO_LAUNCH for op in step.on_gpus())
        if step.to_gpu or step.to_host or hidden:
            amiss.append(fields)
        shown = len(step.on_gpus("Transpose"))
        return launches, shown, hidden, len(step.to_host), len(step.to_gpu)

    failed = setting.table(
        "step | launches | transposes | within kernels of batch normalization | "
        "tensors and control edges to the host | from the host",
        {name: functools.partial(row, fields) for name, fields in cases.items()},
    )
    for fields in ({}, {"input": "stream"}, {"num_towers": 2}, {"compile": "auto"}):
        config = Config(**common | XLA | {"model": networks[0]} | fields)
        trained = traced.on_gpus(config)
        setting.write(f"\n{config.model}, {fields}: {trained.trainer.remarks[0]}.\n")
        if not trained.trainer.compilation.xla:
            continue
        setting.write(measure.table_head("part | not in it, as | operations | line"))
        for (*why, line), types in interruptions.interruptions(trained).items():
            setting.write(measure.table_row(*why, described(types), line))
    return bool(amiss or failed)


# Smoke: does it train, and what does the GPU do meanwhile.

SMOKE_STEPS, PROFILED_STEPS, MAX_KERNELS = 60, 5, 15


def prove_smoke(setting: Setting) -> bool:
    """Losses of some steps and of an evaluation against those of the CPU, then a
    profile of the device."""
    fields, tiny = {"precision": "bfloat16"}, setting.is_tiny
    count = SMOKE_STEPS // 10 if tiny else SMOKE_STEPS
    rows, evaluated = {}, {}
    on = {"CPU": Devices("CPU", ("/CPU:0",)), setting.devices.kind: setting.devices}
    for kind, devices in on.items():
        config, parts, trainer = setting.made("resnet20", fields, devices)
        rows[kind] = [trainer.train(count // 6)["loss"] for _ in range(6)]
        batches = EvalBatches(parts.data.test, parts.augment, config.batch_size)
        feed = assembly.create_eval_feed(batches, trainer)
        counts = trainer.evaluate(feed, 2 if tiny else len(batches)).reported
        evaluated[kind] = counts["correct"] / counts["images"]
    setting.write(measure.table_head("step | loss, " + " | loss, ".join(on)))
    for place, losses in enumerate(zip(*rows.values(), strict=True)):
        cells = [f"{loss:.4f}" for loss in losses]
        setting.write(measure.table_row((place + 1) * (count // 6), *cells))
    accuracies = ", ".join(f"{k} {v:.4f}" for k, v in evaluated.items())
    setting.write(f"\nAccuracy of an evaluation: {accuracies}.\n")
    for line in profiled(trainer, PROFILED_STEPS):
        setting.write(line)
    first, last = (values[-1] for values in (rows["CPU"], list(rows.values())[-1]))
    return not abs(first - last) <= 0.1 * abs(first)  # bfloat16 after many steps


def profiled(trainer: Trainer, steps: int) -> Iterator[str]:
    """The kernels of some steps, by the time that they take; how long the device is
    busy, and the longest gaps."""
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        trainer.train(steps)
        tf.profiler.experimental.stop()
        [path] = pathlib.Path(folder).glob("plugins/profile/*/*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
    planes = [x for x in space.planes if "/device:GPU" in x.name] or space.planes
    secs, calls, spans = collections.Counter(), collections.Counter(), []
    for plane in planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name[:70]
                secs[name] += event.duration_ps * 1e-12
                calls[name] += 1
                begin = line.timestamp_ns * 1000 + event.offset_ps
                spans.append((begin, begin + event.duration_ps))
    yield measure.table_head("kernel | ms a step | calls a step | share")
    total = sum(secs.values())
    for name, value in secs.most_common(MAX_KERNELS):
        ms, count = 1e3 * value / steps, calls[name] / steps
        yield measure.table_row(name, f"{ms:.3f}", f"{count:g}", f"{value / total:.3f}")
    busy, gaps, end = 0, [], None
    for begin, until in sorted(spans):
        if end is not None and begin > end:
            gaps.append(begin - end)
        busy += max(0, until - max(begin, end or 0))
        end = max(end or 0, until)
    whole = max(x[1] for x in spans) - min(x[0] for x in spans)
    longest = ", ".join(f"{gap * 1e-6:.0f}" for gap in sorted(gaps)[:-6:-1])
    yield (
        f"\n{sum(calls.values()) / steps:g} kernels a step; the device is busy for "
        f"{busy / whole:.3f} of {whole * 1e-9 / steps:.2f} ms a step; longest gaps in "
        f"microseconds: {longest}."
    )


PROOFS = {
    "graphs": prove_graphs,
    "smoke": prove_smoke,
    "placement": prove_placement,
    "kernels": prove_kernels,
    "equality": prove_equality,
    "repetition": prove_repetition,
}

"""Proofs on the devices at hand: placement, equality, repetition.

Each section takes a `Setting`, writes its table and returns whether something is amiss.
"""

import collections
import functools
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from benchmarks import trainers
from benchmarks.graphs.graphs import called
from benchmarks.setting import Setting
from towers import build
from towers.config import Config
from towers.parallel.devices import Devices, enable_determinism

# Kinds of heavy operations, the first one counts that is part of a type's name: oneDNN
# and fusions wrap the name in theirs.
HEAVY = ("BackpropFilter", "BackpropInput", "Conv2D", "MatMul")
# They compute nothing, wherever they are.
NO_COMPUTE = ("NoOp", "Identity")
STEPS = 3
# Of the largest change in training. Rounding gives far less, a wrong mean far more.
EQUAL_WITHIN = 0.01


# Cases.


def strategies(setting: Setting, devices: Devices) -> dict[str, dict]:
    """Name -> fields of Config, of synchronous strategies on several devices."""
    count = len(devices.towers)
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


def config_of(setting: Setting, model: str, fields: Mapping) -> Config:
    """A training whose parameters move."""
    common = trainers.STEP_ALONE | setting.dataset()
    common |= {"batch_size": 16 if setting.is_tiny else 128, "model": model}
    common |= {"learning_rate": 0.003, "ema_decay": 0.9, "num_towers": 1}
    common |= {"width": 0.25 if setting.is_tiny and model != "lenet" else 1.0}
    return Config(**common | dict(fields))


def create(setting: Setting, devices: Devices, model: str, fields: Mapping):
    config = config_of(setting, model, fields)
    parts = build.build(config, device_kind=devices.kind)
    return trainers.create_trainer(config, parts, devices)


# Placement.


def partition_graphs(call: Callable[[], object]) -> list:
    """The graphs per device that TensorFlow executed during a call."""
    context.context().enable_graph_collection()
    try:
        call()
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_graph_collection()
    return [g for f in metadata.function_graphs for g in f.partition_graphs]


def step_on_cpus(trainer) -> list:
    """The graphs of one executed step as the loop of a CPU calls it: as a function,
    whose graphs a call of the loop does not list."""
    batches = trainer._feed.batches_of(trainer.step)
    with trainer.compilation.step_options():
        metrics = trainer._step.zero_metrics()
        return partition_graphs(lambda: trainer.loop._step_call(0, batches, metrics))


def executed_step(trainer, devices: Devices) -> list:
    """The graphs of one executed step."""
    if devices.kind == "CPU" and hasattr(trainer, "loop"):
        return step_on_cpus(trainer)
    return partition_graphs(lambda: trainer.train(1))


def short_device(name: str) -> str:
    """CPU:0 of /job:localhost/replica:0/task:0/device:CPU:0; empty where it is open."""
    found = tf.DeviceSpec.from_string(name)
    return f"{found.device_type}:{found.device_index}" if found.device_type else ""


def heavy_operations(graphs: Iterable) -> dict[str, collections.Counter]:
    """Device -> the number of its convolutions and products of each kind."""
    counts = collections.defaultdict(collections.Counter)
    for graph in graphs:
        for node in graph.node:
            kind = next((kind for kind in HEAVY if kind in node.op), None)
            if kind:
                counts[short_device(node.device)][kind] += 1
    return dict(counts)


def requested_devices(graphs: Iterable[tf.Graph]) -> dict[str, set[str]]:
    """Name of an operation -> the devices that it is asked onto, of the graphs and of
    the functions that they call; without those that no device is asked for."""
    requested, to_visit, visited = collections.defaultdict(set), list(graphs), set()
    while to_visit:
        graph = to_visit.pop()
        if id(graph) in visited:
            continue
        visited.add(id(graph))
        for operation in graph.get_operations():
            requested[operation.name].add(short_device(operation.device))
            to_visit += called(graph, operation).values()
    return {name: devices for name, devices in requested.items() if "" not in devices}


def moved_operations(
    requested: Mapping[str, set[str]], graphs: Iterable
) -> collections.Counter:
    """Operations that run elsewhere than requested.

    Args:
        requested: of the traced step. In a graph that is executed the name of an
            operation may follow those of the functions around it.
        graphs: those that were executed.
    """
    moved = collections.Counter()
    for graph in graphs:
        for node in graph.node:
            parts, actual = node.name.split("/"), short_device(node.device)
            names = ["/".join(parts[i:]) for i in range(max(1, len(parts) - 1))]
            wanted = next((requested[name] for name in names if name in requested), "")
            if wanted and actual not in wanted and node.op not in NO_COMPUTE:
                moved[f"{node.op} {' or '.join(sorted(wanted))} to {actual}"] += 1
    return moved


def placement(setting: Setting) -> bool:
    """Whether every tower computes on its device in a step of each strategy."""
    devices, model, amiss = setting.devices(), "cnn", []
    setting.remark_on(devices)
    towers = [device.strip("/") for device in devices.towers]
    several = {"num_towers": len(towers)}
    cases = {"one device": {"strategy": "towers", "num_towers": 1}}
    cases |= strategies(setting, devices)
    cases["async_towers"] = {"strategy": "async_towers"} | several
    cases["towers, resident input"] = {"strategy": "towers", "input": "resident"}
    cases["towers, resident input"] |= several
    expected = {}  # of the first case

    def row(name, fields):
        trainer = create(setting, devices, model, fields)
        requested = requested_devices(trainer.trace())
        graphs = executed_step(trainer, devices)
        counts, moved = heavy_operations(graphs), moved_operations(requested, graphs)
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


# Equality.


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


KINDS = ("params", "state", "slots", "averages")


def repetition(setting: Setting) -> bool:
    """The same with deterministic operations, which must repeat."""
    enable_determinism()
    return equality(setting, must_repeat=True)


def equality(setting: Setting, must_repeat: bool = False) -> bool:
    """Every strategy against one device and against itself, in float32 without TF32."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    devices, amiss = setting.devices(), []
    plain, normalized = ("lenet", "resnet20")
    setting.remark_on(devices)
    references = {}

    def reference(model):
        if model not in references:
            references[model] = trained(create(setting, devices, model, {}), STEPS)
        return references[model]

    def row(model, fields, on):
        trainer = create(setting, on, model, fields)
        before, after = trained(trainer, STEPS)
        found = differences(*reference(model), after)
        trainer.load(before)
        _, again = trained(trainer, STEPS)
        unequal = [n for n, x in after.items() if not np.array_equal(x, again[n])]
        if unequal and must_repeat or not max(found.values()) <= EQUAL_WITHIN:
            amiss.append(fields)
        cells = [f"{found[kind]:.1e}" if kind in found else "" for kind in KINDS]
        return *cells, f"no: {', '.join(unequal[:3])}" if unequal else "yes"

    cases = {
        (plain, name): functools.partial(row, plain, fields, devices)
        for name, fields in strategies(setting, devices).items()
    }
    cpu = Devices("CPU", ("/CPU:0",))
    for model in (plain, normalized):
        cases[model, "one CPU"] = functools.partial(row, model, {}, cpu)
    count = {"num_towers": len(devices.towers), "batch_norm": "sync"}
    for strategy in ("towers", "replicated"):
        name = f"{strategy}, synchronized batch normalization"
        fields = {"strategy": strategy} | count
        cases[normalized, name] = functools.partial(row, normalized, fields, devices)
    setting.write(
        f"{STEPS} steps, float32, TF32 off: the largest difference from one device "
        "over the largest change in training; and whether the same steps from the same "
        "state give the same bits.\n"
    )
    failed = setting.table(f"network | strategy | {' | '.join(KINDS)} | repeats", cases)
    return bool(amiss or failed)

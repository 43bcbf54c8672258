"""Steps traced for GPUs: kernels, launches, what crosses devices; needs no GPU.

    python -m benchmarks.kernels --models=resnet18 --towers=4 --precisions=bfloat16

Every operation of a step is looked up in TensorFlow's registry of kernels. A row counts
the operations that GPUs compute in a step, each of which the host launches; those of
them that have no kernel there (TensorFlow would move them to the host, with their
inputs); those that nothing asks onto a device although their result is not small; and
those that the host computes by intention. An edge from a GPU to the host is one where
the host waits. The bytes are those of a step.

The exit code is 1 where an operation has no kernel or no device.
"""

import argparse
import itertools
import sys
from collections.abc import Callable

from benchmarks import measure
from benchmarks.graphs import placement, traced
from benchmarks.graphs.crossings import HOST_MEMORY, per_step, summed
from benchmarks.setting import Setting
from towers.config import Config
from towers.errors import ConfigError
from towers.parallel.asynchronous import AsynchronousTrainer
from towers.parallel.devices import show_gpus

STRATEGIES = {
    "one": {"num_towers": 1},
    "towers": {},
    "parameters_on_gpu": {"parameter_device": "gpu"},
    "async_towers": {"strategy": "async_towers"},
    "star": {"strategy": "replicated", "all_reduce": "star"},
    "ring": {"strategy": "replicated", "all_reduce": "ring"},
    "model_parallel": {"strategy": "model_parallel", "group_size": 2},
}
INPUTS = ("stream", "resident")
COLUMNS = (
    "trainer | input | launches of a step, all GPUs | no kernel | no device | on the "
    "host | edges from GPUs to the host | bytes host to GPUs | GPUs to host | GPUs to "
    "GPUs | busiest GPU"
)
# They launch nothing: they hold a value, name one, or give it another shape.
NO_LAUNCH = {
    "AssignVariableOp",
    "Const",
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


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=measure.names, default="resnet20")
    parser.add_argument("--precisions", type=measure.names, default="float32")
    parser.add_argument("--strategies", type=measure.names, default=[*STRATEGIES])
    parser.add_argument("--towers", type=int, default=2, help="GPUs, an even number")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--accumulate_steps", type=int, default=1)
    parser.add_argument("--augment", default="pad_crop_flip")
    return parser.parse_args(argv)


def report(options: argparse.Namespace, write: Callable[[str], None]) -> bool:
    """Writes the table; returns whether something is amiss."""
    show_gpus()  # they are not needed, and a process that uses one takes all of it
    write(measure.table_head(COLUMNS))
    remarks = []
    axes = (options.models, options.precisions, options.strategies, INPUTS)
    for model, precision, strategy, source in itertools.product(*axes):
        fields = {"model": model, "precision": precision, "input": source}
        fields |= {"dataset": "synthetic", "num_towers": options.towers}
        for name in ("augment", "batch_size", "accumulate_steps"):
            fields[name] = getattr(options, name)
        try:
            trained = traced.on_gpus(Config(**fields | STRATEGIES[strategy]))
        except ConfigError:
            continue  # such as asynchronous towers with resident images
        name = f"{model} {precision} {strategy}"
        counts, lines = _operations(trained)
        write(measure.table_row(name, source, *counts, *_transfers(trained)))
        remarks += [f"{name}, {source}: {line}" for line in lines]
    reasons = [f"{op}: {why}" for op, why in placement.HOST_OPERATIONS.items()]
    for line in remarks or ["every operation on a GPU has a kernel there"]:
        write(f"\n{line}")
    write(f"\non the host by intention: {'; '.join(reasons)}")
    return bool(remarks)


def waiting(setting: Setting) -> bool:
    """The section of `benchmarks.gpu`: what the host does in a step."""
    model = "lenet" if setting.is_tiny else "resnet20"
    options = parse_options([f"--models={model}", "--strategies=one,towers,star"])
    return report(options, setting.write)


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


def main(argv: list[str] | None = None) -> int:
    return int(report(parse_options(argv), print))


if __name__ == "__main__":
    sys.exit(main())

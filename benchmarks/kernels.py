"""GPU kernels and the bytes that cross devices, from traced steps; needs no GPU.

    python -m benchmarks.kernels --models=resnet18 --towers=4 --precisions=bfloat16

For each strategy and input the steps are traced for so many GPUs and every operation is
looked up in TensorFlow's registry of kernels. The first table counts the operations
that are asked onto GPUs, those of them that have no kernel there (TensorFlow would move
them to the host, with their inputs), those that nothing asks onto a device although
their result is not small, and those that the host runs by intention. The second one
gives the bytes of a step that cross between the host and the GPUs and between GPUs.

The exit code is 1 where an operation has no kernel or no device.
"""

import argparse
import itertools
import sys

from benchmarks import measure
from benchmarks.graphs import placement, traced
from benchmarks.graphs.crossings import HOST_MEMORY, per_step, summed
from towers.config import Config
from towers.errors import ConfigError

STRATEGIES = {
    "towers": {},
    "towers, parameters on a GPU": {"parameter_device": "gpu"},
    "async_towers": {"strategy": "async_towers"},
    "replicated star": {"strategy": "replicated", "all_reduce": "star"},
    "replicated ring": {"strategy": "replicated", "all_reduce": "ring"},
    "model_parallel": {"strategy": "model_parallel", "group_size": 2},
}
INPUTS = ("stream", "resident")


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=measure.names, default="resnet20")
    parser.add_argument("--precisions", type=measure.names, default="float32")
    parser.add_argument("--towers", type=int, default=2, help="GPUs, an even number")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--accumulate_steps", type=int, default=1)
    parser.add_argument("--augment", default="pad_crop_flip")
    return parser.parse_args(argv)


def report(options: argparse.Namespace) -> tuple[str, int]:
    """The tables, and the exit code: 1 where something is amiss."""
    head = "trainer | input | "
    operations = [
        measure.table_head(head + "on GPUs | no kernel | no device | on the host")
    ]
    transfers = [
        measure.table_head(
            head + "host to GPUs | GPUs to host | GPUs to GPUs | busiest GPU"
        )
    ]
    remarks = []
    axes = (options.models, options.precisions, STRATEGIES, INPUTS)
    for model, precision, strategy, source in itertools.product(*axes):
        fields = {"model": model, "precision": precision, "input": source}
        try:
            trained = _traced(options, fields | STRATEGIES[strategy])
        except ConfigError:
            continue  # such as asynchronous towers with resident images
        name = f"{model} {precision} {strategy}"
        row, lines = _operations(trained)
        operations.append(measure.table_row(name, source, *row))
        remarks += [f"{name}, {source}: {line}" for line in lines]
        transfers.append(measure.table_row(name, source, *_transfers(trained)))
    reasons = [f"{op}: {why}" for op, why in placement.HOST_OPERATIONS.items()]
    text = [
        "operations of a step",
        *operations,
        *(remarks or ["every operation on a GPU has a kernel there"]),
        "on the host by intention: " + "; ".join(reasons),
        "",
        f"bytes of a step of {options.batch_size} x {options.accumulate_steps} images "
        f"that cross devices, {options.towers} GPUs",
        *transfers,
    ]
    return "\n".join(text), int(bool(remarks))


def _traced(options, fields):
    config = Config(
        dataset="synthetic",
        augment=options.augment,
        num_towers=options.towers,
        batch_size=options.batch_size,
        accumulate_steps=options.accumulate_steps,
        **fields,
    )
    return traced.on_gpus(config)


def _operations(trained):
    """(counts: on GPUs, without a kernel, without a device, host; what is amiss)."""
    on_gpu, missing, unasked, on_host = 0, [], [], []
    for call in trained.calls():
        where = (call.graph, call.device)
        on_gpu += sum(p.asked and p.on_gpu for p in placement.placements(*where))
        missing += placement.without_kernel(*where)
        unasked += placement.unasked(*where)
        on_host += placement.on_host_alone(*where)
    counts = [str(sum(x.count for x in y)) for y in (missing, unasked, on_host)]
    lines = [f"no kernel: {group}" for group in missing]
    lines += [f"no device: {group}" for group in unasked]
    lines += [
        f"on the host: {group}"
        for group in on_host
        if group.type not in placement.HOST_OPERATIONS
    ]
    return [str(on_gpu), *counts], lines


def _transfers(trained):
    """Bytes by kind, and the most that one GPU sends and receives."""
    totals = per_step(trained.crossings())
    per_gpu = {}
    for pair, count in totals.items():
        for device in set(pair) - {HOST_MEMORY}:
            per_gpu[device] = per_gpu.get(device, 0) + count
    busiest = max(per_gpu.values(), default=0)
    return [f"{count:,}" for count in (*summed(totals).values(), busiest)]


def main(argv: list[str] | None = None) -> int:
    text, code = report(parse_options(argv))
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(main())

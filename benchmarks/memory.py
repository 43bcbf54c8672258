r"""The memory and time of a training step with `--recompute`, without, and by peers.

    python -m benchmarks.memory --models=resnet50,deit_small --torch=PYTHON \
        --ways="towers;towers, --recompute;fit;torch;torch, checkpoints"

Each in a process of its own, in turn, on a batch that lies ready, SGD with momentum:
- `towers`, `towers, --recompute`: one tower.
- `fit`: `keras.Model.fit` of the network with the layers of Keras and TensorFlow.
- `torch`, `torch, checkpoints`: the network of timm (`deit_small` is its
  `vit_small_patch16_224`), without and with `set_grad_checkpointing`, by a Python that
  has them.

The peak is the most memory that a process has had (VmHWM), its libraries included; the
memory of the steps is the peak less what the process had before the first one, when its
parameters were there. Next to other work on the machine the ratios of processor time
are the steadier.
"""

import contextlib
import os
import statistics
import sys

from benchmarks import measure, peers, trainers
from towers.build import builder
from towers.config import Config
from towers.parallel import devices

FIT = "--fit"


class FitProcess(trainers.ChildProcess):
    """Steps of Keras' `fit`, by this program."""

    def __init__(self, fields: dict, steps: int):
        words = (fields["model"], fields["image_size"], fields["batch_size"], steps)
        command = [sys.executable, "-m", "benchmarks.memory", FIT, *map(str, words)]
        super().__init__(command, os.environ, cwd=trainers.ROOT)

    def __call__(self) -> float:
        self.say("")
        return self.answer()


def serve_fit(model: str, image_size: int, batch_size: int, steps: int) -> None:
    """Takes so many steps for each line of the standard input."""
    import time

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    fields = trainers.STEP_ALONE | {"model": model, "image_size": image_size}
    chosen = devices.configure("cpu", 1)
    parts = builder.build(Config(**fields, batch_size=batch_size))
    batch = trainers.first_batch(parts)
    train = peers.fit(peers.with_stock_layers(parts.model), batch, steps, "none")
    del parts, chosen
    print(measure.process_bytes("VmRSS"), file=answers, flush=True)
    for _ in sys.stdin:
        used = time.process_time()
        train()
        print(time.process_time() - used, file=answers, flush=True)


def create(name: str, fields: dict, options, stack: contextlib.ExitStack):
    """A process, its bytes before the first step, and the call with which it takes the
    steps of a round."""
    if name.startswith("towers"):
        process = trainers.TrainerProcess(fields, "cpu", steps=1, tells_memory=True)
        before = process.answer()
        process.wait()

        def train():
            process.train(options.steps)
            return process.processor[-1]
    elif name == "fit":
        process = train = FitProcess(fields, options.steps)
        before = process.answer()
    else:
        words = [fields[x] for x in ("image_size", "batch_size")]
        words = [peers.torch_name(fields["model"]), *words]
        words += [options.steps, "float32", *["--checkpoint"] * ("," in name)]
        process = train = peers.ProgramSteps("with_torch", options.torch, *words)
        print(f"{process.num_params:,} parameters in {name}", file=sys.stderr)
        before = measure.process_bytes("VmRSS", process.pid)
    stack.enter_context(contextlib.closing(process))
    return process, before, train


def compare(model: str, options) -> None:
    """The rows of a network."""
    fields = trainers.STEP_ALONE | {"model": model, "image_size": options.image_size}
    fields |= {"batch_size": options.batch_size, "device": "cpu"}
    things = {"towers": fields, "towers, --recompute": fields | {"recompute": True}}
    things["fit"] = fields
    things |= {"torch": fields, "torch, checkpoints": fields}
    things = {name: things[name] for name in options.ways}
    seconds = {name: [] for name in things}
    with contextlib.ExitStack() as stack:
        made = {name: create(name, x, options, stack) for name, x in things.items()}
        calls = {
            name: lambda name=name: seconds[name].append(made[name][-1]())
            for name in made
        }
        wall, _ = measure.in_turn(calls, options.rounds)
        peaks = {
            name: measure.process_bytes("VmHWM", process.pid)
            for name, (process, *_) in made.items()
        }
        steps = {name: peaks[name] - before for name, (_, before, _) in made.items()}
    processor = {name: x[1:] for name, x in seconds.items()}  # without the warm-up
    for name in things:
        print(
            measure.table_row(
                model,
                name,
                f"{peaks[name] / 1e6:.0f}",
                f"{peaks[name] / peaks['towers']:.2f}",
                f"{steps[name] / 1e6:.0f}",
                f"{steps[name] / steps['towers']:.2f}",
                f"{statistics.median(wall[name]) / options.steps:.2f}",
                measure.ratios_text(wall, name, "towers"),
                measure.ratios_text(processor, name, "towers"),
            ),
            flush=True,
        )


def main() -> None:
    parser = measure.create_parser(__doc__, batch_size=32, steps=1, rounds=3)
    parser.add_argument("--models", type=measure.names, default="resnet50,deit_small")
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument(
        "--ways", type=lambda x: x.split(";"), default="towers;towers, --recompute;fit"
    )
    parser.add_argument("--torch", metavar="PYTHON", default="")
    options = parser.parse_args()
    print(measure.report_head("The memory of a training step"))
    print(
        f"Batch {options.batch_size} of {options.image_size}x{options.image_size} "
        f"images, float32, one tower on the CPU; {options.rounds} rounds of "
        f"{options.steps} step(s), one more to warm up\n\n"
        + measure.table_head(
            "network | trained by | MB at the peak | / towers | MB of "
            "the steps | / towers | s a step, median | "
            "time / towers (min, median, max) | processor time / towers"
        )
    )
    for model in options.models:
        compare(model, options)


if __name__ == "__main__":
    if FIT in sys.argv:
        serve_fit(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        measure.run(main)

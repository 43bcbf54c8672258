"""How time, memory and files of a run grow with classes, images, towers and layers.

    python -m benchmarks.growth
    python -m benchmarks.growth --subjects=classes,towers --num_sizes=2

trains and evaluates a short run of each size in a process of its own, and prints for
each phase of it, and each size, seconds by the wall clock and the most memory that the
process had in the phase (VmHWM):
- `start`: the call of `towers.train`, until `on_start` of callbacks.
- `first step`, and `step`, the median of the others.
- `first evaluation` and `evaluation` in the run, of all test images.
- `save`: the last checkpoint, until it is committed.
- `end`: the report, until `towers.train` returns.
- `evaluate`: the call of `towers.evaluate`.

An exponent x says that what the two largest sizes take more than the smallest one grows
as (what they are larger)^x: 1 is linear. Values that differ less than --noise_secs or
--noise_mb have none. Times are marked where the exponent of processor time, too, is
above 1.1.
"""

import contextlib
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np
from PIL import Image

from benchmarks import measure

MARKED_ABOVE = 1.1
NUM_STEPS = 6
NUM_DIFFERENT = 1000  # image files, which others are hard links to
# Subject -> the sizes of its runs.
SUBJECTS = {
    "classes": (10, 1000, 20_000),
    "images in memory": (1000, 100_000, 1_000_000),
    "image files": (1000, 100_000, 1_000_000),
    "towers": (1, 8, 64),
    "towers of resnet110": (1, 4, 8),
    "layers": (20, 60, 200),
    "layers of resnets": (20, 56, 110),
}
BASE = {
    "model": "lenet",
    "image_size": 16,
    "batch_size": 64,
    "device": "cpu",
    "num_towers": 1,
    "augment": "none",
    "learning_rate": 1e-6,
    "steps_per_loop": 1,
    "log_every_steps": 1,
    "summary_every_secs": 0.0,
    "checkpoint_every_secs": 0.0,
}


def plain_stack(num_layers: int):
    """A Keras model of convolutions of eight channels, one after the other."""
    import keras

    inputs = x = keras.Input([16, 16, 3])
    for number in range(num_layers - 1):
        layer = keras.layers.Conv2D(
            8, 3, padding="same", activation="relu", name=f"conv{number}"
        )
        x = layer(x)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, keras.layers.Dense(10, name="logits")(x))


def write_files(folder: pathlib.Path, num_images: int) -> None:
    """FOLDER/train and FOLDER/test, a tenth as many, with ten classes."""
    rng, originals = np.random.default_rng(0), folder / "different"
    originals.mkdir(parents=True)
    for number in range(NUM_DIFFERENT):
        pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(originals / f"{number}.jpg")
    for part, count in ("train", num_images), ("test", num_images // 10):
        for label in range(10):
            (folder / "data" / part / str(label)).mkdir(parents=True)
        for number in range(count):
            file = f"data/{part}/{number % 10}/{number:07}.jpg"
            os.link(originals / f"{number % NUM_DIFFERENT}.jpg", folder / file)


def arrays(num_train: int, num_test: int, num_classes: int):
    """Images of noise and labels, for training and for testing."""
    rng = np.random.default_rng(0)
    return [
        (
            rng.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8),
            np.arange(count) % num_classes,
        )
        for count in (num_train, num_test)
    ]


def arguments(subject: str, size: int, folder: pathlib.Path) -> tuple[dict, dict]:
    """The fields of Config, and the other arguments of `towers.train`."""
    fields, given, num_train = dict(BASE), {}, 20_000
    if subject == "image files":
        fields |= {"dataset": "image_folder", "data_dir": str(folder / "data")}
        num_train = size
    elif subject == "images in memory":
        num_train, given["data"] = size, arrays(size, size // 10, 10)
    else:
        num_classes = size if subject == "classes" else 10
        given["data"] = arrays(num_train, 2000, num_classes)
        given["class_names"] = [f"class {label}" for label in range(num_classes)]
    if subject.startswith("towers"):
        of_resnet = subject.partition(" of ")[2] or "resnet20"
        fields |= {"num_towers": size, "model": of_resnet}
    elif subject == "layers":
        given["model"] = plain_stack(size)
    elif subject == "layers of resnets":
        fields["model"] = f"resnet{size}"
    if "data" in given:
        del fields["image_size"]
    epochs = NUM_STEPS * fields["batch_size"] / num_train
    return fields | {"num_epochs": epochs, "eval_every_epochs": epochs / 2}, given


class Phases:
    """Seconds by the wall clock, of processor time, and megabytes at the peak, of what
    was done since the last mark. Repeated phases have several."""

    def __init__(self):
        self.of_phase: dict[str, list[list[float]]] = {}
        self._begin()

    def _begin(self):
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        self._began = time.perf_counter(), time.process_time()

    def mark(self, phase: str = "") -> None:
        """Ends a phase, if it has a name, and begins another one."""
        now = time.perf_counter(), time.process_time()
        if phase:
            secs = np.subtract(now, self._began).tolist()
            row = [*secs, measure.process_bytes("VmHWM") / 1e6]
            self.of_phase.setdefault(phase, []).append(row)
        self._begin()


def train(subject: str, size: int, folder: pathlib.Path) -> dict[str, list[float]]:
    """Phase -> seconds, processor seconds and megabytes, in this process; and the
    megabytes of the files of the run."""
    import towers

    fields, given = arguments(subject, size, folder)
    workdir, config = folder / "run", towers.Config(**fields)
    train, evaluate = towers.train, towers.evaluate  # imported before the first phase

    class Marks(towers.callbacks.Callback):
        def on_start(self, workdir, options, step):
            phases.mark("start")

        def on_evaluation(self, step, metrics):
            first = step < NUM_STEPS
            phases.mark("first evaluation" if first else "evaluation")

        def on_log(self, step, metrics):
            is_evaluated = step in (NUM_STEPS // 2, NUM_STEPS)
            name = "first step" if step == 1 else "step"
            phases.mark("" if is_evaluated else name)

        def on_end(self, step):
            phases.mark("save")

    phases = Phases()
    train(workdir, config, callbacks=[Marks()], **given)
    phases.mark("end")
    evaluate(workdir, **({"data": given["data"][1]} if given.get("data") else {}))
    phases.mark("evaluate")
    rows = {name: np.median(row, 0).tolist() for name, row in phases.of_phase.items()}
    for name in "first evaluation", "evaluation":  # these end a step, too
        rows[name][:2] = np.subtract(rows[name], rows["step"])[:2].tolist()
    files = [path.stat().st_size for path in workdir.rglob("*") if path.is_file()]
    return rows | {"files of the run": [math.nan, math.nan, sum(files) / 1e6]}


def measured(subject: str, size: int, options) -> dict[str, list[float]]:
    """`train`, in a process of its own."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder))
        if subject == "image files":
            write_files(pathlib.Path(folder), size)
        command = [sys.executable, "-m", "benchmarks.growth"]
        command += [f"--subjects={subject}", f"--size={size}", f"--folder={folder}"]
        measure.wait_until_idle()
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{subject}, {size}: {(done.stderr or done.stdout)[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def exponent(sizes: Sequence[int], values: Sequence[float], noise: float) -> float:
    """Of the growth above the value of the smallest size, from sizes and values of the
    two largest; NaN where that is noise. Of two sizes those two decide."""
    if len(sizes) > 2:
        sizes, values = np.subtract(sizes, sizes[0]), np.subtract(values, values[0])
    if len(sizes) < 2 or not values[-1] - values[-2] > noise:
        return math.nan
    ratio = values[-1] / max(values[-2], noise)
    return math.log(ratio) / math.log(sizes[-1] / sizes[-2])


def print_rows(subject: str, runs: dict[int, dict], options) -> None:
    """The rows of a subject, a phase each."""
    for phase in next(iter(runs.values())):
        columns = np.transpose([run[phase] for run in runs.values()])
        noises = options.noise_secs, options.noise_secs, options.noise_mb
        wall, processor, memory = (
            exponent(list(runs), x, n) for x, n in zip(columns, noises, strict=True)
        )
        marks = ["time"] * (min(wall, processor) > MARKED_ABOVE)
        marks += ["memory"] * (memory > MARKED_ABOVE)
        cells = [
            " ".join("-" if math.isnan(x) else format(x, form) for x in values)
            for values, form in (
                (columns[0], ".2f"),
                ([wall, processor], ".2f"),
                (columns[2], ".1f"),
                ([memory], ".2f"),
            )
        ]
        print(measure.table_row(subject, phase, *cells, ", ".join(marks)), flush=True)


def main() -> None:
    parser = measure.create_parser(__doc__)
    parser.add_argument("--subjects", type=measure.names, default=",".join(SUBJECTS))
    parser.add_argument("--num_sizes", type=int, default=3, help="the smallest ones")
    parser.add_argument("--folder", help="for runs and image files; default: temporary")
    parser.add_argument("--noise_secs", type=float, default=0.3)
    parser.add_argument("--noise_mb", type=float, default=20.0)
    parser.add_argument("--size", type=int, default=0, help="in this process")
    options = parser.parse_args()
    if options.size:
        rows = train(options.subjects[0], options.size, pathlib.Path(options.folder))
        print(json.dumps(rows))
        return
    print(measure.report_head("Growth with the size of a run"))
    for subject in options.subjects:
        print(f"{subject}: {', '.join(f'{size:,}' for size in SUBJECTS[subject])}")
    columns = "subject | phase | s | exponents of s, of processor time | MB | "
    print(f"\n{measure.table_head(columns + 'exponent | above linear')}", flush=True)
    for subject in options.subjects:
        sizes = SUBJECTS[subject][: options.num_sizes]
        runs = {size: measured(subject, size, options) for size in sizes}
        print_rows(subject, runs, options)


if __name__ == "__main__":
    main() if any("--size=" in word for word in sys.argv) else measure.run(main)

"""Evaluations and predictions of image files by a trained network, next to others.

    python -m benchmarks.serving --onnx=PYTHON --torch=PYTHON --timm=CLONE

draws --images JPEG files of 400x300 pixels, trains tf_efficientnet_lite0 at 128x128 for
two steps, exports it, and reads, decodes and computes all files by:
- `run_eval.py`, and `run_predict.py` with each of --batch_sizes.
- `Keras`: `image_dataset_from_directory` and `predict`, with stock layers.
- The programs of docs/export.md, by its sections; `ONNX` by a Python that has what
  towers needs and its extra `onnx`.
- `timm`: validate.py of a clone of github.com/huggingface/pytorch-image-models, with a
  worker process for each core, by a Python with torch and what timm requires.

Each is a process, in turn, --rounds times, on all files and on the --few first of each
class. The second is the time to start, imports and compilation included; the difference
of the two gives images/s and the processor time of an image. The most memory is that of
the largest process of a program.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks import measure
from benchmarks.peers import OURS
from towers.threads import num_cores

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(REPOSITORY / "docs"))

import scenes  # noqa: E402

MODEL, SIDE, WIDTH, HEIGHT = "tf_efficientnet_lite0", 128, 400, 300
NUM_DRAWN = 25  # of a class; the other files are copies
FOLDER, PAGE = REPOSITORY / "benchmarks", REPOSITORY / "docs" / "export.md"
# Sections of the page, and names of their programs.
SECTIONS = {"From photos to images": "pixels", "SavedModel": "with_saved_model"}
SECTIONS |= {"Keras": "with_keras", "TFLite": "with_tflite", "ONNX": "with_onnx"}

# The peak memory of a process includes what its parent had: this one is small.
LAUNCH = """
import os, subprocess, sys, time
started = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=sys.stderr)
_, status, usage = os.wait4(process.pid, 0)
wall = time.perf_counter() - started
print(status, wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1.024e-3)
"""


def cost(command: Sequence[object]) -> list[float]:
    """Seconds by the wall clock, seconds of processor time, peak memory in MB."""
    measure.wait_until_idle()
    # The programs of the page name exports without folders.
    parent = pathlib.Path(command[1]).parent
    is_ours = command[0] == sys.executable and parent.name != "with_keras"
    cwd = parent if parent.name == "export" else REPOSITORY
    environ = {k: v for k, v in os.environ.items() if is_ours or k not in OURS}
    launch = [sys.executable, "-c", LAUNCH, *map(str, command)]
    options = {"capture_output": True, "text": True}
    done = subprocess.run(launch, check=False, cwd=cwd, env=environ, **options)
    status, *values = map(float, done.stdout.split())
    if status:
        sys.exit(f"{' '.join(launch[3:6])}: {done.stderr[-2000:]}")
    return values


def write_photos(root: pathlib.Path, num_images: int, few: int) -> None:
    """ROOT/all and ROOT/few, with the same images for training and others for testing,
    in folders of the classes."""
    rng, num_classes = np.random.default_rng(0), len(scenes.SCENES)
    for label, name in enumerate(scenes.SCENES):
        files = []
        for number in range(NUM_DRAWN):
            image = scenes.photograph(name, rng).convert("RGB")
            path = root / f"{name}{number}.jpg"
            image.resize((WIDTH, HEIGHT)).save(path, quality=90)
            files.append(path.read_bytes())
        count = len(range(label, num_images, num_classes))
        parts = {"few/train": 10, "all/train": 10, "few/test": few, "all/test": count}
        for part, count in parts.items():
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / f"{number:05}.jpg").write_bytes(files[number % NUM_DRAWN])


def train_and_export(root: pathlib.Path, python_of: dict[str, str]) -> None:
    """Writes ROOT/run, and its exports in formats by a Python of each."""
    flags = [f"--data_dir={root / 'all'}", "--num_epochs=1", "--max_steps=2"]
    flags += [f"--model={MODEL}", f"--image_size={SIDE}", "--batch_size=16"]
    flags += ["--dataset=image_folder", "--eval_every_epochs=0", "--noreport"]
    cost([sys.executable, "run_train.py", f"--workdir={root / 'run'}", *flags])
    for name, python in python_of.items():
        cost([python, "run_export.py", f"--workdir={root / 'run'}", f"--format={name}"])
    texts = re.split(r"^##? ", PAGE.read_text(), flags=re.MULTILINE)
    of = {heading: text for heading, _, text in (x.partition("\n") for x in texts)}
    pattern = r"    import .*\n(?:    .*\n|\n(?=    ))+"
    for heading, name in SECTIONS.items():
        text = textwrap.dedent(re.findall(pattern, of[heading])[0])
        text = text.partition("model.compile(")[0]  # the predictions alone
        litert = "ai_edge_litert", "tensorflow.lite.python"
        (root / "run" / "export" / f"{name}.py").write_text(text.replace(*litert))


def programs(root: pathlib.Path, options) -> dict[str, Callable[[str], list]]:
    """Name -> a function that gives the command for ROOT/few or ROOT/all."""
    workdir, python = f"--workdir={root / 'run'}", sys.executable
    commands = {}
    commands["run_eval.py"] = lambda part: [
        *(python, "run_eval.py", workdir, f"--data_dir={root / part}"),
        f"--batch_size={options.batch_sizes[0]}",
    ]
    for size in options.batch_sizes:
        commands[f"run_predict.py --batch_size={size}"] = lambda part, size=size: [
            *(python, "run_predict.py", workdir, f"--batch_size={size}", "--csv"),
            *("--top=0", f"--output={root / 'predictions.csv'}", root / part / "test"),
        ]
    # Formats without a program that loads them are not exported.
    python_of = {"keras": python, "saved_model": python, "tflite": python}
    python_of |= {"onnx": options.onnx} if options.onnx else {}
    timm = {"safetensors": python} if options.timm else {}
    train_and_export(root, python_of | timm)
    folder = root / "run" / "export"
    program = FOLDER / "with_keras" / "predict.py"
    commands["Keras"] = lambda part: [
        *(python, program, folder / "model.keras", root / part / "test"),
        *(SIDE, options.batch_sizes[0]),
    ]
    for section, name in SECTIONS.items():
        if by := python_of.get(name.removeprefix("with_")):
            command = by, folder / f"{name}.py"
            commands[f"docs: {section}"] = lambda part, command=command: (
                [*command, *sorted((root / part / "test").glob("*/*.jpg"))]
            )
    if options.timm:
        timm_program = FOLDER / "with_torch" / "timm_program.py"
        flags = f"--model={MODEL} --num-classes={len(scenes.SCENES)} --device=cpu "
        flags += f"--input-size 3 {SIDE} {SIDE} --crop-pct=1 --channels-last "
        flags += f"--batch-size={options.batch_sizes[0]} --workers={num_cores()} "
        flags += f"--checkpoint={folder / 'model.safetensors'} --split=test"
        validate = options.torch, timm_program, f"{options.timm}/validate.py"
        validate = *validate, *flags.split()
        commands["timm"] = lambda part: [*validate, f"--data-dir={root / part}"]
    return commands


def main() -> None:
    parser = measure.create_parser(__doc__, rounds=3)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--few", type=int, default=16, help="of a class, to start")
    parser.add_argument("--batch_sizes", type=measure.numbers, default="64")
    for name in "onnx", "torch", "timm":
        parser.add_argument(f"--{name}", default="")
    options = parser.parse_args()
    num_few = options.few * len(scenes.SCENES)
    if options.images <= num_few:
        parser.error(f"--images={options.images} with --few: more than {num_few}")
    if bool(options.torch) != bool(options.timm):
        parser.error("--torch=PYTHON and --timm=CLONE: give both")
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        write_photos(root, options.images, options.few)
        commands = programs(root, options)
        costs = {(name, part): [] for name in commands for part in ("few", "all")}
        for number in range(options.rounds):
            for name, part in list(costs)[:: 1 if number % 2 else -1]:
                costs[name, part].append(cost(commands[name](part)))
    print(measure.report_head("Evaluations and predictions of image files"))
    print(
        f"{options.images:,} JPEG files of {WIDTH}x{HEIGHT}, {options.rounds} rounds\n"
    )
    columns = "program | s | s to start | images/s after it, median (min, max) | "
    columns += "ms of processor time an image, median (min, max) | MB at the peak"
    print(measure.table_head(columns))
    for name in commands:
        few, every = np.array(costs[name, "few"]), np.array(costs[name, "all"])
        wall, processor, _ = (every - few).T / (options.images - num_few)
        print(
            measure.table_row(
                name,
                f"{np.median(every[:, 0]):.1f}",
                f"{np.median(few[:, 0]):.1f}",
                spread(1 / wall, ".0f"),
                spread(1e3 * processor, ".2f"),
                f"{every[:, 2].max():.0f}",
            )
        )


def spread(values: np.ndarray, form: str) -> str:
    """Median, minimum and maximum."""
    low, median, high = np.percentile(values, (0, 50, 100))
    return f"{median:{form}} ({low:{form}}, {high:{form}})"


if __name__ == "__main__":
    measure.run(main)

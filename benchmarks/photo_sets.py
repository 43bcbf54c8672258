"""Folders of drawn photographs that are harder than those of docs/draw_photos.py.

    python -m benchmarks.photo_sets ROOT

writes ROOT/SET/train/CLASS and ROOT/SET/test/CLASS, of the same four classes, with
--drawing=N (0 by default) others, to choose by:
- `docs`: as docs/draw_photos.py draws them.
- `backgrounds`: on any ground, or before stripes and blots, two other things far away.
- `scales`: a sixth to nearly all of the shorter side, often cut off, behind bars.
- `imbalanced`: both, every other photo gray, trees a quarter as many for training.

    python -m benchmarks.photo_sets ROOT --train --seeds=5

trains on each, with the other flags given, and prints the test accuracies.
"""

import argparse
import json
import pathlib
import subprocess
import sys

import numpy as np

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(REPOSITORY / "docs"))

import scenes  # noqa: E402

SETS = ("docs", "backgrounds", "scales", "imbalanced")
PARTS = {"train": 60, "test": 50}  # images of a class
COLORS = (*scenes.PAINTS, *scenes.LEAVES, *scenes.SEAS, *scenes.MEADOWS)
FAR_THINGS = (scenes.boat, scenes.house, scenes.tree)


def pattern(canvas: scenes.Canvas, horizon: float) -> None:
    """Stripes and blots all over the photo."""
    for _ in range(25):
        color, x = canvas.color(COLORS), canvas.uniform(0, canvas.width)
        y, size = canvas.uniform(0, canvas.height), canvas.uniform(0.05, 0.3)
        if canvas.rng.random() < 0.5:
            canvas.box(color, x, y, x + 4 * size, y + 0.2 * size)
        else:
            canvas.disc(color, x, y, size, canvas.uniform(0.3, 1))


def photograph(kind: str, class_name: str, rng: np.random.Generator):
    """A photograph of a set, a Pillow image, upright."""
    if kind == "docs":
        return scenes.photograph(class_name, rng)
    least, most = scenes.LONGER_SIDE
    longer = least * (most / least) ** rng.random() ** 2
    sides = round(longer), round(longer * rng.choice(scenes.PROPORTIONS))
    canvas = scenes.Canvas(*(sides if rng.random() < 0.5 else sides[::-1]), rng)
    horizon = canvas.uniform(0.35, 0.7) * canvas.height
    ground, thing, _ = scenes.SCENES[class_name]
    size, shift = canvas.uniform(0.4, 0.65), 0.2
    if kind != "scales":
        ground = (scenes.sea, scenes.meadow, pattern)[rng.integers(3)]
    if kind != "backgrounds":
        least = 0.17 if kind == "scales" else 0.35
        size, shift = least * (0.85 / least) ** rng.random(), 0.4
    scenes.sky(canvas, horizon)
    ground(canvas, horizon)
    x = canvas.width / 2 + canvas.uniform(-shift, shift)
    if thing is scenes.sun:  # first, as it draws the sea below it
        thing(canvas, x, horizon, max(size, 0.3))
    for _ in range(2):
        far = canvas.uniform(0, canvas.width), horizon + 0.02
        FAR_THINGS[rng.integers(3)](canvas, *far, canvas.uniform(0.06, 0.12))
    if thing is not scenes.sun:
        y = min(horizon + canvas.uniform(0.05, 0.35), canvas.height / 2 + 0.45)
        thing(canvas, x, y, size)
    if kind != "backgrounds":
        for _ in range(3):
            left, wide = canvas.uniform(0, canvas.width), canvas.uniform(0.01, 0.06)
            canvas.box(canvas.color(COLORS), left, 0, left + wide, canvas.height)
    image = scenes.exposed(canvas.image.reduce(2), rng)
    return image.convert("L" if kind == "imbalanced" and rng.random() < 0.5 else "RGB")


def write_set(folder: pathlib.Path, kind: str, drawing: int) -> None:
    for part_number, (part, count) in enumerate(PARTS.items(), 2 * drawing):
        for label, class_name in enumerate(scenes.SCENES):
            to = folder / part / class_name
            to.mkdir(parents=True, exist_ok=True)
            rare = 4 if (kind, part, label) == ("imbalanced", "train", 3) else 1
            for number in range(count // rare):
                rng = np.random.default_rng([part_number, label, number])
                photograph(kind, class_name, rng).save(to / f"{number:02}.jpg")


def train_sets(root: pathlib.Path, seeds: int, flags: list[str]) -> None:
    print("| set | accuracy, mean | min | of each seed |\n|" + " --- |" * 4)
    for kind in SETS:
        figures = []
        for seed in range(seeds):
            workdir = root / "runs" / f"{kind}_{seed}"
            of_run = [f"--data_dir={root / kind}", f"--seed={seed}", "--overwrite"]
            for program in ["run_train.py", *of_run, *flags], ["run_eval.py"]:
                command = [sys.executable, *program, f"--workdir={workdir}"]
                subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
            result = json.loads((workdir / "result.json").read_text())
            figures.append(result[result["reported"]])
        each = " ".join(f"{x:.3f}" for x in figures)
        mean = f"{np.mean(figures):.3f} | {min(figures):.3f}"
        print(f"| {kind} | {mean} | {each} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("--drawing", type=int, default=0)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    options, flags = parser.parse_known_args()
    if options.train:
        train_sets(options.root.resolve(), options.seeds, flags)
    for kind in () if options.train else SETS:
        write_set(options.root / kind, kind, options.drawing)

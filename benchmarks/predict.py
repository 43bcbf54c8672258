"""Time and memory of run_predict.py next to Keras' `predict`, each a process.

    python -m benchmarks.predict --workdir=runs/photos --data_dir=photos

predicts the classes of a folder of image files with the network of a run: by
run_predict.py with each of --batch_sizes, and by `image_dataset_from_directory` and
`predict` of Keras, in batches of 32, with the exported network. All read the files, and
begin with the import of TensorFlow. In turn, --rounds times; medians. Last, the largest
difference of a probability, as CSV has them, between the batch sizes.
"""

import csv
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from benchmarks import measure
from towers import export, load_run

KERAS = """
import sys
import keras
file, folder, side = sys.argv[1:]
network, side = keras.models.load_model(file, safe_mode=False), int(side)
images = keras.utils.image_dataset_from_directory(
    folder, labels=None, image_size=(side, side), shuffle=False,
    crop_to_aspect_ratio=True,
)
network.predict(images, verbose=0)
"""


# The peak memory of a process includes what its parent had: this one is small.
LAUNCH = """
import os, subprocess, sys, time
started = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=sys.stderr)
_, status, usage = os.wait4(process.pid, 0)
wall = time.perf_counter() - started
print(status, wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3)
"""


def cost(command: list[str]) -> list[float]:
    """Seconds by the wall clock, seconds of processor time, peak memory in MB."""
    measure.wait_until_idle()
    launch = [sys.executable, "-c", LAUNCH, sys.executable, *command]
    done = subprocess.run(launch, capture_output=True, text=True)
    status, *values = map(float, done.stdout.split())
    if status:
        sys.exit(f"{command}: {done.stderr}")
    return values


def probabilities(path: pathlib.Path) -> np.ndarray:
    """float64 [n, classes] of a CSV file, in the order of the paths."""
    _, *rows = csv.reader(path.open())
    return np.array([row[2:] for row in sorted(rows)], float)


def main() -> None:
    parser = measure.create_parser(__doc__, rounds=3)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--batch_sizes", type=measure.numbers, default=[64])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        network, outputs = os.path.join(folder, "network.keras"), {}
        export(options.workdir, "keras", network)
        side = str(load_run(options.workdir).image_shape[0])
        commands = {"Keras": ["-c", KERAS, network, options.data_dir, side]}
        for size in options.batch_sizes:
            name = f"run_predict.py --batch_size={size}"
            outputs[name] = pathlib.Path(folder, f"{size}.csv")
            flags = ["--csv", "--top=0", f"--output={outputs[name]}"]
            flags += [f"--workdir={options.workdir}", f"--batch_size={size}"]
            commands[name] = ["run_predict.py", *flags, options.data_dir]
        costs = {name: [] for name in commands}
        for number in range(options.rounds):
            for name in list(commands)[:: 1 if number % 2 else -1]:
                costs[name].append(cost(commands[name]))
        values = np.array([probabilities(path) for path in outputs.values()])
    print(measure.report_head("Predictions of image files"))
    print(measure.table_head("program | s, wall clock | s, processor | peak MB"))
    for name, rounds in costs.items():
        wall, processor, memory = np.median(rounds, 0)
        spread = " to ".join(f"{f(rounds, 0)[1]:.1f}" for f in (np.min, np.max))
        cells = f"{wall:.1f}", f"{processor:.1f} ({spread})", f"{memory:.0f}"
        print(measure.table_row(name, *cells))
    print(f"\nLargest difference of a probability: {np.ptp(values, 0).max():.1e}")


if __name__ == "__main__":
    measure.run(main)

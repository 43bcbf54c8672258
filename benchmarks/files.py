"""The cost of many image files: listing, starting, checking.

    python -m benchmarks.files --folder=NEW_FOLDER

makes a million PNG files of 4x4 pixels in NEW_FOLDER/train/CLASS/, 1,000 a class,
reports for each stage its seconds, the growth of the memory of the process at its peak
and what of it stays, and removes the folder:
- `listed`: the names of all files, as `towers.data.image_folder` holds them.
- `as strings`: the same paths in a list of Python, to compare.
- `loaded`: all that `data.load` does: listing, sizes, test images, moments.
- `started`: from a Config to the end of the first step of LeNet at 14x14.
- `checked`: `python -m towers.data`, which reads and decodes every file.
`--stages=listed,checked` takes some of them.
"""

import contextlib
import functools
import gc
import io
import os
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Callable

import numpy as np
from PIL import Image

from benchmarks import measure, trainers
from towers import build, data
from towers.config import Config
from towers.data import check, image_folder
from towers.data.image_files import FolderFiles

FILES_OF_A_CLASS = 1000
NUM_CONTENTS = 100
PIXELS, IMAGE_SIZE = 4, 14


def create_files(folder: pathlib.Path, num_files: int) -> None:
    """`train/CLASS/NAME.png`, noise; some files have the same content."""
    rng = np.random.default_rng(0)
    contents = []
    for pixels in rng.integers(0, 256, [NUM_CONTENTS, PIXELS, PIXELS, 3], np.uint8):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        contents.append(file.getvalue())
    for number in range(num_files):
        class_number, place = divmod(number, FILES_OF_A_CLASS)
        class_folder = folder / "train" / f"n{class_number:08}"
        if place == 0:
            class_folder.mkdir(parents=True)
        path = f"{class_folder}/n{class_number:08}_{place}.png"
        with open(path, "wb", buffering=0) as opened:
            opened.write(contents[number % NUM_CONTENTS])


def resident_bytes() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])


def report(name: str, stage: Callable[[], object], chosen) -> None:
    """Runs a stage and prints its row."""
    gc.collect()
    memory, before = measure.PeakMemory(chosen), resident_bytes()
    started, used = time.perf_counter(), time.process_time()
    kept = stage()
    wall, processor = time.perf_counter() - started, time.process_time() - used
    peak = memory.growth_bytes() / 1e6
    gc.collect()
    stays = (resident_bytes() - before) / 1e6
    del kept
    row = f"{wall:.1f}", f"{processor:.1f}", f"{peak:,.0f}", f"{stays:,.0f}"
    print(measure.table_row(name, *row), flush=True)


def listed(folder: pathlib.Path, chosen) -> FolderFiles:
    train = str(folder / "train")
    return FolderFiles(train, image_folder.Listing(None).classes(train))


def as_strings(folder: pathlib.Path, chosen) -> list[str]:
    classes = sorted(os.listdir(folder / "train"))
    return [
        os.path.join(folder, "train", name, file)
        for name in classes
        for file in sorted(os.listdir(folder / "train" / name))
    ]


def loaded(folder: pathlib.Path, chosen) -> object:
    return data.load("image_folder", str(folder))


def started(folder: pathlib.Path, chosen) -> object:
    config = Config(
        dataset="image_folder",
        data_dir=str(folder),
        image_size=IMAGE_SIZE,
        model="lenet",
        augment="none",
    )
    parts = build.build(config, device_kind=chosen.kind)
    trainer = trainers.create_trainer(config, parts, chosen)
    trainer.train(1)
    return trainer


def checked(folder: pathlib.Path, chosen) -> None:
    with contextlib.redirect_stdout(sys.stderr):
        check.check("image_folder", str(folder), grid_path=str(folder / "grid.png"))


STAGES = {
    "as strings": as_strings,
    "listed": listed,
    "loaded": loaded,
    "started": started,
    "checked": checked,
}


def main() -> None:
    parser = measure.create_parser(__doc__, steps=1, rounds=1)
    parser.add_argument("--folder", required=True, help="is made, and removed")
    parser.add_argument("--num_files", type=int, default=1_000_000)
    parser.add_argument("--stages", type=measure.names, default=list(STAGES))
    options = parser.parse_args()
    if not set(options.stages) <= set(STAGES):
        parser.error(f"--stages takes {', '.join(STAGES)}")
    folder = pathlib.Path(options.folder)
    folder.mkdir()  # no folder of somebody else's is removed
    chosen = measure.all_devices(options.device, 1)
    try:
        started_at = time.perf_counter()
        create_files(folder, options.num_files)
        print(measure.report_head(f"A folder of {options.num_files:,} files"))
        print(
            f"Files made in {time.perf_counter() - started_at:.0f} s; load of the "
            f"machine {' '.join(f'{x:.1f}' for x in os.getloadavg())}\n\n"
            + measure.table_head(
                "stage | seconds | of the processor | MB at the peak | MB that stay"
            ),
            flush=True,
        )
        for name in options.stages:
            stage = functools.partial(STAGES[name], folder, chosen)
            report(name, stage, chosen)
        load = " ".join(f"{x:.1f}" for x in os.getloadavg())
        print(f"\nLoad of the machine at the end: {load}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    measure.run(main)

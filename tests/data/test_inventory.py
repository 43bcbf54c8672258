"""The inventory of a data set, as docs/data.md shows it."""

import csv
import pathlib

import containers
import numpy as np
from containers import CLASSES, examples, write_images

from towers import data
from towers.data.sets import arrays

PAGE = pathlib.Path(__file__).parents[2] / "docs/data.md"
ROWS = examples(30)
REST = ROWS[::5]
TRAIN = [row for row in ROWS if row not in REST]


def folder(root):
    write_images(root / "train", TRAIN)
    write_images(root / "val2017", REST)
    write_images(root / "holdout", REST)
    (root / "README.txt").touch()
    return "image_folder", root


def table(root):
    write_images(root / "images", ROWS)
    with open(root / "photos.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "label", "camera", "split"])
        for number, (path, label, _) in enumerate(ROWS):
            split = "train" if number % 5 else "val"
            writer.writerow([f"images/{path}", CLASSES[label], "left", split])
    return "table", root / "photos.csv"


def parquet(root):
    containers.write_parquet(root, TRAIN, "train")
    containers.write_parquet(root, REST, "test")
    return "parquet", root


def tar(root):
    containers.write_tars(root, TRAIN, "train")
    containers.write_tars(root, REST, "val")
    return "webdataset", root


def tf_records(root):
    containers.write_records(root, ROWS, "photos")
    return "tfrecord", root / "photos*"


def of_arrays(root):
    labels = np.eye(3)[[label for _, label, _ in ROWS]]
    return arrays.give((np.zeros((30, 8, 6, 3), np.uint8), labels), CLASSES), ""


MADE = {
    "A folder of images": folder,
    "A CSV file": table,
    "Parquet files": parquet,
    "Tar files": tar,
    "TFRecord files": tf_records,
    "Arrays in Python": of_arrays,
}


def screens(root):
    """Return the lines of each kind as the page shows them."""
    text = ""
    for title, make in MADE.items():
        (root / title).mkdir()
        name, path = make(root / title)
        data_set = data.load(name, str(path))
        lines = [f"    {a:12} {b}\n" for a, b in data_set.inventory.lines(data_set)]
        text += f"{title}:\n\n{''.join(lines)}\n"
    return text


def test_the_screens_of_the_page_are_those_of_the_program(tmp_path):
    assert screens(tmp_path) in PAGE.read_text()


if __name__ == "__main__":  # prints them for the page
    import tempfile

    with tempfile.TemporaryDirectory() as folder_name:
        print(screens(pathlib.Path(folder_name)))

"""Options for a folder of photos, from its number of images and their size."""

import contextlib
import itertools
import os
import pathlib
import re
import statistics
from typing import Any

from PIL import Image

from towers.config.choices import CONTAINERS
from towers.data.files import class_folders
from towers.data.files.band_files import read_bands
from towers.data.files.paths import advice, data_folder, format_of, is_image_name
from towers.data.files.reading import is_url, matches
from towers.data.files.rows import OF_IMAGES, SUBMISSION, read_rows
from towers.data.inventory import Inventory
from towers.errors import ConfigError, DataError

SAMPLE = 100  # images whose size is read
FINE_TUNED_SIZE = 160

# Images to train on, in all epochs together, and the range of the number of epochs.
FROM_SCRATCH = 10_000, 15, 100
FINE_TUNING = 15_000, 5, 30


def photo_options(
    data_dir: str,
    fine_tuning: bool = False,
    class_level: int = 0,
    is_named: bool = False,
) -> dict[str, Any]:
    """Return options for the contents of a folder: the data set, and more for images.

    For images in class folders these are their size and the number of epochs, for a
    training from trained weights (`fine_tuning`) or from scratch; and no changes of
    colors for other images than 8-bit gray and colors. DataError if the folder
    has no data set of a known kind, or its table rivals class folders and no data set
    is named (`is_named`). ConfigError if there are several data sets.
    """
    if not os.path.isdir(os.path.expanduser(data_dir)):
        for container, row in CONTAINERS.items():
            if row.reads(data_dir):
                return {"dataset": container}
        if is_url(data_dir):
            return {"dataset": "image_folder"}
    root = data_folder(data_dir)
    try:
        paths = _image_paths(root, class_level)
    except DataError:
        if not os.path.isdir(root):
            raise
        from towers.data.sets.published import data_sets_in

        names = data_sets_in(root) or _containers_in(root)
        if not names:
            raise
        if names[1:]:
            way = f"name one, as in --dataset={names[0]}"
            why = f"--data_dir={root} holds {', '.join(names)}: {way}"
            raise ConfigError(why) from None
        return {"dataset": names[0]}
    if not is_named:
        _refuse_tables_of(paths, root)
    colors: dict[str, float] = {}
    if fine_tuning:
        image_size, (images, least, most) = FINE_TUNED_SIZE, FINE_TUNING
    else:
        sample = paths[:: len(paths) // SAMPLE + 1]
        known = list(filter(None, map(_size_and_depth, sample)))
        side = statistics.median([min(size) for size, _ in known] or [64])
        image_size = 128 if side >= 128 and len(paths) >= 10_000 else 64
        image_size = 32 if side < 48 else image_size
        images, least, most = FROM_SCRATCH
        if known and all(is_deep for _, is_deep in known):
            colors = {"color_jitter": 0.0, "random_gray": 0.0}
    return {
        "dataset": "image_folder",
        "image_size": image_size,
        "num_epochs": float(min(max(images // len(paths), least), most)),
        **colors,
    }


def _refuse_tables_of(paths, root):
    """Refuse a table next to class folders whose labels rival the folders' names."""
    stems = {os.path.splitext(os.path.basename(path))[0] for path in paths}
    for name in sorted(os.listdir(root)):
        table = os.path.join(root, name)
        if not CONTAINERS["table"].matches(name) or not os.path.isfile(table):
            continue
        named = []
        with contextlib.suppress(DataError):
            rows = itertools.islice(read_rows(table, (), Inventory()), 1, 1 + SAMPLE)
            for _, row in rows:
                names = [re.split(r"[/\\]", str(cell))[-1] for cell in row]
                # A number may be anything, such as the number of a class.
                names = [x for x in names if not x.isdigit()]
                named.append(any(os.path.splitext(x)[0] in stems for x in names))
        if 2 * sum(named) > len(named):
            tables = root if class_folders.split_of(name) else table
            raise DataError(
                f"--data_dir={root} has folders of images and a table of them: are the "
                "folders the classes, --dataset=image_folder, or has the table the "
                f"labels, --dataset=table --data_dir={tables}?"
            )


def _containers_in(root):
    """Return values of --dataset for the files in a folder, or below it."""
    kinds, paths = {}, [x for x in matches(root) if not SUBMISSION.search(x)]
    has_images = any(map(is_image_name, paths))
    for path in paths:
        kind = next((x for x, row in CONTAINERS.items() if row.matches(path)), None)
        folder, name = os.path.split(path)
        is_of_images = kind == "table" and name.startswith(OF_IMAGES)
        if folder == root or is_of_images or (kind != "table" and not has_images):
            kinds[kind] = path
        if name.endswith(".arrow") and not has_images:
            raise DataError(f"{path}: {advice(path)}")
    return [kind for kind in kinds if kind]


def _image_paths(root, class_level):
    """Return the images of all classes, sorted."""
    folders = class_folders.find_folders(root, None, class_level)
    train = class_folders.training_folder(root, folders)
    entries = class_folders.folders_in(train)
    classes = {x.name: list(class_folders.images_below(x.path)) for x in entries}
    counts = {name: len(paths) for name, paths in classes.items() if paths}
    if len(counts) < (2 if class_level < 2 else 1):
        raise class_folders.misfit(root, train, counts)
    return sorted(itertools.chain(*classes.values()))


def _size_and_depth(path):
    """Return the size, and whether pixels are not 8-bit gray or colors; or None."""
    with contextlib.suppress(Exception):  # loading the data set names the file
        content = pathlib.Path(path).read_bytes()
        if bands := read_bands(content, format_of(content), True):
            return (bands.width, bands.height), True
        with Image.open(path) as image:
            return image.size, False
    return None

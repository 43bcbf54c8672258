"""Draws a folder of photographs to try the programs on, in place of your own.

    python docs/draw_photos.py photos

writes 60 files into each of photos/boat, photos/house, photos/sun and photos/tree, as
different as those that people collect: 120 to 1200 pixels wide or high; JPEG, PNG, WebP
and BMP; in color, gray, CMYK, with a palette or transparency; their pixels turned in
all eight ways that EXIF knows. The same seed draws the same photographs.
"""

import argparse
import pathlib

import numpy as np
from PIL import ExifTags, Image
from scenes import SCENES, photograph

# Ending and mode of the files, in turn. BMP has no EXIF.
KINDS = (
    *((".jpg", "RGB"), (".JPG", "RGB"), (".jpeg", "L"), (".jpg", "CMYK")),
    *((".png", "RGB"), (".png", "RGBA"), (".png", "L"), (".png", "P")),
    *((".webp", "RGB"), (".webp", "RGBA"), (".bmp", "RGB"), (".bmp", "P")),
)

# How the pixels are stored, so that the orientation of EXIF turns them upright.
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def save(image: Image.Image, path: pathlib.Path, mode: str, orientation: int) -> None:
    """Write a photograph whose stored pixels are turned; the ending is its format."""
    if orientation != 1:
        image = image.transpose(STORED[orientation])
    if mode == "RGBA":
        image.putalpha(200)
    image = image.quantize(128) if mode == "P" else image.convert(mode)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    options = {} if path.suffix == ".bmp" else {"exif": exif}
    image.save(path, **options)


def draw_photos(folder: pathlib.Path, num_each: int = 60, seed: int = 0) -> None:
    """Write `num_each` files `folder/CLASS/NAME` of each class."""
    for label, class_name in enumerate(SCENES):
        (folder / class_name).mkdir(parents=True, exist_ok=True)
        for number in range(num_each):
            sequence = np.random.SeedSequence([seed, label, number])
            rng = np.random.Generator(np.random.Philox(sequence))
            ending, mode = KINDS[number % len(KINDS)]
            orientation = 1 if ending == ".bmp" else int(rng.integers(1, 9))
            path = folder / class_name / f"{class_name}_{number:02}{ending}"
            save(photograph(class_name, rng), path, mode, orientation)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path, help="folder to write")
    draw_photos(parser.parse_args().folder)

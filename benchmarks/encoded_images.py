"""JPEG files as run_predict.py sees them, and as the `encoded_images` of a SavedModel.

    python -m benchmarks.encoded_images --workdir=RUN

cuts 300 pictures of 30 kinds out of scikit-learn's two sample photos, predicts them
with run_predict.py, exports the run as a SavedModel, and predicts them with its
signature `encoded_images`. The table has for each kind the largest difference of a
pixel of the image that the network gets, the share of values that differ, the largest
difference of a probability, which run_predict.py rounds to 6 digits, and of a pixel by
the function `pixels` of docs/export.md.
"""

import argparse
import csv
import io
import json
import pathlib
import subprocess
import sys
import tempfile
import textwrap

import numpy as np
import PIL
import tensorflow as tf
from PIL import ExifTags, Image
from sklearn.datasets import load_sample_images

from benchmarks import measure
from benchmarks.photo_sets import REPOSITORY
from towers import load_run
from towers.data.files.image import read_image
from towers.exporting.encoded_images import decode_image
from towers.exporting.writers import preprocessing_json

XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="6"/></x:xmpmeta>'
SIZES = {"": (30, 420), "tiny, ": (1, 16), "large, ": (1200, 2600)}
# Name -> options of Pillow's writer; words of a name choose the picture.
KINDS: dict[str, dict] = {f"quality {x}": {"quality": x} for x in (5, 50, 75, 95, 100)}
KINDS |= {f"chroma {x}": {"subsampling": x} for x in ("4:4:4", "4:2:2", "4:1:1")}
KINDS |= {
    "progressive": {"progressive": True},
    "progressive, 4:4:4": {"progressive": True, "subsampling": 0, "quality": 30},
    "optimized": {"optimize": True},
    "restart markers by blocks": {"restart_marker_blocks": 3},
    "restart markers by rows": {"restart_marker_rows": 1},
    "stored as RGB": {"keep_rgb": True},
    "gray": {},
    "gray, progressive": {"progressive": True},
    "CMYK": {"quality": 90},
    "CMYK, 4:2:0": {"subsampling": 2},
    "CMYK without Adobe's marker": {"quality": 90},
    **{f"EXIF orientation {number}": {} for number in range(2, 9)},
    "XMP orientation 6": {"xmp": XMP},
    "tiny, 1 to 15 pixels": {"quality": 90},
    "large, baseline": {"quality": 90},
    "large, progressive": {"progressive": True},
}


def draw(kind: str, photo: np.ndarray, rng: np.random.Generator) -> bytes:
    """Return a JPEG file of a random part of a photo, of a random size."""
    range_of = next(SIZES[name] for name in reversed(SIZES) if kind.startswith(name))
    size, (height, width) = rng.integers(*range_of, 2), photo.shape[:2]
    (left, top), (right, bottom) = rng.uniform(0, 0.5, 2), rng.uniform(0.6, 1, 2)
    box = left * width, top * height, right * width, bottom * height
    image = Image.fromarray(photo).resize(size, Image.Resampling.BICUBIC, box)
    if kind.startswith("gray"):
        image = image.convert("L")
    if kind.startswith("CMYK"):  # Pillow's own conversion leaves black empty
        image = Image.merge("CMYK", (*image.split(), image.convert("L")))
    options = dict(KINDS[kind])
    if kind.startswith("EXIF"):
        options["exif"] = exif = Image.Exif()
        exif.endian = "<" if rng.random() < 0.5 else ">"
        exif[ExifTags.Base.Make] = "camera"
        exif[ExifTags.Base.Orientation] = int(kind[-1])
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    content = file.getvalue()
    if "without" in kind:
        start = content.index(b"\xff\xee")
        content = content[:start] + content[start + 16 :]
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True)
    workdir = pathlib.Path(parser.parse_args().workdir).resolve()
    run, rng = load_run(workdir), np.random.default_rng(0)
    photos = load_sample_images().images
    contents = {
        f"{kind}/{i}": draw(kind, photos[i % len(photos)], rng)
        for kind in KINDS
        for i in range(10)
    }
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{i:03}.jpg" for i in range(len(contents))]
        for path, content in zip(paths, contents.values(), strict=True):
            pathlib.Path(path).write_bytes(content)
        for program, *flags in (
            ("predict", "--csv", "--top=0", f"--output={folder}/a.csv", *paths),
            ("export", "--format=saved_model", f"--output={folder}/saved_model"),
        ):
            command = [sys.executable, f"run_{program}.py", f"--workdir={workdir}"]
            subprocess.run([*command, *flags], cwd=REPOSITORY, check=True)
        with open(f"{folder}/a.csv", newline="") as file:
            rows = {row[0]: np.float64(row[2:]) for row in list(csv.reader(file))[1:]}
        loaded = tf.saved_model.load(f"{folder}/saved_model")
        signature = loaded.signatures["encoded_images"]
        results = signature(tf.constant(list(contents.values())))["probabilities"]
    options = run.config.resize_options
    decode = tf.function(
        lambda x: decode_image(x, run.image_shape, **options),
        input_signature=[tf.TensorSpec([], tf.string)],
    )
    from_page, by_kind = page_function(), {kind: [] for kind in KINDS}
    preprocessing = json.loads(preprocessing_json(run))
    for key, path, row in zip(contents, paths, results.numpy(), strict=True):
        expected = read_image(contents[key], run.image_shape, **options).astype(int)
        page = from_page(io.BytesIO(contents[key]), **preprocessing)
        differs = np.abs(decode(contents[key]).numpy() - expected)
        figures = differs.max(), 100 * (differs > 0).mean()
        figures += np.abs(row - rows[path]).max(), np.abs(page - expected).max()
        by_kind[key.rpartition("/")[0]].append(figures)
    print(measure.report_head("Encoded images"))
    print(f"Images {run.image_shape}, {options}, Pillow {PIL.__version__}.\n")
    columns = "kind | largest difference of a pixel | values that differ, percent | "
    columns += "largest difference of a probability | of a pixel of `pixels.py`"
    print(measure.table_head(columns))
    for kind, figures in by_kind.items():
        pixel, _, probability, page = np.max(figures, 0)
        share = np.mean(figures, 0)[1]
        cells = f"{pixel:.0f}", f"{share:.2f}", f"{probability:.1e}", f"{page:.0f}"
        print(measure.table_row(kind, *cells))


def page_function():
    """Return the function `pixels` of docs/export.md."""
    text = (REPOSITORY / "docs" / "export.md").read_text()
    start = text.index("    import numpy\n    from PIL")
    names = {}
    exec(textwrap.dedent(text[start : text.index("\n\nEach", start)]), names)
    return names["pixels"]


if __name__ == "__main__":
    measure.run(main)

"""Runs with random values in place of trained ones, to be exported."""

import pathlib
import re
import textwrap

import numpy as np
from PIL import ExifTags, Image

from towers import load_run
from towers.build import builder
from towers.build.restored import RestoredRun
from towers.config import Config
from towers.data.augment.augmentation import create_augment
from towers.run.dataset_info import DatasetInfo
from towers.training.train import train

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "export.md"
CLASS_NAMES = ("cat", "dog", "größer als", "a\tb", "e", "f", "g", "h", "i", "j")
MEAN, DEVIATION = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)


def random_run(
    model: str,
    augment: str = "none",
    image_shape: tuple[int, int, int] = (32, 32, 3),
    std: tuple[float, ...] = DEVIATION,
    **options,
) -> RestoredRun:
    """A run of a network, all of whose values are drawn, also those that begin as 0 or
    1; its moving averages differ from its parameters."""
    config = Config(**{"width": 0.25, **options}, model=model, augment=augment)
    channels = image_shape[-1]
    info = DatasetInfo(
        "drawn", CLASS_NAMES, image_shape, MEAN[:channels], std[:channels]
    )
    shape = create_augment(augment, image_shape, info.mean, info.std).image_shape
    network = builder.create_network(config, shape, len(CLASS_NAMES))
    rng = np.random.default_rng(0)

    def drawn(variable):
        values = variable.numpy()
        scale = 0.5 * values.std() + 0.05 * np.abs(values).mean() + 0.02
        values = values + rng.normal(0, scale, values.shape)
        is_variance = variable.path.endswith("moving_variance")
        return np.float32(np.abs(values) if is_variance else values)

    tensors = {}
    for variable in network.trainable_variables:
        for kind in ("params", "averages"):
            tensors[f"{kind}/{variable.path}"] = drawn(variable)
    for variable in network.non_trainable_variables:
        tensors[f"state/{variable.path}"] = drawn(variable)
    return RestoredRun(pathlib.Path("a run"), 7, config, info, tensors)


def random_images(run: RestoredRun, count: int = 4) -> np.ndarray:
    """uint8 [count, *run.image_shape]."""
    rng = np.random.default_rng(1)
    return rng.integers(0, 256, (count, *run.image_shape)).astype(np.uint8)


def trained(workdir: pathlib.Path, **options) -> RestoredRun:
    """A run on the drawn shapes."""
    settings = {"dataset": "shapes", "device": "cpu", "ema_decay": 0.0}
    settings |= {"eval_every_epochs": 0.0, "summary_every_steps": 0}
    train(workdir, Config(**settings | options))
    return load_run(workdir)


def programs(heading: str) -> list[str]:
    """The programs of a section of docs/export.md."""
    sections = re.split(r"^##? ", PAGE.read_text(), flags=re.MULTILINE)
    [section] = [x for x in sections if x.startswith(f"{heading}\n")]
    texts = re.findall(r"(?:^    .*\n|^\n(?=    ))+", section, re.MULTILINE)
    texts = [textwrap.dedent(text).strip() for text in texts]
    return [text for text in texts if text.startswith("import ")]


def draw_odd_photos(folder: pathlib.Path) -> list[pathlib.Path]:
    """24 photos of kinds that programs often read wrongly."""
    rng = np.random.default_rng(0)

    def scene(height, width, mode="RGB"):
        coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8))
        smooth = coarse.resize((width, height), Image.Resampling.BICUBIC)
        pixels = np.asarray(smooth) + rng.normal(0, 12, (height, width, 3))
        pixels = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
        return pixels.convert(mode)

    deep = np.uint16(257) * np.asarray(scene(130, 170, "L")) // 2
    deep = Image.fromarray(deep.astype(np.uint16))
    rgba, palette = scene(150, 151, "RGBA"), scene(140, 141).quantize(60)
    rgba.putalpha(scene(150, 151, "L"))
    photos = {
        "large.jpg": scene(1501, 2003),
        "progressive.jpg": scene(640, 480),
        "gray.jpg": scene(211, 333, "L"),
        "cmyk.jpg": scene(222, 190, "CMYK"),
        "photo.webp": scene(231, 145),
        "rgba.png": rgba,
        "gray.png": scene(99, 133, "LA"),
        "palette.png": palette,
        "palette.gif": palette,
        "bits.png": scene(100, 100, "1"),
        "gray16.png": deep,
        "gray16.tif": deep,
        "gray16.pgm": deep,
        "tiny.png": scene(3, 5),
        "pixel.png": scene(1, 1),
        "wide.png": scene(20, 900),
    }
    for turn in range(1, 9):
        photos[f"turned{turn}.jpg"] = image = scene(301, 477)
        image.getexif()[ExifTags.Base.Orientation] = turn
    for name, image in photos.items():
        options = {"exif": image.getexif()} if "turned" in name else {}
        if name == "progressive.jpg":
            options["progressive"] = True
        if name == "palette.png":
            options["transparency"] = bytes(range(60))
        image.save(folder / name, **options)
    assert len(photos) == 24
    return [folder / name for name in photos]

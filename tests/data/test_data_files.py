"""Whatever stands in the place of a file of data is neither waited for nor read without
an end; "row" is one of reliability.md."""

import os
import struct

import numpy as np
import pytest
from engines.corruptions import time_limit
from pictures import chunk, write_folder

from towers.data.files import image_folder
from towers.data.sets import published
from towers.data.sets.official_files import RecordFile
from towers.data.sets.published import read_file
from towers.errors import DataError

HUGE = 10**11
LABELS = RecordFile(
    "labels", 3, np.dtype([("label", "u1")]), struct.pack(">ii", 0x801, 3)
)
IMAGE_HEADER = struct.pack(">IIBBBBB", 10**5, 10**5, 8, 2, 0, 0, 0)
IMAGE = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", IMAGE_HEADER)


def device(path):
    path.symlink_to("/dev/zero")


def sparse(path, content=b""):
    """A file of HUGE bytes that takes no room."""
    path.write_bytes(content)
    os.truncate(path, HUGE)


def idx_file(folder):
    return read_file(LABELS, str(folder), {})


@pytest.mark.parametrize("plant", [device, sparse])
@pytest.mark.parametrize(
    "name, read",
    [
        ("cifar-10-binary.tar.gz", lambda x: published.load("cifar10", str(x))),
        ("labels", idx_file),
        ("labels.gz", idx_file),
    ],
)
@pytest.mark.row(40)
def test_row_40_nothing_planted_is_waited_for_or_read_without_an_end(
    tmp_path, name, read, plant
):
    plant(tmp_path / name)
    with time_limit(10), pytest.raises(DataError) as caught:
        read(tmp_path)
    text = str(caught.value)
    assert text.startswith(str(tmp_path)) and text.isprintable() and len(text) <= 400
    if plant is not sparse:
        assert "is not a file" in text


@pytest.mark.row(40)
def test_row_40_an_image_file_beyond_its_pixels_is_refused_unread(tmp_path):
    write_folder(tmp_path, "train", {"ant": 2, "cat": 2})
    path = tmp_path / "train" / "cat" / "00.png"
    sparse(path, IMAGE)
    os.truncate(path, 700_000_000)
    with time_limit(20), pytest.raises(DataError) as caught:
        image_folder.load(str(tmp_path))
    assert str(caught.value).startswith(
        f"{path}: has 700,000,000 bytes, and at most 464,000,000 are read with "
        "max_image_pixels=50000000; "
    )
    assert len(str(caught.value)) <= 400 + len(str(path))
    path.write_bytes(IMAGE + chunk(b"IDAT", bytes(99_000)))
    with pytest.raises(DataError, match=r"00\.png: has 10,000,000,000 pixels"):
        image_folder.load(str(tmp_path))

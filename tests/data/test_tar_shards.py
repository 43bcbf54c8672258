"""Members of tar files: links, damage, names, and labels in other places."""

import io
import os
import subprocess
import tarfile

import containers
import numpy as np
import pytest
from containers import examples
from pictures import png as encoded
from pictures import random_pixels
from prepared_sets import all_of, message

from towers import data
from towers.data.sources import location_of

CLASSES = ("ant", "cat", "dog")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOWERS_CACHE_DIR", str(tmp_path / "cache"))


def load(path, **options):
    return data.load("webdataset", str(path), **options)


def write(path, members, **options):
    with tarfile.open(path, "w", **options) as archive:
        for name, content in members:
            containers.add_member(archive, name, content)


def assert_labels(data_set, count, number_of=lambda name: int(name[:5])):
    """Image i is `random_pixels([0, i])`, and i its name."""
    assert data_set.class_names == CLASSES
    expected = [label for _, label, _ in examples(30)]
    total = 0
    for source in data_set.sources.values():
        for index, (image, label) in enumerate(zip(*all_of(source), strict=True)):
            name = os.path.basename(location_of(source, index).split(": ")[1])
            number = number_of(name)
            np.testing.assert_array_equal(image, random_pixels([0, number]))
            assert label == expected[number]
            total += 1
    assert total == count


def labeled(stem="{:05}", image="png", label="cls"):
    """Members of 30 examples."""
    for number, (_, cls, content) in enumerate(examples(30)):
        yield f"{stem.format(number)}.{image}", content
        yield f"{stem.format(number)}.{label}", CLASSES[cls].encode()


@pytest.mark.parametrize("kind", ["hard", "symbolic"])
def test_links_are_read_as_gnu_tar_writes_them(tmp_path, kind):
    folder = tmp_path / "files"
    folder.mkdir()
    for name, content in labeled():
        if name.endswith(".cls"):
            (folder / content.decode()).write_bytes(content)
            if kind == "hard":
                os.link(folder / content.decode(), folder / name)
            else:
                os.symlink(content.decode(), folder / name)
        else:
            (folder / name).write_bytes(content)
    command = ["tar", "--sort=name", "-cf", tmp_path / "a.tar", "-C", folder, "."]
    subprocess.run(command, check=True)
    assert_labels(load(tmp_path / "a.tar"), 30)


LAYOUTS = {
    "dots in names": (list(labeled("{:05}.x.5")), "last dot"),
    "labels after images": (sorted(labeled(), key=lambda x: x[0].endswith(".cls")), ""),
    "labels in another folder": (
        [(f"{'images' if 'png' in n else 'labels'}/{n}", x) for n, x in labeled()],
        "any folder",
    ),
    "folders of classes": (
        [(f"set/{CLASSES[y]}/{x[-9:]}", z) for x, y, z in examples(30)],
        "folders",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_are_inferred_and_said(tmp_path, layout):
    members, words = LAYOUTS[layout]
    write(tmp_path / "a.tar", members)
    data_set = load(tmp_path / "a.tar")
    assert_labels(data_set, 30)
    again = load(tmp_path / "a.tar")  # from the index that was kept
    for each in (data_set, again):
        assert words in " ".join(each.inventory.inferred.values())


def header(change):
    """Changes the header of the third member; its checksum then fits."""

    def spoil(content):
        begin = content.index(b"00001.png")
        block = bytearray(content[begin : begin + 512])
        change(block)
        block[148:156] = b"%06o\0 " % sum(block[:148] + b" " * 8 + block[156:])
        return content[:begin] + bytes(block) + content[begin + 512 :]

    return spoil


def negative(block):
    block[124:136] = b"-0000001000\0"


def base_256(block):
    block[124:136] = b"\xff" * 12


def sparse(block):
    block[156:157] = b"S"


def flip(content):
    place = content.index(b"00001.png") + 100
    return content[:place] + b"1" + content[place + 1 :]


def pax_size(content):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("00001.png")
        member.pax_headers = {"size": "-1536"}
        archive.addfile(member)
    return file.getvalue()


@pytest.mark.parametrize(
    "spoil, words",
    [
        (header(negative), "a size is negative"),
        (header(base_256), "a size is negative"),
        (pax_size, "a size is negative"),
        (header(sparse), "00001.png is sparse"),
        (flip, "is damaged at byte"),
    ],
)
def test_damage_is_named(tmp_path, spoil, words):
    write(tmp_path / "a.tar", labeled())
    content = spoil((tmp_path / "a.tar").read_bytes())
    (tmp_path / "a.tar").write_bytes(content)
    assert words in message(load, tmp_path / "a.tar")


@pytest.mark.parametrize(
    "members, words",
    [
        ([*labeled(), ("./00003.cls", b"cat")], "two members called 00003.cls"),
        ([*labeled(), ("00003.CLS", b"cat")], "are one member"),
        ([*labeled(), ("00030.cls", b" \n"), ("00030.png", b"1")], "has no label"),
        ([*labeled(), ("00030.cls", b"nan"), ("00030.png", b"1")], "missing label"),
        ([("a.json", b"[" * 9**5), ("a.png", b"")], "a.json is nested too deeply"),
        ([("a.json", b'{"label": [1]}'), ("a.png", b"")], "[1] is not a label"),
        ([("a.json", b'{"kind": 1}'), ("a.png", b"")], "no key label, only kind; --c"),
        ([(f"{x}/{y}/1.png", b"") for x in "ab" for y in "cd"], "or the folder above"),
        ([(f"{x}/{y}/1.png", b"") for x in ("train", "val") for y in "cd"], "unpack"),
        ([(f"{x}2017/1.png", b"") for x in ("train", "val")], "unpack"),
    ],
)
def test_what_has_two_readings_or_no_label_is_refused(tmp_path, members, words):
    write(tmp_path / "a.tar", members)
    assert words in message(load, tmp_path / "a.tar")


def test_labels_are_stripped_and_lists_and_folders_of_one_are_no_labels(tmp_path):
    members = [
        (name, content if "png" in name else b"  " + content + b" \r\n")
        for name, content in labeled()
    ]
    write(tmp_path / "train.tar", members)
    write(tmp_path / "test.tar", [(f"photos/{n}", x) for n, x in members if "png" in n])
    data_set = load(tmp_path)
    assert_labels(data_set, 30)
    assert data_set.inventory.unused["splits without labels"] == 1


@pytest.mark.row(60)
def test_row_60_labels_whose_image_is_missing_are_counted(tmp_path):
    members = [x for x in labeled() if x[0] not in ("00003.png", "00012.png")]
    write(tmp_path / "a.tar", members)
    data_set = load(tmp_path / "a.tar")
    assert_labels(data_set, 28)
    names = data_set.inventory.names["labels without an image"]
    assert names == ["00003.cls", "00012.cls"]


def test_classes_may_contain_names_of_splits_and_paths_be_in_two_fields(tmp_path):
    folder, names = "f" * 90, ("car", "steam_train")
    members = [
        (f"{folder}/{names[i % 2]}/{i}.png", encoded(random_pixels(i)))
        for i in range(30)
    ]
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), 0.5  # which a pax record has
            archive.addfile(member, io.BytesIO(content))
    assert load(tmp_path / "a.tar").class_names == names

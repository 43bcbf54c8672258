"""python -m towers.check: what it says, what it draws, and how it ends."""

import dataclasses
import os
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from pictures import png, random_pixels, write_folder
from PIL import Image

from towers import Config, train
from towers.check import program
from towers.check.report import duplicates, prints_of
from towers.data import load
from towers.data.identical import identical_images
from towers.data.sources import ArraySource
from towers.errors import TowersError, report


def main(arguments):
    """Runs the command in this process; its exit code."""
    values = flags.FlagValues()
    program.define_flags(values)
    try:
        program.main(program.parse(["towers.check", *arguments], values), values)
    except TowersError as error:
        return report("towers.check", error)
    return 0


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "root", "train", {"ant": 12, "cat": 3})
    write_folder(tmp_path / "root", "test", {"ant": 2, "cat": 1}, seed=1)
    return tmp_path / "root"


@pytest.fixture
def run(root, capfd):
    """Runs the command on the folder: exit code, lines on stdout, lines on stderr."""

    def run(*arguments):
        code = main(["--dataset=image_folder", f"--data_dir={root}", *arguments])
        said = capfd.readouterr()
        return code, said.out.splitlines(), said.err.splitlines()

    return run


def test_a_sound_data_set_is_described(run, root):
    code, lines, errors = run()
    assert (code, errors) == (0, [])
    pixels = [random_pixels([0, k, i]) for k, n in ((0, 12), (1, 3)) for i in range(n)]
    mean, std = np.mean(pixels, (0, 1, 2)), np.std(pixels, (0, 1, 2))
    assert lines == [
        f"data set    image_folder, {root}",
        "training    train/",
        "test        test/",
        "images      15 training, 3 test",
        "read as     8x6 (height x width), 3 channel(s)",
        "stored as   8x6 (18)",
        "mean        " + " ".join(f"{x:.2f}" for x in mean),
        "std         " + " ".join(f"{x:.2f}" for x in std),
        "classes     2: training, test images",
        "            ant       12        2",
        "            cat        3        1",
        f"picture     {root.parent}/image_folder-root.png: a row for each of 2 classes",
    ]


def test_images_count_in_each_of_their_classes(root, capfd):
    """Several labels an image; a copy with other labels is named."""
    rows = ["path,label,split"]
    for split, labels in {"train": ["ant;cat", "cat", "ant"], "test": ["cat"]}.items():
        for number, names in enumerate(labels):
            rows.append(f"{split}/ant/{number:02}.png,{names},{split}")
    shutil.copy(root / "train/ant/01.png", root / "train/ant/02.png")
    (root / "labels.csv").write_text("\n".join(rows))
    assert main(["--dataset=table", f"--data_dir={root / 'labels.csv'}"]) == 0
    lines = capfd.readouterr().out.splitlines()
    images = next(line for line in lines if line.startswith("images"))
    assert images.split() == ["images", "3", "training,", "1", "test"]
    start = lines.index("classes     2: training, test images")
    counts = [line.split() for line in lines[start + 1 : start + 3]]
    assert counts == [["ant", "2", "0"], ["cat", "2", "1"]]
    identical = next(line for line in lines if line.startswith("identical"))
    assert "1 training image(s) also in another class" in identical


def test_a_table_is_read_as_a_training_reads_it(root, capfd):
    """In the size of the recipe; the flag decides as there."""
    rows = ["path,label"]
    rows += [f"{x.relative_to(root)},{x.parent.name}" for x in root.rglob("*.png")]
    (root / "labels.csv").write_text("\n".join(rows))
    for flags_given, size in ([], "(64|160)"), (["--image_size=9"], "9"):
        assert main([str(root / "labels.csv"), *flags_given]) == 0
        assert re.search(rf"^read as +{size}x{size} ", capfd.readouterr().out, re.M)
    assert main([str(root / "labels.csv"), "--class_level=1"]) == 0
    assert "class_level=1 has no effect" in capfd.readouterr().out


def test_the_picture_shows_ten_images_of_each_class(run, tmp_path):
    assert run("--grid=drawn.png")[0] == 0
    picture = tf.io.decode_png((tmp_path / "drawn.png").read_bytes()).numpy()
    # 8x6 pixels six times enlarged, with gaps of two.
    assert picture.shape == (2 * 50 + 2, 10 * 38 + 2, 3)
    for row, label, column in ((0, 0, 0), (0, 0, 9), (1, 1, 2)):
        top, left = 50 * row + 2, 38 * column + 2
        cell = picture[top : top + 48, left : left + 36]
        expected = random_pixels([0, label, column])
        np.testing.assert_array_equal(cell[::6, ::6], expected)
        np.testing.assert_array_equal(cell[5::6, 5::6], expected)
    assert (picture[52:, 38 * 3 :] == 128).all()  # the class has only three
    assert (picture[:2] == 128).all()


@pytest.mark.row(48, 53)
def test_a_picture_replaces_its_own_kind_alone(run, tmp_path):
    assert run("--grid=drawn.png")[0] == run("--grid=drawn.png")[0] == 0
    for content in (png(random_pixels(0, 8, 6)), b"notes"):
        (tmp_path / "mine.png").write_bytes(content)
        code, _, lines = run("--grid=mine.png")
        assert code == 2 and "mine.png: another program wrote" in lines[-1]
        assert (tmp_path / "mine.png").read_bytes() == content


def test_the_picture_of_another_data_set_stays(root, tmp_path, capfd):
    for folder in "a/photos", "b/photos", "a/photos", "b/photos":
        if not (tmp_path / folder).exists():
            shutil.copytree(root, tmp_path / folder)
        assert main(["--dataset=image_folder", f"--data_dir={folder}"]) == 0
    shutil.copytree(root, tmp_path / "c/photos")
    (tmp_path / "image_folder-photos-3.png").write_bytes(b"notes")
    assert main(["--dataset=image_folder", "--data_dir=c/photos"]) == 0
    out = capfd.readouterr().out
    pictures = re.findall(r"/image_folder-photos(.*)\.png: a row", out)
    assert pictures == ["", "-2", "", "-2", "-4"]


def test_a_picture_is_not_written_among_the_images(run, root, capfd):
    code, _, errors = run(f"--grid={root}/train/x.png")
    assert code == 2 and "is among the images" in errors[-1]
    root.rename(root.parent / "data")  # the default of --data_dir
    assert main(["--dataset=image_folder", "--grid=data/train/x.png"]) == 2
    assert "is among the images" in capfd.readouterr().err


def pairs_of_arrays(train, other):
    sources = (ArraySource(x, np.zeros(len(x), int)) for x in (train, other))
    return identical_images(*sources, max_secs=60.0)


def test_identical_images_in_memory_are_found_whatever_their_order():
    images = np.random.default_rng(0).integers(0, 256, (600, 5, 4, 3), np.uint8)
    other = np.concatenate([images[[599, 3]], 255 - images[:9], images[300:301]])
    assert pairs_of_arrays(images, other) == [(0, 599), (1, 3), (11, 300)]
    nearly = images[:9].copy()
    nearly[:, 4, 3, 2] ^= 1
    assert pairs_of_arrays(images, nearly) == []


def test_a_training_says_that_test_images_are_training_images(root, tmp_path, capsys):
    """At the start and behind the result; copies, links, but not files of the same
    size."""
    for name, copy in ("x", shutil.copy), ("y", os.link), ("z", os.symlink):
        copy(root / f"train/ant/0{ord(name) % 3}.png", root / f"test/ant/{name}.png")
    content = bytearray((root / "train/ant/05.png").read_bytes())
    content.extend(b"1")
    (root / "train/ant/06.png").write_bytes(content[:-1] + b"2")
    (root / "test/ant/s.png").write_bytes(content)
    config = Config("image_folder", data_dir=str(root), model="cnn", width=0.05)
    config = dataclasses.replace(config, augment="none", max_steps=1, device="cpu")
    train(tmp_path / "run", config, report=False)
    lines = " ".join(capsys.readouterr().out.split())
    assert lines.count("3 of 7 test images are identical to training images") == 2
    assert lines.index("identical") < lines.index("epoch") < lines.rindex("identical")


def test_a_search_for_identical_images_ends_in_time(root):
    sources = load("image_folder", str(root)).sources
    train, test = sources["training"], sources["test"]
    assert identical_images(train, train)
    assert identical_images(train, train, max_secs=-1) == []
    assert identical_images(train, test) == []


def test_images_in_two_splits_or_classes_are_named(run, root):
    small = Image.fromarray(random_pixels(7, 4, 3))
    photo = small.resize((60, 80), Image.Resampling.BICUBIC)
    photo.save(root / "train/cat/p.png")
    photo.save(root / "test/cat/p.jpg", quality=75)
    photo.resize((45, 60)).point(lambda x: 0.9 * x + 9).save(root / "test/cat/p.bmp")
    shutil.copy(root / "train/ant/01.png", root / "train/cat/x.png")
    for name in ("00", "02"):
        shutil.copy(root / f"train/ant/{name}.png", root / f"test/ant/x{name}.png")
    for name in ("train/cat", "test/ant"):  # flat: no picture of anything
        gray = 99 if name == "test/ant" else 100
        Image.new("L", (6, 8), gray).save(root / name / "flat.png")
    code, lines, errors = run("--image_size=32")
    assert (code, errors) == (0, [])
    at = f"{root}/train/", f"{root}/test/"
    assert [x for x in lines if x.startswith(("identical", "similar"))] == [
        f"identical   1 training image(s) also in another class, such as {at[0]}cat/"
        f"x.png is {at[0]}ant/01.png",
        f"identical   2 test image(s) also in training, such as {at[1]}ant/x00.png is "
        f"{at[0]}ant/00.png, {at[1]}ant/x02.png is {at[0]}ant/02.png",
        f"similar     2 test image(s) also in training, such as {at[1]}cat/p.bmp is "
        f"{at[0]}cat/p.png, {at[1]}cat/p.jpg is {at[0]}cat/p.png",
    ]


def test_of_many_images_copies_with_noise_are_found_and_no_others():
    """The pairs are those of all comparisons, in float64."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (3000, 8, 8, 1)).astype(np.uint8)
    images[2000:] = np.clip(
        images[:1000] + rng.integers(-6, 7, (1000, 8, 8, 1)), 0, 255
    )
    flat = images.reshape(3000, -1) / 1.0
    flat = (flat - flat.mean(1)[:, None]) / flat.std(1)[:, None]
    correlations = np.triu(flat @ flat.T / 64, 1)
    expected = np.argwhere(correlations > 1 - 0.1**2 / 2)
    assert len(expected) > 900
    prints = prints_of(images, np.arange(3000))
    [(heading, text)] = duplicates({"training": prints}, lambda _, i: str(i))
    count = int(text.split()[0].replace(",", ""))
    assert heading == "similar" and abs(count - len(expected)) <= 10
    assert text.endswith("such as 2000 is 0, 2001 is 1, 2002 is 2")


def test_the_area_that_a_crop_cuts_away_is_said(run, root):
    code, lines, _ = run("--image_size=4")
    assert code == 0 and "fit         the crop cuts away 25% of the photos' area" in (
        line.partition(" on average")[0] for line in lines
    )
    for size, fit in ("4x3", "crop"), ("4", "pad"):
        _, lines, _ = run(f"--image_size={size}", f"--fit={fit}")
        assert not [line for line in lines if line.startswith("fit ")]


@pytest.mark.row(23)
def test_row_23_every_image_that_cannot_be_used_is_named(run, root):
    (root / "train" / "ant" / "00.png").write_bytes(b"")
    (root / "train" / "cat" / "01.png").write_bytes(png(random_pixels(0))[:-40])
    (root / "test" / "cat" / "00.png").write_bytes(b"GIF")
    code, lines, errors = run()
    assert code == 3
    faults = [x.split()[1] for x in lines if x.startswith("fault ")]
    names = "test/cat/00.png", "train/ant/00.png", "train/cat/01.png"
    assert sorted(faults) == [f"{root}/{name}:" for name in names]
    assert "            ant       11        2" in lines
    assert "            cat        2        0" in lines
    assert "stored as   8x6 (15)" in lines
    (line,) = errors
    assert line.startswith(
        "towers.check: 3 of 18 images of image_folder cannot be used"
    )

    code, lines, _ = run("--image_size=6")
    assert code == 3 and sum("fault " in line for line in lines) == 3
    assert "read as     6x6 (height x width), 3 channel(s)" in lines

"""Every command of the README and of docs/ is typed, page by page, and ends well.

Runs are cut short by flags at the end of their commands. The commands of
docs/own_images.md are run whole in `test_own_images.py`.
"""

import itertools
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from processes import ROOT, environ_of
from test_extending import BLOCK
from test_own_images import blocks_of, walk_through

WAIT_SECS = 900

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OWN_IMAGES = ROOT / "docs" / "own_images.md"
PAGES.remove(OWN_IMAGES)

COMMAND = re.compile(
    r"^(?:    )?((?:\w+=\S+ |\.venv/bin/)*"
    r"(?:python3?|make|pip|tensorboard|docker|kubectl|ray|sbatch|ssh) .*)$",
    re.MULTILINE,
)

# What a command needs that is not here: installed packages, or one of these.
NOT_RUN = {
    r"^(make|pip|python3 -m venv)\b|\bpip install": "an installation",
    r"--format=onnx\b": "the packages of the extra onnx",
    r"^(docker|kubectl|sbatch)\b|\bray\b|towers\.on_ray": "a cluster",
    r"^ssh\b|--cluster=10\.": "several machines",
    r"^tensorboard\b": "somebody who ends it",
    r"benchmarks\.gpu\b": "GPUs",
    r"benchmarks\.step\b": "minutes on an idle machine",
    r"--model=(resnet(34|50)|keras:\w+)\b|=timm/": "weights of ImageNet",
}

# Program -> flags that stand at the end and cut it short.
TRAIN = "--device=cpu --batch_size=16 --eval_every_epochs=0 --max_steps={steps}"
SHORT = {
    "run_train.py": TRAIN,
    "run_eval.py": "--device=cpu --eval_interval_secs=0",
    "run_predict.py": "--device=cpu",
    "run_export.py": "",
    "-m towers.launch": TRAIN,
    "-m towers.check": "",
}


def commands_of(page):
    """The lines that can be typed, without comments, and those that cannot."""
    lines = COMMAND.findall(re.sub(r"\\\n *", "", page.read_text()))
    lines = [re.sub(r" +#.*", "", line) for line in lines]
    skipped = [x for x in lines if any(re.search(p, x) for p in NOT_RUN)]
    return [x for x in lines if x not in skipped], skipped


def program_of(command):
    return re.match(r"(?:python )?((?:-m )?\S+)", command)[1]


def shortened(command, steps):
    """A command with the data that is here."""
    command = re.sub(r"--data_dir=(DIR|ROOT)\b", "--data_dir=photos", command)
    flags = SHORT[program_of(command)].format(steps=steps)
    if "--best_by" in command:
        flags = flags.replace("--eval_every_epochs=0 ", "")
    if "--config=cifar10_" in command:
        flags += " --dataset=shapes"  # as large, and of as many classes
    return f"{command} {flags}"


def typed(command, folder):
    """Runs a line in a folder, with the Python of the tests."""
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environ_of({"PATH": path, "PYTHONPATH": ""}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_SECS,
        check=False,
    )
    assert done.returncode == 0, (command, done.stdout[-3000:], done.stderr[-3000:])


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The checkout with what the pages take for granted: photos, images of one's own,
    the files of docs/extending.md, and a run of the quickstart."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in ("benchmarks", "configs", "docs", "towers", *ROOT.glob("run_*.py")):
        (folder / pathlib.Path(path).name).symlink_to(ROOT / path)
    for name, source in BLOCK.findall((ROOT / "docs/extending.md").read_text()):
        (folder / name).write_text(source)
    images, labels = np.zeros((20, 32, 32, 3), np.uint8), np.arange(20) % 2
    parts = {f"{x}_images": images for x in ("train", "test")}
    parts |= {f"{x}_labels": labels for x in ("train", "test")}
    (folder / "data").mkdir()
    np.savez(folder / "data" / "my_images.npz", **parts)
    typed("python docs/draw_photos.py photos", folder)
    typed(shortened("python run_train.py --config=quickstart", steps=1), folder)
    return folder


def test_every_command_is_typed_or_has_a_reason_and_every_reason_a_command():
    chain = itertools.chain.from_iterable
    run, skipped = (list(chain(x)) for x in zip(*map(commands_of, PAGES), strict=True))
    for command in run:
        assert program_of(command) in SHORT, command
    elsewhere = [*walk_through()[0], *blocks_of("Predict")[0].splitlines()]
    assert commands_of(OWN_IMAGES) == ([x for x in elsewhere if COMMAND.match(x)], [])
    for pattern in NOT_RUN:
        assert any(re.search(pattern, x) for x in skipped), pattern


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [x for x in PAGES if commands_of(x)[0]], ids=lambda page: page.stem
)
def test_the_commands_of_a_page_can_be_typed(page, checkout):
    for number, command in enumerate(commands_of(page)[0], 2):
        typed(shortened(command, steps=number), checkout)

"""Runs of former versions are continued and read.

`run_of_version_0_1_0` was written by commit 35f9af3: two `replicated` towers took three
steps of `lenet` on the synthetic images without weight decay, and --views=six; under
`expected` is the checkpoint after three more by the same commit.
"""

import json
import pathlib
import shutil

import numpy as np
import pytest

from towers.evaluation import evaluate
from towers.run.checkpointer import Checkpointer
from towers.run.folder import RunFolder
from towers.training import train

FORMER = pathlib.Path(__file__).parent / "run_of_version_0_1_0"


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(FORMER, tmp_path / "run", ignore=shutil.ignore_patterns("expected"))
    return RunFolder(tmp_path / "run")


def test_a_former_run_is_continued(folder):
    """Bit for bit on the machine that wrote it; others may round differently."""
    result = train(folder.path, folder.stored_config())
    expected = Checkpointer(FORMER / "expected").restore().tensors
    assert list(result.state) == list(expected)
    assert result.step == 6
    for name, value in expected.items():
        np.testing.assert_allclose(
            result.state[name], value, rtol=1e-5, atol=1e-6, err_msg=name
        )
    # The last steps moved the parameters, so that equality says something.
    before = Checkpointer(FORMER / "checkpoints").restore().tensors
    moved = np.abs(expected["params/conv1/kernel"] - before["params/conv1/kernel"])
    assert moved.max() > 1e-4
    steps = [json.loads(x)["step"] for x in folder.metrics.read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_former_run_is_evaluated(folder):
    assert folder.stored_config().tta == "translate"  # it was called views=six
    former = json.loads(folder.result.read_text())
    result = evaluate(folder.path, step=3)
    # They were the moving averages' there.
    assert result["test_correct_ema"] == former["test_correct"]
    assert result["test_accuracy_tta_ema"] == former["test_accuracy_views"]
    assert json.loads(folder.result.read_text()) == result

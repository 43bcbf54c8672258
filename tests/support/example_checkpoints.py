"""Checkpoints of example tensors, and ways to damage them."""

import ml_dtypes
import numpy as np

from towers.run.checkpoint import Snapshot
from towers.run.checkpointer import Checkpointer

FILES = ["tensors.data-00000-of-00001", "tensors.index", "trainer_state.json"]
FILES += ["MANIFEST.json"]
DATA, INDEX, STATE, MANIFEST = FILES


def example_tensors(step):
    """Another set of values for every step; all kinds of shapes and dtypes."""
    rng = np.random.default_rng(step)
    return {
        "params/conv1/kernel": rng.normal(size=(3, 3, 2, 4)).astype(np.float32),
        "params/conv1/bias": np.array([np.nan, -0.0, np.inf, step], np.float32),
        "slots/momentum/conv1/kernel": rng.normal(size=(3, 3, 2, 4)),
        "state/norm.1/count of all": np.asfortranarray(rng.integers(0, 9, (2, 3))),
        "averages/conv1/bias": rng.normal(size=4).astype(ml_dtypes.bfloat16),
        "averages/none": np.zeros((0, 3), np.float32),
        "state/flags": np.array([True, False, True]),
        "step": np.array(step, np.int64),
    }


def assert_same(tensors, expected):
    assert list(tensors) == list(expected)
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert tensors[name].shape == tensor.shape, name
        assert tensors[name].tobytes() == tensor.tobytes(), name


def assert_restores(folder, *steps):
    """The newest valid checkpoint is of one of these steps and holds its values."""
    checkpoint = Checkpointer(folder, log=list).read()
    assert checkpoint.step in steps
    assert_same(checkpoint.tensors, example_tensors(checkpoint.step))
    return checkpoint


def save(folder, step, keep=99, **options):
    snapshot = Snapshot(step, example_tensors(step), {"images": 64 * step})
    return Checkpointer(folder, keep=keep, **options).save(snapshot)


def folder_with(folder, *steps):
    for step in steps:
        save(folder, step)
    return folder


def snapshot(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def flip_bit(path, place=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    path.write_bytes(content)

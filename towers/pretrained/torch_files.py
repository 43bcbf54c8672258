"""Tensors in files of PyTorch (.pth, .pt, .bin) and safetensors.

A file of `torch.save` is a zip archive of a pickle and the bytes of each storage, or in
PyTorch before 1.6 their concatenation. The opcodes of the pickle are interpreted here,
without `pickle`: only the functions in CALLED can be called.
"""

import contextlib
import functools
import math
import os
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import tensorflow as tf

BFLOAT16 = tf.bfloat16.as_numpy_dtype

# NumPy types of PyTorch's storages.
DTYPES = {
    "torch.DoubleStorage": np.float64,
    "torch.FloatStorage": np.float32,
    "torch.HalfStorage": np.float16,
    "torch.BFloat16Storage": BFLOAT16,
    "torch.LongStorage": np.int64,
    "torch.IntStorage": np.int32,
    "torch.ShortStorage": np.int16,
    "torch.CharStorage": np.int8,
    "torch.ByteStorage": np.uint8,
    "torch.BoolStorage": np.bool_,
    # Tensors of types without a storage of their own name the type themselves.
    "torch.storage.UntypedStorage": np.uint8,
    "torch.uint16": np.uint16,
    "torch.uint32": np.uint32,
    "torch.uint64": np.uint64,
}
# Types in safetensors files that need no scales from other tensors.
SAFETENSORS_DTYPES = "F64 F32 F16 BF16 BOOL I64 I32 I16 I8 U64 U32 U16 U8".split()
QUANTIZED = "as of quantized networks; float64, float32 and 16-bit floats are read"
CALLED = (
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
)

# Keys under which training scripts store state dicts, in order of preference.
WRAPPERS = "state_dict_ema model_ema ema_state_dict ema".split()
WRAPPERS += "state_dict model model_state model_state_dict".split()
MAX_DEPTH = 3  # of nested wrappers
COUNTERS = ("num_batches_tracked", "n_averaged")  # endings of names of step counters
OLDER_FORMAT = 0x1950A86A20F9469CFC6C  # first number in files before PyTorch 1.6


class Tensor(NamedTuple):
    """The shape of a tensor in a file, and a function that reads it."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


class Global(NamedTuple):
    """The name of a Python class or function."""

    name: str


class Storage(NamedTuple):
    """A storage of numbers in a file."""

    dtype: type
    key: str
    size: int


def state_dict(file: Any, depth: int = 1) -> tuple[dict[str, Tensor], str]:
    """Return the tensors in the content of a file, and the key that holds them."""
    content = file if isinstance(file, dict) else {}
    for name in (*WRAPPERS, *content):
        inner = content.get(name)
        if tensors := _tensors(inner):
            return tensors, str(name)
        if name in WRAPPERS and isinstance(inner, dict) and depth < MAX_DEPTH:
            with contextlib.suppress(ValueError):
                return state_dict(inner, depth + 1)
    if not _tensors(content):
        raise ValueError("it has no dict of tensors")
    return _tensors(content), ""


def _tensors(content):
    return {
        name: value
        for name, value in (content.items() if isinstance(content, dict) else ())
        if isinstance(name, str) and isinstance(value, Tensor)
        if not name.endswith(COUNTERS)
    }


@contextlib.contextmanager
def open_safetensors(path: str) -> Iterator[tuple[dict[str, Tensor], dict[str, str]]]:
    """Open a safetensors file; yield its tensors and metadata."""
    import safetensors

    try:
        with safetensors.safe_open(path, "numpy") as file:
            tensors = {}
            for name in sorted(file.keys()):
                tensor = file.get_slice(name)
                if (dtype := tensor.get_dtype()) not in SAFETENSORS_DTYPES:
                    raise ValueError(f"{name[:100]} is {dtype}, {QUANTIZED}")
                read = functools.partial(file.get_tensor, name)
                tensors[name] = Tensor(tuple(tensor.get_shape()), read)
            yield tensors, file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error


@contextlib.contextmanager
def open_pickled(path: str) -> Iterator[Any]:
    """Open a file of `torch.save`; yield its content."""
    if not zipfile.is_zipfile(path):
        with open(path, "rb") as file:
            yield _load_older(file)
        return
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        [pickled] = (x for x in names if x.count("/") == 1 and x.endswith("/data.pkl"))
        folder = pickled.removesuffix("data.pkl")

        def read(name):
            member = archive.getinfo(folder + name)
            # A compressed member could have any size.
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{member.filename} is compressed, unlike PyTorch's")
            return archive.read(member)

        if f"{folder}byteorder" in names and read("byteorder") != b"little":
            raise ValueError("its numbers are big-endian")
        yield _Unpickler(read).load(read("data.pkl"))


def _load_older(file):
    """Return the content of a file of PyTorch before 1.6."""
    # Pickles of a number, the versions, the object and the keys; then the storages.
    places = {}

    def read(name):
        place, length = places[name]
        file.seek(place)
        return file.read(length)

    unpickler = _Unpickler(read)
    if unpickler.load(file) != OLDER_FORMAT:
        raise ValueError("it is not a file of torch.save")
    _, _, content, keys = (unpickler.load(file) for _ in range(4))
    start, end = file.tell(), file.seek(0, os.SEEK_END)
    for key in keys:
        storage = unpickler.storages[key]
        file.seek(start)
        [count] = struct.unpack("<q", file.read(8))
        if count != storage.size:
            raise ValueError(f"storage {key} has {count} elements, not {storage.size}")
        length = storage.size * np.dtype(storage.dtype).itemsize
        places[f"data/{key}"] = start + 8, length
        start += 8 + length
    if start > end:
        raise ValueError(f"its last storage lacks {start - end:,} bytes")
    return content


class _Unpickler:
    """An interpreter of the pickle opcodes that `torch.save` writes."""

    def __init__(self, read: Callable[[str], bytes]):
        self._read = functools.lru_cache(1)(read)  # all tensors may share one storage
        self.storages: dict[str, Storage] = {}
        self._stack: list = []
        self._marks: list[int] = []
        self._memo: dict[Any, Any] = {}

    def load(self, pickled: bytes | BinaryIO) -> Any:
        """Return the pickled object, in which a tensor is a `Tensor`."""
        stack = self._stack
        for opcode, arg, _ in pickletools.genops(pickled):
            if opcode.name == "STOP":
                break
            match opcode.name:
                case "PROTO" | "FRAME":
                    pass
                case "EMPTY_DICT":
                    stack.append({})
                case "EMPTY_LIST":
                    stack.append([])
                case "NONE":
                    stack.append(None)
                case "NEWTRUE" | "NEWFALSE":
                    stack.append(opcode.name == "NEWTRUE")
                case name if name in _LITERALS:
                    stack.append(arg)
                case "MARK":
                    self._marks.append(len(stack))
                case "MEMOIZE":
                    self._memo[len(self._memo)] = stack[-1]
                case "PUT" | "BINPUT" | "LONG_BINPUT":
                    self._memo[arg] = stack[-1]
                case "GET" | "BINGET" | "LONG_BINGET":
                    stack.append(self._memo[arg])
                case "EMPTY_TUPLE":
                    stack.append(())
                case "TUPLE":
                    stack.append(tuple(self._pop_from(self._marks.pop())))
                case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                    stack.append(tuple(self._pop_from(-int(name[-1]))))
                case "APPEND":
                    self._extend(self._pop_from(-1))
                case "APPENDS":
                    self._extend(self._pop_from(self._marks.pop()))
                case "SETITEM":
                    self._update(self._pop_from(-2))
                case "SETITEMS":
                    self._update(self._pop_from(self._marks.pop()))
                case "GLOBAL":
                    stack.append(_known_global(str(arg).replace(" ", ".")))
                case "STACK_GLOBAL":
                    stack.append(_known_global("{}.{}".format(*self._pop_from(-2))))
                case "BINPERSID":
                    stack.append(self._storage(*stack.pop()))
                case "REDUCE":
                    stack.append(self._call(*self._pop_from(-2)))
                case "BUILD":  # versions of the modules of a state dict
                    stack.pop()
                    self._last(dict)
                case name:
                    raise ValueError(f"a state dict does not need its opcode {name}")
        return stack.pop()

    def _pop_from(self, place):
        items, self._stack[place:] = self._stack[place:], []
        return items

    def _extend(self, items):
        self._last(list).extend(items)

    def _update(self, items):
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int | float | bool | None):
                raise ValueError(f"unsupported dict key type {type(key).__name__}")
            self._last(dict)[key] = value

    def _last(self, kind):
        if not isinstance(self._stack[-1], kind):
            raise ValueError(f"its pickle expects a {kind.__name__} to fill")
        return self._stack[-1]

    def _storage(self, kind, storage, key, _, size, *view):
        is_whole = kind == "storage" and not any(view)
        if not (is_whole and isinstance(key, str) and isinstance(size, int)):
            raise ValueError("its pickle has a damaged reference to a storage")
        self.storages[key] = Storage(DTYPES[storage.name], key, size)
        return self.storages[key]

    def _call(self, called, arguments):
        if not isinstance(called, Global) or called.name not in CALLED:
            raise ValueError("its pickle calls something that is not allowed")
        if called.name == "collections.OrderedDict" and not arguments:
            return {}
        if called.name.endswith("_v2"):
            return self._tensor(*arguments[:4])
        if called.name.endswith("_v3"):
            storage, dtype = Storage(*arguments[0]), DTYPES[arguments[6].name]
            size = storage.size // np.dtype(dtype).itemsize
            return self._tensor((dtype, storage.key, size), *arguments[1:4])
        return arguments[0]  # of _rebuild_parameter

    def _tensor(self, storage, offset, shape, strides):
        storage = Storage(*storage)
        numbers = [offset, *shape, *strides]
        last = offset + sum((n - 1) * x for n, x in zip(shape, strides, strict=True))
        # Elements are not repeated, so that a small file cannot hold a large tensor.
        count = math.prod(shape)
        needed = max(count, last + 1) if count else 0
        are_ints = all(type(x) is int for x in numbers)
        if min(numbers) < 0 or not are_ints or needed > storage.size:
            raise ValueError("a tensor is not within its storage")
        step = np.dtype(storage.dtype).itemsize

        def read():
            content = self._read(f"data/{storage.key}")
            if len(content) < storage.size * step:
                raise ValueError(f"storage {storage.key} has only {len(content)} bytes")
            flat = np.frombuffer(content, storage.dtype, storage.size)[offset:]
            return np.lib.stride_tricks.as_strided(
                flat, shape, [step * x for x in strides], writeable=False
            ).copy()

        return Tensor(tuple(shape), read)


def _known_global(name):
    if re.fullmatch(r"torch\.float[48]_\w+", name):
        raise ValueError(f"it has tensors of {name[:100]}, {QUANTIZED}")
    if name not in CALLED and name not in DTYPES:
        way = "save the state dict alone, as a .safetensors file or with torch.save"
        raise ValueError(f"it refers to {name[:100]}, which is not executed; {way}")
    return Global(name)


_LITERALS = "BININT BININT1 BININT2 LONG1 BINFLOAT".split()
_LITERALS += "BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES".split()

"""Tensors in files of PyTorch (.pth, .pt, .bin) and of safetensors.

A file of `torch.save` is a zip archive of a pickle and of the bytes of each storage;
before PyTorch 1.6 these follow one another. Here the opcodes of the pickle are
interpreted, without `pickle`: a global is a name and nothing else, and the names below
are all that can be called. A file with another one is refused by that name.
"""

import contextlib
import functools
import math
import os
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import tensorflow as tf

BFLOAT16 = tf.bfloat16.as_numpy_dtype

# Their types of storages.
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
}
# Of files of safetensors; others have factors in further tensors.
SAFETENSORS_DTYPES = (
    *("F64", "F32", "F16", "BF16", "BOOL"),
    *("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8"),
)
CALLED = (
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
)

# Where a training script may have its state dict, the one to prefer first.
WRAPPERS = (
    *("state_dict_ema", "model_ema", "ema_state_dict", "ema"),
    *("state_dict", "model", "model_state", "model_state_dict"),
)
MAX_DEPTH = 3  # of wrappers within wrappers
# Numbers of training steps, which no network of ours has.
COUNTERS = ("num_batches_tracked", "n_averaged")
OLDER_FORMAT = 0x1950A86A20F9469CFC6C  # begins files before PyTorch 1.6


class Tensor(NamedTuple):
    """The shape of a tensor in a file, and what reads it."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


class Global(NamedTuple):
    """The name of a class or function of Python."""

    name: str


class Storage(NamedTuple):
    dtype: type
    key: str
    size: int


def state_dict(file: Any, depth: int = 1) -> tuple[dict[str, Tensor], str]:
    """Returns the tensors of the content of a file, without counters of steps, and the
    name of the entry that has them; ValueError without any.
    """
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
    """The tensors and the metadata of a file, while it is open."""
    import safetensors

    try:
        with safetensors.safe_open(path, "numpy") as file:
            tensors = {}
            for name in file.keys():  # noqa: SIM118  (it is no dict)
                tensor = file.get_slice(name)
                if (dtype := tensor.get_dtype()) not in SAFETENSORS_DTYPES:
                    raise ValueError(
                        f"{name[:100]} is {dtype}, such as of a quantized network; "
                        "float64, float32, float16 and bfloat16 are read"
                    )
                tensors[name] = Tensor(
                    tuple(tensor.get_shape()), lambda name=name: file.get_tensor(name)
                )
            yield tensors, file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error


@contextlib.contextmanager
def open_pickled(path: str) -> Iterator[Any]:
    """The content of a file of `torch.save`, while it is open."""
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
            # A compressed one could be of any size.
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(
                    f"{member.filename} is compressed, which PyTorch does not"
                )
            return archive.read(member)

        has_order = f"{folder}byteorder" in names
        byte_order = read("byteorder").decode() if has_order else "little"
        yield _Unpickler(read, byte_order).load(read("data.pkl"))


def _load_older(file):
    """The content of a file of PyTorch before 1.6: pickles of a number, of versions, of
    the object and of the keys of its storages, whose sizes and elements follow.
    """
    places = {}

    def read(name):
        place, length = places[name]
        file.seek(place)
        return file.read(length)

    unpickler = _Unpickler(read, "little")
    if unpickler.load(file) != OLDER_FORMAT:
        raise ValueError("it is no file of torch.save")
    _, _, content, keys = (unpickler.load(file) for _ in range(4))
    start, end = file.tell(), file.seek(0, os.SEEK_END)
    for key in keys:
        storage = unpickler.storages[key]
        file.seek(start)
        [count] = struct.unpack("<q", file.read(8))
        if count != storage.size:
            raise ValueError(f"storage {key} has {count:,} elements, not as its pickle")
        length = storage.size * np.dtype(storage.dtype).itemsize
        places[f"data/{key}"] = start + 8, length
        start += 8 + length
    if start > end:
        raise ValueError(
            f"it ends before its last storage, {start - end:,} bytes short"
        )
    return content


class _Unpickler:
    """Interprets the opcodes of protocol 2 that `torch.save` writes for a state dict.

    `read` gives the bytes of a storage by its name, data/KEY; `storages` are those that
    were referred to, by KEY.
    """

    def __init__(self, read: Callable[[str], bytes], byte_order: str):
        # All tensors of a file may be in one storage.
        self._read, self._byte_order = functools.lru_cache(1)(read), byte_order
        self.storages: dict[str, Storage] = {}
        self._stack: list = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def load(self, pickled: bytes | BinaryIO) -> Any:
        """The pickled object, in which a tensor is a `Tensor`."""
        stack = self._stack
        for opcode, arg, _ in pickletools.genops(pickled):
            match opcode.name:
                case "STOP":
                    return stack.pop()
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
                    stack.append(_known_global(arg.replace(" ", ".")))
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
                    raise ValueError(
                        f"it has the opcode {name}, which no state dict needs"
                    )

    def _pop_from(self, place):
        items, self._stack[place:] = self._stack[place:], []
        return items

    def _extend(self, items):
        self._last(list).extend(items)

    def _update(self, items):
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int | float | bool | None):
                raise ValueError("a key of a dict is no text or number")
            self._last(dict)[key] = value

    def _last(self, kind):
        if not isinstance(self._stack[-1], kind):
            raise ValueError(f"its pickle fills what is no {kind.__name__}")
        return self._stack[-1]

    def _storage(self, kind, storage, key, _, size, *view):
        is_whole = kind == "storage" and not any(view)
        if not (is_whole and isinstance(key, str) and isinstance(size, int)):
            raise ValueError("its pickle has a damaged reference to a storage")
        self.storages[key] = Storage(DTYPES[storage.name], key, size)
        return self.storages[key]

    def _call(self, called, arguments):
        if not isinstance(called, Global) or called.name not in CALLED:
            raise ValueError("its pickle calls what is no function")
        if called.name == "collections.OrderedDict" and not arguments:
            return {}
        if called.name.endswith("_v2"):
            return self._tensor(*arguments[:4])
        return arguments[0]  # of _rebuild_parameter

    def _tensor(self, storage, offset, shape, strides):
        storage = Storage(*storage)
        numbers = [offset, *shape, *strides]
        last = offset + sum(
            (n - 1) * step for n, step in zip(shape, strides, strict=True)
        )
        # No element stands for several, so that no small file has a large tensor.
        count = math.prod(shape)
        needed = max(count, last + 1) if count else 0
        if (
            min(numbers) < 0
            or any(type(x) is not int for x in numbers)
            or needed > storage.size
        ):
            raise ValueError("a tensor is not within its storage")
        step = np.dtype(storage.dtype).itemsize

        def read():
            content = self._read(f"data/{storage.key}")
            if len(content) < storage.size * step:
                raise ValueError(
                    f"storage {storage.key} has {len(content):,} bytes only"
                )
            order = {"little": "<", "big": ">"}[self._byte_order]
            bits = np.frombuffer(content, f"{order}u{step}", storage.size)
            bits = bits[offset : last + 1]
            flat = bits.astype(f"u{step}").view(storage.dtype)
            return np.lib.stride_tricks.as_strided(
                flat, shape, [step * x for x in strides], writeable=False
            ).copy()

        return Tensor(tuple(shape), read)


def _known_global(name):
    if name not in CALLED and name not in DTYPES:
        raise ValueError(
            f"it refers to {name[:100]}, which is not executed here; save the state "
            "dict alone, as a .safetensors file or with torch.save"
        )
    return Global(name)


_LITERALS = (
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"),
)

"""Checks of GPUs: their libraries, the links between them."""

import ctypes
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import tensorflow as tf

# Links of `nvidia-smi topo -m` that pass the processor or leave its socket.
SLOW_LINKS = {
    "PHB": "through the processor",
    "NODE": "through the processor",
    "SYS": "through the link between processors",
}


class Check(NamedTuple):
    """A line of the report; `is_fine` is False where something should be looked at."""

    text: str
    is_fine: bool = True


def check_gpus(num_towers: int) -> Iterator[Check]:
    """Libraries, GPUs and links; the towers must have computed something before."""
    info = tf.sysconfig.get_build_info()
    cuda, cudnn = (info.get(f"{name}_version", "") for name in ("cuda", "cudnn"))
    yield from compare_cuda(cuda, cudnn, _loaded(), sys.prefix)
    if not shutil.which("nvidia-smi"):
        return
    query = "--query-gpu=index,name,driver_version,memory.total,memory.used"
    table = _answer("nvidia-smi", query, "--format=csv,noheader")
    for line in table.strip().splitlines():
        yield Check(f"GPU {line}")
    if num_towers > 1:
        yield from check_links(_answer("nvidia-smi", "topo", "-m"))


def compare_cuda(
    cuda: str, cudnn: str, loaded: Mapping[str, tuple[str, tuple]], prefix: str
) -> Iterator[Check]:
    """The libraries of CUDA against those that TensorFlow was built with.

    Args:
        cuda, cudnn: versions, such as "12.5.1" and "9".
        loaded: "cudart", "cudnn" -> (path, version) of what this process has loaded.
        prefix: folder of Python's packages.
    """
    versions = ", ".join(
        f"{name} {'.'.join(map(str, version))}" for name, (_, version) in loaded.items()
    )
    yield Check(f"built for CUDA {cuda}, cuDNN {cudnn}; loaded: {versions or 'none'}")
    for name, built in (("cudart", cuda), ("cudnn", cudnn)):
        path, version = loaded.get(name, ("", ()))
        wanted = _numbers(built)[:2]
        if not version or not wanted:
            continue
        if version[0] != wanted[0] or version[: len(wanted)] < wanted:
            yield Check(
                f"{path} does not fit {name} {built}; pip install 'towers[cuda]'", False
            )
        elif not path.startswith(prefix):
            yield Check(
                f"{path} is not one of Python's packages; unset LD_LIBRARY_PATH", False
            )


def _loaded():
    """Name -> (path, version) of the libraries of CUDA that this process has loaded."""
    try:
        maps = pathlib.Path("/proc/self/maps").read_text()
    except OSError:
        return {}
    found = {}
    for name in ("cudart", "cudnn"):
        paths = re.findall(rf"\s(/\S*/lib{name}\.so\S*)$", maps, re.MULTILINE)
        if not paths:
            continue
        library = ctypes.CDLL(paths[0])
        if name == "cudnn":
            library.cudnnGetVersion.restype = ctypes.c_size_t
            number = library.cudnnGetVersion()  # 90300 is 9.3.0
            version = (number // 10000, number // 100 % 100, number % 100)
        else:
            number = ctypes.c_int()
            library.cudaRuntimeGetVersion(ctypes.byref(number))  # 12050 is 12.5
            version = (number.value // 1000, number.value // 10 % 100)
        found[name] = paths[0], version
    return found


def check_links(topology: str) -> Iterator[Check]:
    """The links between GPUs; `topology` is the answer of `nvidia-smi topo -m`."""
    links = read_links(topology)
    if links:
        kinds = ", ".join(sorted(set(links.values())))
        yield Check(f"links between the GPUs: {kinds}")
    for (first, second), kind in links.items():
        if kind in SLOW_LINKS:
            yield Check(
                f"GPU {first} and {second} are connected {SLOW_LINKS[kind]} "
                f"({kind}), which is slower than NVLink",
                False,
            )
            return


def read_links(topology: str) -> dict[tuple[int, int], str]:
    """(number of a GPU, of a later one) -> link, such as NV18, PIX or SYS, from the
    answer of `nvidia-smi topo -m`."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    links = {}
    for number, cells in re.findall(r"^GPU(\d+)\s+(.*)$", text, re.MULTILINE):
        for other, kind in enumerate(cells.split()[: int(number)]):
            links[other, int(number)] = kind
    return links


def _numbers(version):
    return tuple(map(int, re.findall(r"\d+", version)))


def _answer(*command: str) -> str:
    """What a program prints; nothing where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout

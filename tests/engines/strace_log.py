"""The file operations of another program, by strace, for `disk.Disk`.

strace sees system calls, so also what TensorFlow writes, call by call.
"""

import codecs
import os
import pathlib
import re
import subprocess
from collections.abc import Iterator

from engines.disk import Disk, read_tree
from engines.file_recorder import Operation

ON_PATHS = {
    "mkdir": "mkdir",
    "mkdirat": "mkdir",
    "rename": "rename",
    "renameat": "rename",
    "renameat2": "rename",
    "unlink": "remove",
    "unlinkat": "remove",
    "rmdir": "remove",
}
OPEN = ("open", "openat", "creat")
ON_DESCRIPTORS = ("write", "pwrite64", "lseek", "ftruncate", "fsync", "fdatasync")
# Others that change files; a program that calls them is not understood here.
UNKNOWN = (
    *("writev", "pwritev", "pwritev2", "truncate", "fallocate", "link"),
    *("linkat", "symlink", "symlinkat", "copy_file_range", "sendfile", "dup", "dup2"),
)
TRACED = ",".join([*ON_PATHS, *OPEN, *ON_DESCRIPTORS, *UNKNOWN])

CALL = re.compile(r"\d+ +(\w+)\((.*)\) += (\d+)(?:<(.*)>)?$")
RESUMED = re.compile(r"<\.\.\. \w+ resumed>")
DESCRIPTOR = re.compile(r"(\d+)<([^>]*)>(\(deleted\))?(?:, (.*))?")
PATH = re.compile(r'(?:\w+<([^>]*)>, )?"((?:[^"\\]|\\.)*)"')


def traced_operations(
    command: list[str], root: pathlib.Path, log: pathlib.Path, **options
) -> list[Operation]:
    """Runs a command that ends without an error; returns what it did below `root`.

    Args:
        command: a program and its arguments; starts no process that writes there.
        root: an absolute path without links; an empty folder.
        log: a file for strace.
        **options: of `subprocess.run`.
    """
    # All threads, descriptors with their paths, strings whole.
    strace = ["strace", "-f", "-y", "-s", "100000000", "-e", f"trace={TRACED}"]
    subprocess.run([*strace, "-o", str(log), *command], check=True, **options)
    reader = _Reader(root)
    operations = list(reader.operations(log.read_text("ascii").splitlines()))
    assert reader.disk.tree() == read_tree(root), "the log is not understood"
    return operations


def _whole_calls(lines: list[str]) -> Iterator[str]:
    """Calls in the order in which they end; another thread's may stand between the
    beginning of one and its end."""
    begun = {}
    for line in lines:
        thread, _, rest = line.partition(" ")
        if line.endswith("<unfinished ...>"):
            begun[thread] = line.removesuffix("<unfinished ...>").rstrip()
        elif resumed := RESUMED.match(rest.lstrip()):
            yield begun.pop(thread) + rest.lstrip()[resumed.end() :]
        else:
            yield line


class _Reader:
    """Follows the offsets of descriptors and the contents of files."""

    def __init__(self, root):
        self.disk = Disk()
        self._root = str(root)
        self._offsets = {}  # None where a descriptor appends

    def operations(self, lines: list[str]) -> Iterator[Operation]:
        for line in _whole_calls(lines):
            call = CALL.match(line)
            if call and self._root in line:
                for operation in self._of_call(call[1], call[2], int(call[3]), call[4]):
                    getattr(self.disk, operation[0])(*operation[1:])
                    yield operation

    def _of_call(self, name, arguments, result, path):
        if name in ON_DESCRIPTORS:
            return self._on_descriptor(name, arguments, result)
        if name in OPEN:
            return self._open(arguments, result, self._below(path))
        found = PATH.findall(arguments)
        paths = [self._below(os.path.join(folder, file)) for folder, file in found]
        if None in paths:
            assert not any(paths), f"{name}({arguments}) crosses {self._root}"
            return []
        assert name in ON_PATHS, f"{name}({arguments}) is not known here"
        return [(ON_PATHS[name], *paths)]

    def _open(self, flags, descriptor, path):
        self._offsets[descriptor] = None if "O_APPEND" in flags else 0
        if path is None or not re.search("O_CREAT|O_TRUNC", flags):
            return []
        if path not in self.disk.tree():
            return [("create", path)]
        return [("write", path, b"")] if "O_TRUNC" in flags else []

    def _on_descriptor(self, name, arguments, result):
        descriptor, path, deleted, rest = DESCRIPTOR.fullmatch(arguments).groups()
        descriptor, path = int(descriptor), self._below(path)
        if path is None or deleted:
            return []
        if name in ("fsync", "fdatasync"):
            return [("sync", path)]
        if name == "lseek":
            # Not of a folder that is listed: its descriptor is a copy.
            if self._offsets.get(descriptor) is not None:
                self._offsets[descriptor] = result
            return []
        content = self.disk.tree()[path]
        if name == "ftruncate":
            return [("write", path, content[: int(rest)].ljust(int(rest), b"\0"))]
        text = rest[rest.index('"') + 1 : rest.rindex('"')]
        written = codecs.escape_decode(text.encode())[0][:result]
        if name == "pwrite64":
            offset = int(rest.rpartition(",")[2])
        else:
            offset = self._offsets[descriptor]
            if offset is None:
                return [("write", path, content + written)]
            self._offsets[descriptor] = offset + result
        before = content[:offset].ljust(offset, b"\0")
        return [("write", path, before + written + content[offset + result :])]

    def _below(self, path):
        if path == self._root:
            return ""
        is_below = path is not None and path.startswith(f"{self._root}/")
        return path.removeprefix(f"{self._root}/") if is_below else None

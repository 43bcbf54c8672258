"""What a disk may hold after a power cut, by the rules of POSIX.

Only fsync orders anything: that of a file keeps the content it has by then, that of a
folder the names in it. Of what came after, any part may be on the disk. Each change of
a folder's names (a rename inside of it is one change) is there or not, whatever the
others; a file has its former content, the new one, or a part of it, the rest missing or
zero. The model is that of "All File Systems Are Not Created Equal" (Pillai et al., OSDI
2014).
"""

import itertools
import math
import os
import pathlib
import random
from collections.abc import Iterator

# Relative path -> content; None for a folder.
Tree = dict[str, bytes | None]


class File:
    """`versions[0]` is on the disk, `versions[-1]` is what processes read."""

    def __init__(self):
        self.versions = [b""]

    def options(self, rng: random.Random) -> list[bytes]:
        """The contents after a power cut; a sample, where it may be cut anywhere."""
        old, new = self.versions[0], self.versions[-1]
        pairs = enumerate(zip(old, new, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(old), len(new)))
        half, anywhere = (same + len(new)) // 2, rng.randint(same, len(new))
        options = [
            *(new, old),
            *(new[:half], new[:anywhere]),
            new[:same] + bytes(len(new) - same),
            new[:half] + bytes(len(new) - half),
            new[:same] + bytes(half - same) + new[half:],
            new + old[len(new) :],
            *self.versions[1:-1][-3:],
        ]
        return list(dict.fromkeys(options))


class Folder:
    """`durable` names are on the disk; of `changes`, any subset."""

    def __init__(self):
        self.durable: dict[str, File | Folder] = {}
        self.entries: dict[str, File | Folder] = {}
        self.changes: list[dict[str, File | Folder | None]] = []

    def change(self, change: dict[str, "File | Folder | None"]) -> None:
        self.changes.append(change)
        self.entries = _changed(self.entries, change)

    def options(self, rng: random.Random) -> list[tuple[bool, ...]]:
        """Which of the changes are on the disk: all, none, all but one, only one, and,
        where they are few, every other subset."""
        count = len(self.changes)
        if count <= 4:
            return list(itertools.product([True, False], repeat=count))
        only = [tuple(i == j for i in range(count)) for j in range(count)]
        but = [tuple(not kept for kept in option) for option in only]
        drawn = [tuple(rng.random() < 0.5 for _ in range(count)) for _ in range(8)]
        first = [(True,) * count, (False,) * count]
        return list(dict.fromkeys([*first, *but, *only, *drawn]))


class Disk:
    """A file system that operations are applied to, `disk.rename("a", "b")`; paths are
    relative to its root, which stays."""

    def __init__(self):
        self._root = Folder()

    def mkdir(self, path: str) -> None:
        folder, name = self._parent(path)
        folder.change({name: Folder()})

    def create(self, path: str) -> None:
        folder, name = self._parent(path)
        folder.change({name: File()})

    def write(self, path: str, content: bytes) -> None:
        """Gives a file its whole new content."""
        self._node(path).versions.append(content)

    def rename(self, old: str, new: str) -> None:
        (source, name), (target, new_name) = self._parent(old), self._parent(new)
        node = source.entries[name]
        if source is target:
            source.change({name: None, new_name: node})
        else:
            target.change({new_name: node})
            source.change({name: None})

    def remove(self, path: str) -> None:
        folder, name = self._parent(path)
        folder.change({name: None})

    def sync(self, path: str) -> None:
        node = self._node(path)
        if isinstance(node, File):
            node.versions = node.versions[-1:]
        else:
            node.durable, node.changes = dict(node.entries), []

    def tree(self) -> Tree:
        """What processes see."""
        return self._tree({})

    def crash_states(self, rng: random.Random, most: int) -> Iterator[Tree]:
        """What may be on the disk if the power is lost now.

        All combinations where they are at most `most`. Else, about so many: everything
        and nothing since the last fsync; all files and no names, or no files and all
        names; everything, or nothing, but for one file or folder; and a random choice.
        """
        options = {node: node.options(rng) for node in self._unsettled()}
        if math.prod(map(len, options.values())) <= most:
            for choice in itertools.product(*options.values()):
                yield self._tree(dict(zip(options, choice, strict=True)))
            return
        kept = {node: choices[0] for node, choices in options.items()}
        lost = {node: choices[1] for node, choices in options.items()}
        states = [kept, lost] + [
            {n: (lost if type(n) is kind else kept)[n] for n in options}
            for kind in (File, Folder)
        ]
        zero = {n: c[4 % len(c)] for n, c in options.items() if isinstance(n, File)}
        states.append(kept | zero)
        ones = [
            around | {node: choice}
            for around in (kept, lost)
            for node, choices in options.items()
            for choice in choices
            if choice != around[node]
        ]
        states += rng.sample(ones, min(len(ones), most // 2))
        while len(states) < most:
            states.append({n: rng.choice(choices) for n, choices in options.items()})
        yield from map(self._tree, states)

    def _parent(self, path):
        parent, _, name = path.rpartition("/")
        return self._node(parent), name

    def _node(self, path):
        node = self._root
        for name in filter(None, path.split("/")):
            node = node.entries[name]
        return node

    def _unsettled(self):
        """The files and folders that a power cut may leave in more than one state."""
        nodes, queue = {}, [self._root]
        while queue:
            node = queue.pop()
            if node in nodes:
                continue
            nodes[node] = None
            if isinstance(node, Folder):
                for names in (node.durable, *node.changes):
                    queue.extend(n for n in names.values() if n is not None)
        return [
            node
            for node in nodes
            if (node.changes if isinstance(node, Folder) else node.versions[1:])
        ]

    def _tree(self, chosen):
        """The tree with a choice of options; what is not chosen is as processes see."""
        tree = {}

        def visit(folder, prefix):
            names = folder.entries
            if folder in chosen:
                names = folder.durable
                for change, is_kept in zip(folder.changes, chosen[folder], strict=True):
                    names = _changed(names, change) if is_kept else names
            for name, node in names.items():
                if isinstance(node, File):
                    tree[prefix + name] = chosen.get(node, node.versions[-1])
                else:
                    tree[prefix + name] = None
                    visit(node, f"{prefix}{name}/")

        visit(self._root, "")
        return tree


def _changed(names, change):
    names = names | change
    return {name: node for name, node in names.items() if node is not None}


def read_tree(root: pathlib.Path) -> Tree:
    """The files and folders below a folder; what vanishes meanwhile is left out."""
    tree = {}
    for folder, names, file_names in os.walk(root):
        relative = os.path.relpath(folder, root)
        prefix = "" if relative == "." else f"{relative}/"
        tree |= {prefix + name: None for name in names}
        for name in file_names:
            try:
                with open(os.path.join(folder, name), "rb") as file:
                    tree[prefix + name] = file.read()
            except FileNotFoundError:
                pass
    return tree


def write_tree(root: pathlib.Path, tree: Tree) -> None:
    """Makes files and folders in a new folder; parents stand before what is in them."""
    os.mkdir(root)
    for path, content in tree.items():
        if content is None:
            os.mkdir(root / path)
        else:
            (root / path).write_bytes(content)

"""Paths in tables: the file of each, by itself or by the end of its path."""

import functools
import os
import re
import shlex
import unicodedata
from collections.abc import Callable, Sequence

from towers.data.files import reading
from towers.data.files.class_folders import folders_in, is_split, split_of
from towers.data.files.paths import is_image_name, reason
from towers.data.inventory import Inventory
from towers.errors import DataError
from towers.messages import shown

# Size of the sample that is looked for in folders below, and limits for these folders.
SAMPLE = 100
MAX_FOLDERS = 1000
MAX_DEPTH = 3
_FORMS = "NFC", "NFD"  # keyboards write ä as one character, macOS stores a and dots


class PathFinder:
    """Resolver of the image paths of a table, which may lack the extension.

    If no file is there, the same number of leading folders is dropped from all paths,
    and the rest is looked for in `image_dir` and below.
    """

    def __init__(
        self, table: str, image_dir: str, inventory: Inventory, has_others: bool = False
    ):
        self._image_dir = os.path.expanduser(image_dir)
        self._folder = self._image_dir or os.path.dirname(table)
        self._inventory, self._listing = inventory, functools.cache(_listing)
        self._real = functools.cache(os.path.realpath)
        self._split, self._has_others = _split_of_name(table), has_others

    def __call__(
        self, names: Sequence[str], error: Callable[[int, str], DataError]
    ) -> list[str | None]:
        """Return the file of each path, or None; raises `error(row, message)`."""
        folder = os.path.basename(self._image_dir.rstrip("/"))
        folder_split = split_of(folder) if is_split(folder) else None
        splits = {self._split, folder_split} - {None}
        if names and len(splits) == 2:
            text = f"--image_dir={shown(self._image_dir)} is named like another split"
            raise error(0, f"{text}; give the folder above it")
        files = self._find(names, self._folder)
        if names and not any(files):
            places = self._places(names, self._folder)
            if not places and not self._image_dir:
                places = self._places(names, os.path.dirname(self._folder), 1)
            if not places and (matches := self._in_several_folders(names)):
                files = matches
            elif not places or places[1:] or not self._image_dir:
                raise error(0, self.missing(names[0], names, places))
            else:
                files = self._find(names, *places[0])
                name, matches = next(x for x in zip(names, files, strict=True) if x[1])
                text = f"matched by their ends: {shown(name, 60)} is "
                self._inventory.infer("paths", text + shown(matches[0], 80))
        for row, matches in enumerate(files):
            if matches[1:]:
                both = " or ".join(sorted(matches)[:2])
                raise error(row, f"{shown(names[row], 60)} is ambiguous: {both}")
        return [matches[0] if matches else None for matches in files]

    def present(self, names: Sequence[str]) -> list[int]:
        """Return the indices of the names that are paths of files."""
        files = self._find(names, self._folder)
        return [
            i
            for i, name in enumerate(names)
            if name and (files[i] or self._places([name], self._folder))
        ]

    def key(self, file: str) -> str:
        """Return a canonical form of the path of a file."""
        folder, name = os.path.split(file)
        return file if reading.is_url(file) else os.path.join(self._real(folder), name)

    def missing(
        self, name: str, names: Sequence[str] = (), places: Sequence = ()
    ) -> str:
        """Return the message about a missing file, with places of all `names`."""
        text = f"no file {shown(os.path.join(self._folder, name))}; "
        if places:
            folder, num_first = places[0]
            is_of_split = self._split and self._split == _split_of_name(folder)
            place = folder
            if self._has_others and is_of_split:  # for the other tables, too
                place = os.path.dirname(folder)
            count = sum(map(bool, self._find(names, folder, num_first)))
            text += f"--image_dir={shlex.quote(place)} has {count:,} of {len(names):,}"
            text += ", by the ends of their paths" if num_first else ""
            others = " and ".join(shown(other) for other, _ in places[1:3])
            return f"{text}; {others} has files of these names too" if others else text
        above, base = os.path.split(os.path.join(self._folder, _slashes(name)))
        if same := [x for x in self._listing(above) if x.lower() == base.lower()]:
            other = shown(os.path.join(above, same[0]))
            return f"{text}{other} differs in upper and lower case; rename one"
        return f"{text}--image_dir names the folder that the paths start from"

    def _places(self, names, root, depth=MAX_DEPTH):
        """Return the best (folder, number of leading folders to drop) for the paths."""
        folders = _folders_below(root, depth)
        sample = list(map(_slashes, names[:: -(-len(names) // SAMPLE)]))
        counts = {}
        for num_first in range(min(name.count("/") for name in sample) + 1):
            first = map(split_of, sample[0].split("/")[:num_first])
            splits = {self._split, *first} - {None}
            for folder in folders:
                if not splits or _split_of_name(folder) in (None, *splits):
                    files = self._find(sample, folder, num_first)
                    counts[folder, num_first] = len(set(map(tuple, files)) - {()})
        most = max(counts.values(), default=0)
        if 2 * most <= len(sample):
            return []
        places = [place for place, count in counts.items() if count == most]
        places = [place for place in places if place[1] == places[0][1]]
        if places[0][0] == root:
            return places[:1]
        return sorted(places, key=lambda x: _split_of_name(x[0]) != "train")

    def _in_several_folders(self, names):
        """Return the files of names in several folders, if each name is unique."""
        by_name = {}
        for folder in _folders_below(self._folder, MAX_DEPTH):
            if folder == self._folder or _split_of_name(folder) in (None, self._split):
                for name, files in self._listing(folder).items():
                    paths = (os.path.join(folder, file) for file in files)
                    by_name.setdefault(name, []).extend(paths)
        files = [by_name.get(_slashes(name).split("/")[-1], []) for name in names]
        folders = {os.path.dirname(path) for matches in files for path in matches}
        if len(folders) < 2 or any(len(matches) != 1 for matches in files):
            return []
        self._inventory.infer("paths", f"matched by names in {len(folders):,} folders")
        return files

    def _find(self, names, folder, num_first=0):
        if num_first:
            names = ["/".join(_slashes(x).split("/")[num_first:]) for x in names]
        return [self._files_of(name, folder) for name in names]

    def _files_of(self, name, folder):
        path = name if reading.is_url(name) else os.path.join(folder, name)
        if reading.is_url(path):
            return [path]
        for spelling in _spellings(name):
            above, base = os.path.split(os.path.join(folder, spelling))
            if names := self._listing(above).get(base):
                return [os.path.join(above, x) for x in names]
        return []


def _listing(folder):
    """Map file names, and image names without extension, to file names."""
    listing: dict[str, list[str]] = {}
    try:
        names = os.listdir(folder or ".")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:  # the files may be there
        raise DataError(f"{shown(folder)}: {reason(error)}") from error
    for name in filter(is_image_name, names):
        listing.setdefault(os.path.splitext(name)[0], []).append(name)
    return listing | {name: [name] for name in names}


def _folders_below(root, depth):
    folders = level = [root]
    for _ in range(depth):
        level = [x.path for folder in level for x in folders_in(folder)]
        folders = [*folders, *level][:MAX_FOLDERS]
    return [folder for folder in folders if os.access(folder, os.R_OK)]


def _slashes(name):
    """Convert a Windows path to a Unix path without a drive letter."""
    return re.sub(r"^[A-Za-z]:(?=/)", "", name.replace("\\", "/"))


def _spellings(name):
    """Yield a path as it is, with slashes, and in the Unicode forms of file systems."""
    yield name
    if "\\" in name:
        yield (name := _slashes(name))
    if not name.isascii():
        yield from (unicodedata.normalize(form, name) for form in _FORMS)


def _split_of_name(path):
    return split_of(os.path.basename(path))

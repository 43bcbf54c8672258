"""Paths in tables: the file of each, by itself or by the end of its path."""

import functools
import os
import re
import shlex
from collections.abc import Callable, Sequence

from towers.data.files import reading
from towers.data.files.class_folders import folders_in, is_split, split_of
from towers.data.files.paths import is_image_name, reason
from towers.data.inventory import Inventory
from towers.errors import DataError
from towers.messages import shown

# Paths that are tried in the folders below, and bounds of these folders.
SAMPLE = 100
MAX_FOLDERS = 1000
MAX_DEPTH = 3


class PathFinder:
    """Finds the files of a table's paths, which may lack the ending of their names.

    Paths start from `image_dir`, or from the folder of the table. If no file is found,
    the paths are from another machine, or the images are in a folder below: the same
    number of first folders is removed from all paths, and the rest is looked for in
    `image_dir` and the folders below it. Without `image_dir` the error names the folder
    to use.
    """

    def __init__(
        self,
        table: str,
        image_dir: str,
        inventory: Inventory,
        has_others: bool = False,
    ):
        """Read the paths of a table; `has_others` if there are tables of other
        splits.
        """
        self._table, self._image_dir = table, os.path.expanduser(image_dir)
        self._folder = self._image_dir or os.path.dirname(table)
        self._inventory, self._listing = inventory, functools.cache(_listing)
        self._real = functools.cache(os.path.realpath)
        self._split = split_of(os.path.basename(table))
        self._has_others = has_others

    def __call__(
        self, names: Sequence[str], error: Callable[[int, str], DataError]
    ) -> list[str | None]:
        """Return the file of each path, or None. Raises an `error` about one of them,
        by its number, if it may be two files, or none is found.
        """
        folder = os.path.basename(self._image_dir.rstrip("/"))
        of_folder = split_of(folder) if is_split(folder) else None
        if names and None not in (self._split, of_folder) and of_folder != self._split:
            text = f"--image_dir={shown(self._image_dir)} is named like another split"
            raise error(0, f"{text}; give the folder above it")
        files = self._find(names, self._folder)
        if names and not any(files):
            places = self._places(names, self._folder)
            if not places and not self._image_dir:
                places = self._places(names, os.path.dirname(self._folder), 1)
            if not places and (found := self._in_several_folders(names)):
                files = found
            elif not places or places[1:] or not self._image_dir:
                raise error(0, self.missing(names[0], names, places))
            else:
                files = self._find(names, *places[0])
                row = next(row for row, found in enumerate(files) if found)
                name, file = shown(names[row], 60), shown(files[row][0], 80)
                text = f"matched by their ends: {name} is {file}"
                self._inventory.infer("paths", text)
        for row, found in enumerate(files):
            if found[1:]:
                both = " or ".join(sorted(found)[:2])
                raise error(row, f"is {shown(names[row], 60)} the file {both}?")
        return [found[0] if found else None for found in files]

    def present(self, names: Sequence[str]) -> list[int]:
        """Return the indices of the names that are paths of files."""
        found = self._find(names, self._folder)
        return [
            i
            for i, name in enumerate(names)
            if name and (found[i] or self._places([name], self._folder))
        ]

    def key(self, file: str) -> str:
        """Return one text for all spellings of the path of a file."""
        folder, name = os.path.split(file)
        return file if reading.is_url(file) else os.path.join(self._real(folder), name)

    def missing(
        self,
        name: str,
        names: Sequence[str] = (),
        places: Sequence[tuple[str, int]] = (),
    ) -> str:
        """Return the message about a path without a file, with the places of `names`
        if none of them is found.
        """
        text = f"there is no file {shown(os.path.join(self._folder, name))}; "
        if places:
            folder, num_first = places[0]
            place, of_folder = folder, split_of(os.path.basename(folder))
            if self._has_others and of_folder and of_folder == self._split:
                place = os.path.dirname(folder)  # for the other tables, too
            count = sum(map(bool, self._find(names, folder, num_first)))
            text += f"--image_dir={shlex.quote(place)} has {count:,} of {len(names):,}"
            text += ", by the ends of their paths" if num_first else ""
            others = " and ".join(shown(other) for other, _ in places[1:3])
            return f"{text}; {others} has files of these names too" if others else text
        if other := self._in_other_case(name):
            text += f"{shown(other)} differs in the case of its letters: write the "
            return f"{text}path so, or rename the file"
        return f"{text}--image_dir names the folder that the paths start from"

    def _places(self, names, root, depth=MAX_DEPTH):
        """Return the places below a root with the most files, over half of them:
        (folder, number of first folders of the paths to omit). Folders named like
        another split than the table's, or than the omitted folders', are excluded.
        """
        folders = _folders_below(root, depth)
        sample = list(map(_slashes, names[:: -(-len(names) // SAMPLE)]))
        counts = {}
        for num_first in range(min(name.count("/") for name in sample) + 1):
            first = map(split_of, sample[0].split("/")[:num_first])
            splits = {self._split, *first} - {None}
            for folder in folders:
                split = split_of(os.path.basename(folder))
                if split is None or not splits or split in splits:
                    found = self._find(sample, folder, num_first)
                    counts[folder, num_first] = len(set(map(tuple, found)) - {()})
        most = max(counts.values(), default=0)
        if 2 * most <= len(sample):
            return []
        places = [place for place, count in counts.items() if count == most]
        places = [place for place in places if place[1] == places[0][1]]
        if places[0][0] == root:
            return places[:1]
        return sorted(places, key=lambda x: split_of(os.path.basename(x[0])) != "train")

    def _in_several_folders(self, names):
        """Return the file of each path by its name in all folders below that are not of
        another split; none if a name is missing or in two of them.
        """
        by_name = {}
        for folder in _folders_below(self._folder, MAX_DEPTH):
            split = split_of(os.path.basename(folder))
            if folder == self._folder or split in (None, self._split):
                for name, files in self._listing(folder).items():
                    paths = (os.path.join(folder, file) for file in files)
                    by_name.setdefault(name, []).extend(paths)
        files = [by_name.get(_slashes(name).split("/")[-1], []) for name in names]
        folders = {os.path.dirname(path) for found in files for path in found}
        if len(folders) < 2 or any(len(found) != 1 for found in files):
            return []
        text = f"found by their names in {len(folders):,} folders"
        self._inventory.infer("paths", text)
        return files

    def _find(self, names, folder, num_first=0):
        """Return the files that each path from a folder may mean."""
        ends = [_end(name, num_first) if num_first else name for name in names]
        return [self._files_of(end, folder) for end in ends]

    def _files_of(self, name, folder):
        path = name if reading.is_url(name) else os.path.join(folder, name)
        if reading.is_url(path):
            return [path]
        above, base = os.path.split(path)
        names = self._listing(above).get(base, ())
        if not names and "\\" in name:
            return self._files_of(_slashes(name), folder)
        return [os.path.join(above, x) for x in names]

    def _in_other_case(self, name):
        """Return the file whose path differs only in case, or None."""
        path = self._folder
        for part in filter(None, _slashes(name).split("/")):
            same = [x for x in _names_in(path) if x.lower() == part.lower()]
            if not same:
                return None
            path = os.path.join(path, part if part in same else same[0])
        return path


def _listing(folder):
    """Map names of files, and of images without their ending, to names of files."""
    listing, names = {}, _names_in(folder)
    for name in filter(is_image_name, names):
        listing.setdefault(os.path.splitext(name)[0], []).append(name)
    return listing | {name: [name] for name in names}


def _folders_below(root, depth):
    """Return a folder and those below it that can be read."""
    folders = level = [root]
    for _ in range(depth):
        level = [x.path for folder in level for x in folders_in(folder)]
        folders = [*folders, *level][:MAX_FOLDERS]
    return [folder for folder in folders if os.access(folder, os.R_OK)]


def _names_in(folder):
    try:
        return os.listdir(folder or ".")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:  # the files may be there
        raise DataError(f"{shown(folder)}: {reason(error)}") from error


def _slashes(name):
    """Convert a Windows path to a Unix path without a drive letter."""
    return re.sub(r"^[A-Za-z]:(?=/)", "", name.replace("\\", "/"))


def _end(name, num_first):
    """Return a path without some of its first folders."""
    return "/".join(_slashes(name).split("/")[num_first:])

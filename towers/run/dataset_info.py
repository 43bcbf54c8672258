"""Classes and preprocessing of the data set that a network was trained on.

A checkpoint has it in its trainer state, a run's folder in `dataset_info.json`, so that
the network can be used without the images that it was trained on.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from towers.config import parse_json
from towers.data.files.paths import shown
from towers.data.sources import DataSet, checksum
from towers.errors import ConfigError

# Moments that differ by less are of the same images, counted by another version.
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """Classes and preprocessing of a data set.

    Attributes:
        name: of the data set.
        class_names: in the order of the logits.
        image_shape: height, width, channels of its uint8 images, before augmentation.
        mean, std: mean and standard deviation by which images are standardized,
            per channel, in units of 0..255.
        num_train: training images; None without them, as in an evaluation.
        checksum: of the training images' labels or names, see `sources.checksum`; None
            where it is not known.
        multi_label: whether an image may have several labels, or none.
    """

    name: str
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_train: int | None = None
    checksum: int | None = None
    multi_label: bool = False

    @classmethod
    def of(cls, data: DataSet) -> "DatasetInfo":
        return cls(
            name=data.name,
            class_names=tuple(map(str, data.class_names)),
            image_shape=tuple(map(int, data.image_shape)),
            mean=tuple(map(float, data.mean)),
            std=tuple(map(float, data.std)),
            num_train=None if data.train is None else data.train.num_examples,
            checksum=None if data.train is None else checksum(data.train),
            multi_label=data.multi_label,
        )

    @classmethod
    def from_values(cls, values: Any) -> "DatasetInfo":
        """Creates the object from stored values.

        Raises:
            ConfigError: it is no such object.
        """
        *fields, _ = (field.name for field in dataclasses.fields(cls))
        if not isinstance(values, dict) or not values.keys() >= set(fields):
            raise ConfigError(f"an object with {', '.join(fields)} is expected")
        name, class_names, image_shape, *moments = (values[x] for x in fields[:5])
        counts = [values[x] for x in fields[5:]]
        texts = [name, *class_names] if isinstance(class_names, list) else [None]
        if not class_names or not all(isinstance(text, str) for text in texts):
            raise ConfigError("its name and class_names are not all texts")
        if not _is_list_of(image_shape, int, 3) or not all(
            0 < size < 2**31 for size in image_shape
        ):
            raise ConfigError(
                "its image_shape is not a height, a width and a number of channels"
            )
        for numbers in moments:
            if not _is_list_of(numbers, float, image_shape[-1]):
                raise ConfigError("its mean and std are not a number per channel")
        for count in counts:
            if count is not None and not (type(count) is int and 0 <= count < 2**63):
                raise ConfigError("its num_train or checksum is not a natural number")
        multi_label = values.get("multi_label", False)  # 0.1.0 has none
        if type(multi_label) is not bool:
            raise ConfigError("its multi_label is not true or false")
        tuples = map(tuple, (class_names, image_shape, *moments))
        return cls(name, *tuples, *counts, multi_label)

    @classmethod
    def from_json(cls, content: bytes) -> "DatasetInfo":
        """Reads a stored `dataset_info.json`; raises ConfigError as `from_values`."""
        try:
            return cls.from_values(parse_json(content))
        except ValueError as error:
            raise ConfigError(f"not a dataset_info.json: {error}") from None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def preprocessing_of_run(self, data: DataSet) -> DataSet:
        """The data set with the moments of the run in place of its own.

        Raises:
            ConfigError: it has other classes, or images of another shape.
        """
        differing = self._difference(DatasetInfo.of(data))
        if differing:
            raise ConfigError(f"not the data set of the run: {differing}")
        return dataclasses.replace(data, mean=self.mean, std=self.std)

    def validate_training(self, data: DataSet) -> None:
        """Refuses to continue a run with other images than it was trained on.

        Raises:
            ConfigError: what differs.
        """
        other = DatasetInfo.of(data)
        differing = self._difference(other) or self.training_difference(other)
        moments = np.array([self.mean, self.std])
        theirs = np.array([other.mean, other.std])
        if not differing and not np.allclose(moments, theirs, _TOLERANCE, _TOLERANCE):
            differing = (
                "mean and standard deviation by which images are standardized were "
                f"{_rounded(moments)} and are {_rounded(theirs)}"
            )
        if differing:
            raise ConfigError(
                f"not the data set of the run: {differing}. Give the former "
                "one, choose another --workdir, or --allow_change=dataset"
            )

    def training_difference(self, other: "DatasetInfo") -> str:
        """Describes the first difference in number, labels or names of the training
        images; empty without one."""
        if self.num_train != other.num_train:
            return (
                f"it had {self.num_train:,} training images and has "
                f"{other.num_train:,}, so their order is another one"
            )
        if None not in (self.checksum, other.checksum):
            if self.checksum != other.checksum:
                return "labels or names of its training images, or their order, differ"
        return ""

    def _difference(self, other):
        """Describes the first difference in classes or shape; empty without one."""
        if self.image_shape != other.image_shape:
            return (
                f"its images were {_shape(self.image_shape)} and are "
                f"{_shape(other.image_shape)}"
            )
        if self.multi_label != other.multi_label:
            kinds = ("one label an image", "label sets")
            return (
                f"it had {kinds[self.multi_label]} and has {kinds[other.multi_label]}"
            )
        ours, theirs = self.class_names, other.class_names
        if len(ours) != len(theirs):
            return f"it had {len(ours)} classes and has {len(theirs)}"
        for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            if our != their:
                return f"class {index} was {shown(our, 60)} and is {shown(their, 60)}"
        return ""


def _is_list_of(values, kind, count):
    """True if a JSON value is a list of `count` finite numbers of a type."""
    kinds = (int, float) if kind is float else (int,)
    return (
        isinstance(values, list)
        and len(values) == count
        and all(type(x) in kinds and abs(x) < 2**63 for x in values)
        and all(map(math.isfinite, values))
    )


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _rounded(moments: np.ndarray) -> list[list[float]]:
    return np.round(moments, 2).tolist()

"""Classes and preprocessing of the data set that a network was trained on.

A checkpoint has it in its trainer state, a run's folder in `dataset_info.json`, so that
the network can be used without the images that it was trained on.
"""

import dataclasses
import json
from typing import Any

import numpy as np

from towers.config import parse_json
from towers.data.sources import DataSet, checksum
from towers.errors import ConfigError
from towers.messages import shown

# Moments that differ by less are of the same images, counted by another version.
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """Classes and preprocessing of a data set.

    Attributes:
        class_names: in the order of the logits.
        image_shape: height, width, channels of its uint8 images, before augmentation.
        mean, std: mean and standard deviation by which images are standardized,
            per channel, in units of 0..255.
        num_train: training images; None without them, as in an evaluation.
        checksum: of the training images' labels or names, see `sources.checksum`; None
            where it is not known.
        multi_label: whether an image may have several labels, or none.
        inventory: how the data were read, the lines of the start banner.
    """

    name: str
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_train: int | None = None
    checksum: int | None = None
    multi_label: bool = False
    inventory: tuple[str, ...] = ()

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
            inventory=tuple(map(": ".join, data.inventory.lines(data))),
        )

    @classmethod
    def from_values(cls, values: Any) -> "DatasetInfo":
        """Creates the object from stored values; ConfigError where they are no such."""
        try:
            own = {x.name: values[x.name] for x in dataclasses.fields(cls)[:-2]}
            own["multi_label"] = values.get("multi_label", False)  # 0.1.0 has none
            own["inventory"] = values.get("inventory", ())  # nor this
            for name in ("class_names", "image_shape", "mean", "std", "inventory"):
                own[name] = tuple(own[name])
            return cls(**own)
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigError(f"no description of a data set: {error!r}") from None

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
        """Return the data set with the moments of the run, or raise a ConfigError."""
        differing = self._difference(DatasetInfo.of(data))
        if differing:
            raise ConfigError(f"not the data set of the run: {differing}")
        return dataclasses.replace(data, mean=self.mean, std=self.std)

    def validate_training(self, data: DataSet) -> None:
        """Raise ConfigError if a run would go on with other images."""
        other = DatasetInfo.of(data)
        differing = self._difference(other) or self.training_difference(other)
        moments = np.array([self.mean, self.std])
        theirs = np.array([other.mean, other.std])
        if not differing and not np.allclose(moments, theirs, _TOLERANCE, _TOLERANCE):
            differing = (
                "mean and standard deviation by which images are standardized were "
                f"{moments.round(2).tolist()} and are {theirs.round(2).tolist()}"
            )
        if differing:
            raise ConfigError(
                f"not the data set of the run: {differing}. Give the former "
                "one, choose another --workdir, or --allow_change=dataset"
            )

    def training_difference(self, other: "DatasetInfo") -> str:
        """Describe the first difference of the training images; empty if none."""
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
            ours, theirs = ("x".join(map(str, x.image_shape)) for x in (self, other))
            return f"its images were {ours} and are {theirs}"
        return self.class_difference(other)

    def class_difference(self, other: "DatasetInfo") -> str:
        """Describes the first difference in classes; empty without one."""
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

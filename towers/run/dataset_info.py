"""Classes and preprocessing of the data set that a network was trained on.

They are stored in checkpoints and in `dataset_info.json`, so that the network can be
used without its training images.
"""

import dataclasses
import json
from typing import Any

import numpy as np

from towers.config import parse_json
from towers.data.pixel_format import PHOTO, PixelFormat
from towers.data.sources import DataSet, checksum
from towers.errors import ConfigError
from towers.messages import shown

# Moments of the same images differ by less between versions.
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """Classes and preprocessing of a data set.

    Attributes:
        class_names: In the order of the logits.
        image_shape: Height, width, channels of its images, before augmentation.
        mean, std: Mean and standard deviation per channel, in units of 0..255.
        num_train: Number of training images; None in an evaluation.
        checksum: Of the training labels or file names, see `sources.checksum`.
        multi_label: Whether an image may have several labels, or none.
        inventory: Lines of the start banner about how the data was read.
        pixels: Format of its images, and the range of values that becomes 0..255.
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
    pixels: PixelFormat = PHOTO

    @classmethod
    def of(cls, data: DataSet) -> "DatasetInfo":
        """Describe a data set."""
        height, width, channels = map(int, data.image_shape)
        return cls(
            name=data.name,
            class_names=tuple(map(str, data.class_names)),
            image_shape=(height, width, channels),
            mean=tuple(map(float, data.mean)),
            std=tuple(map(float, data.std)),
            num_train=None if data.train is None else data.train.num_examples,
            checksum=None if data.train is None else checksum(data.train),
            multi_label=data.multi_label,
            inventory=tuple(map(": ".join, data.inventory.lines(data))),
            pixels=data.pixels,
        )

    @classmethod
    def from_values(cls, values: Any) -> "DatasetInfo":
        """Read stored values; raise ConfigError if they are invalid."""
        try:
            own = {x.name: values[x.name] for x in dataclasses.fields(cls)[:-3]}
            # Earlier versions store none of these.
            own["multi_label"] = values.get("multi_label", False)
            own["inventory"] = values.get("inventory", ())
            if "pixels" in values:
                own["pixels"] = PixelFormat.from_values(values["pixels"])
            for name in ("class_names", "image_shape", "mean", "std", "inventory"):
                own[name] = tuple(own[name])
            return cls(**own)
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigError(f"not a description of a data set: {error!r}") from None

    @classmethod
    def from_json(cls, content: bytes) -> "DatasetInfo":
        """Read a stored `dataset_info.json`; raise ConfigError if it is invalid."""
        try:
            return cls.from_values(parse_json(content))
        except ValueError as error:
            raise ConfigError(f"not a dataset_info.json: {error}") from None

    def to_json(self) -> str:
        """Return the content of `dataset_info.json`."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def preprocessing_of_run(self, data: DataSet) -> DataSet:
        """Return the data set with the moments of the run, or raise a ConfigError."""
        if differing := self._difference(DatasetInfo.of(data)):
            raise ConfigError(f"not the data set of the run: {differing}")
        own = {name: getattr(self, name) for name in ("mean", "std", "pixels")}
        return dataclasses.replace(data, **own)

    def validate_training(self, data: DataSet) -> None:
        """Raise ConfigError if a run would go on with other images."""
        other = DatasetInfo.of(data)
        differing = self._difference(other) or self.training_difference(other)
        moments = np.array([self.mean, self.std])
        theirs = np.array([other.mean, other.std])
        if not differing and not np.allclose(moments, theirs, _TOLERANCE, _TOLERANCE):
            differing = (
                f"mean and standard deviation were {moments.round(2).tolist()} and are "
                f"{theirs.round(2).tolist()}"
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
                f"{other.num_train:,}, so their order differs"
            )
        sums = self.checksum, other.checksum
        if None not in sums and self.checksum != other.checksum:
            return "labels or names of its training images, or their order, differ"
        return ""

    def _difference(self, other):
        if self.image_shape != other.image_shape:
            ours, theirs = ("x".join(map(str, x.image_shape)) for x in (self, other))
            return f"its images were {ours} and are {theirs}"
        if self.pixels.dtype != other.pixels.dtype:
            ours, theirs = self.pixels.dtype, other.pixels.dtype
            return f"its pixels were {ours} and are {theirs}"
        return self.class_difference(other)

    def class_difference(self, other: "DatasetInfo") -> str:
        """Describe the first difference in classes; empty if none."""
        if self.multi_label != other.multi_label:
            kinds = {False: "one label per image", True: "label sets"}
            before, now = kinds[self.multi_label], kinds[other.multi_label]
            return f"it had {before} and has {now}"
        ours, theirs = self.class_names, other.class_names
        if len(ours) != len(theirs):
            return f"it had {len(ours)} classes and has {len(theirs)}"
        for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            if our != their:
                return f"class {index} was {shown(our, 60)} and is {shown(their, 60)}"
        return ""

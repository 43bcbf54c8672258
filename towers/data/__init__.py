"""Data sets, augmentation, and batches that are functions of (seed, step).

Importing the package does not import TensorFlow; loading a data set does.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, cast

from towers.config import choices, factories
from towers.errors import ConfigError, DataError

if TYPE_CHECKING:
    from towers.data.sources import DataSet, Trained


def load(
    name: str,
    data_dir: str = "",
    *,
    trained: "Trained | None" = None,
    columns: str = "",
    image_dir: str = "",
    fold: int = -1,
    class_level: int = 0,
    label_separator: str = ";",
    unknown_class: str = "",
    **image_options: Any,
) -> "DataSet":
    """Load a data set by its name.

    `name` is in `towers.config.choices.DATASETS`, or FILE.py:FUNCTION, a function with
    some of the keyword arguments data_dir, the fields of `ImageOptions`, and
    image_options, which is one. `data_dir` is empty for the usual places. For a
    `trained` network to evaluate, a data set may have no training images, and `train`
    is None. `columns`, `image_dir`, `fold` and `label_separator` are of containers, see
    `files.containers` and `files.tables`, `class_level` of folders, see
    `files.image_folder`; images of `unknown_class` are of no class.

    Raises:
        DataError: it is missing or invalid, such as a label outside of the classes;
            with a survey only labels that are known are compared.
        ConfigError: no such name or column role exists, or a function in a file does
            not return a DataSet.
    """
    from towers.data.files import reading
    from towers.data.files.image_files import ImageOptions
    from towers.data.sources import DataSet
    from towers.data.unknown import UNKNOWN, set_apart
    from towers.data.validate import validate, validate_labels

    reading.forget_versions()
    options = ImageOptions(**image_options)
    if trained is not None and unknown_class:  # as in the training
        names = (*trained.class_names, unknown_class)
        trained = dataclasses.replace(cast(Any, trained), class_names=names)
    data_set = factories.create(
        "dataset",
        name,
        data_dir=data_dir,
        columns=columns,
        image_dir=image_dir,
        fold=fold,
        class_level=class_level,
        label_separator=label_separator,
        image_options=options,
        trained=trained,
        **vars(options),
    )
    if not isinstance(data_set, DataSet):
        kind, way = type(data_set).__name__, "return a towers.data.sources.DataSet"
        raise ConfigError(f"dataset={name}: gave {kind}; {way}")
    validate(data_set, is_own=choices.find("dataset", name).is_in_a_file)
    if data_set.train is None and trained is None:
        raise DataError(f"{data_set.name}: it has no training images")
    validate_labels(data_set, known_alone=options.survey is not None)
    names = data_set.class_names
    if unknown_class and (trained is None or unknown_class in names):
        return set_apart(data_set, unknown_class)
    if trained is None and UNKNOWN in names and not data_set.multi_label:
        way = f"--unknown_class={UNKNOWN} trains its images as images of no class"
        data_set.inventory.infer(UNKNOWN, f"is a class of the network; {way}")
    return data_set

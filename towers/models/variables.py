"""A network's variables: their names in checkpoints, and their size."""

import contextlib
import math
import threading
from collections.abc import Callable

import keras
import tensorflow as tf


def variable_names(variables: list[keras.Variable]) -> list[str]:
    """The paths of a model's variables, such as "conv1/kernel".

    Raises:
        ValueError: two are the same, or one is the state of a random generator, which
            would make a tower depend on its history.
    """
    names = [variable.path for variable in variables]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ValueError(
            f"several variables of the model have the name {sorted(repeated)}"
        )
    for name in names:
        if "seed_generator" in name:
            raise ValueError(
                f"the model keeps a random generator, {name}: use the layers of "
                "towers.models.layers, whose noise is an input"
            )
    return names


def count_bytes(create: Callable[[], keras.Model]) -> tuple[int, int] | None:
    """Bytes of the trainable and of all other variables of a network, from their
    shapes; none is allocated.

    Args:
        create: builds the network.

    Returns:
        None where it can only be built with its values.
    """
    sizes = []

    def count():
        # The error of a network that is wrong is that of the real one.
        with (
            contextlib.suppress(Exception),
            keras.StatelessScope(initialize_variables=False),
        ):
            model = create()
            for part in (model.trainable_variables, model.non_trainable_variables):
                numbers = (math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in part)
                sizes.append(sum(numbers))

    # Keras would initialize the variables later, in the thread that has made them.
    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
    return tuple(sizes) if len(sizes) == 2 else None

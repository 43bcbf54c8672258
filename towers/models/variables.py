"""Building of networks: names and initial values of their variables."""

import contextlib
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import keras
import tensorflow as tf

from towers.keras_internals import initialize


def variable_names(variables: list[keras.Variable]) -> list[str]:
    """Return the paths of a model's variables, such as "conv1/kernel".

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


def build_network(
    create: Callable[[], keras.Model], seed: int = 0, policy: str = "float32"
) -> keras.Model:
    """Build a network on the CPU whose initial values are functions of (seed, name).

    Keras numbers names, and draws values, through a process. Here `create` runs in a
    new thread, and makes variables without values, which are drawn when their names are
    known. If it cannot, it is called once more, with Keras' generators set to the seed.
    """

    def without_values():
        scope = keras.StatelessScope(initialize_variables=False)
        with _settled(policy), scope:
            return create(), scope

    def with_values():
        with _settled(policy):
            keras.utils.set_random_seed(_seed(seed, ""))
            return create()

    try:
        model, scope = _in_new_thread(without_values)
    except Exception:  # the error of a network that is wrong is raised again
        return _in_new_thread(with_values)
    with _settled(policy):
        for variable in model.variables:
            _initialize(variable, scope.get_current_value(variable), seed)
    return model


@contextlib.contextmanager
def keras_settings(policy: str = "float32") -> Iterator[None]:
    """Fix Keras' global settings while a model is built."""
    before = (
        keras.config.dtype_policy(),
        keras.config.floatx(),
        keras.config.image_data_format(),
    )
    keras.config.set_floatx("float32")
    keras.config.set_image_data_format("channels_last")
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_floatx(before[1])
        keras.config.set_image_data_format(before[2])
        keras.config.set_dtype_policy(before[0])


@contextlib.contextmanager
def _settled(policy):
    with keras_settings(policy), tf.device("CPU:0"):
        yield


def _in_new_thread(function):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def _initialize(variable, value, seed):
    """Give a variable its first value: the assigned one, or a drawn one."""

    def replace(initializer):
        if value is not None:
            return lambda shape, dtype: value
        number = _seed(seed, variable.path.removesuffix("/kernel"))
        return _with_seed(initializer, number)

    initialize(variable, replace)


def _with_seed(initializer, number):
    if isinstance(initializer, keras.initializers.Initializer):
        settings = initializer.get_config()
        if "seed" in settings:
            return type(initializer).from_config(settings | {"seed": number})
        if type(initializer).__module__.startswith("keras."):
            return initializer
    keras.utils.set_random_seed(number)  # of a function or a class of the user
    return initializer


def _seed(seed, name):
    return zlib.crc32(f"{seed}/{name}".encode()) & 0x7FFFFFFF

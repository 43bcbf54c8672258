"""Check of a network that comes from a file of the user."""

import keras

from towers.errors import ConfigError

IMAGES = "images"


def check_network(
    name: str,
    model: keras.Model,
    again: keras.Model,
    image_shape: tuple[int, int, int],
    num_classes: int,
) -> None:
    """Refuses a network that a strategy cannot train.

    Args:
        name: the value of --model, for the message.
        model, again: results of two calls of the function; Keras numbers automatic
            names anew in each, so that explicit ones are those that are the same.
        image_shape: height, width, channels of the images.
        num_classes: number of logits.

    Raises:
        ConfigError: see the messages.
    """

    def refuse(words):
        raise ConfigError(f"model={name}: {words}")

    # Sequential and subclassed models show no operations.
    if not any(cls.__name__ == "Functional" for cls in type(model).__mro__):
        refuse(
            f"gave {type(model).__name__}; return a Functional model, "
            "keras.Model(inputs, outputs)"
        )
    if model is again:
        refuse("gave the same model twice; build a new one in each call")
    for layer, other in zip(model.layers, again.layers, strict=False):
        if layer.name != other.name:
            refuse(
                f"layer {layer.name!r} has an automatic name, which changes from model "
                f"to model; give every layer one, such as name={_stem(layer)!r}"
            )
    for layer in model.layers:
        if any("seed_generator" in variable.path for variable in layer.variables):
            refuse(
                f"layer {layer.name!r} keeps the state of a random generator; use "
                "towers.models.layers.Dropout with a noise input"
            )
    shapes = {x.name: tuple(x.shape[1:]) for x in model.inputs}
    if shapes.get(IMAGES) != image_shape:
        refuse(
            f"takes {shapes}; one input should be "
            f"keras.Input({image_shape}, name={IMAGES!r})"
        )
    outputs = [tuple(x.shape) for x in model.outputs]
    if outputs != [(None, num_classes)]:
        refuse(
            f"gives {outputs}; the data set needs [(None, {num_classes})], a logit of "
            "each class"
        )


def _stem(layer):
    """The automatic name without its number, and with one that is explicit."""
    return layer.name.rstrip("0123456789").rstrip("_") + "1"

"""Trained networks for inference: without dropout layers."""

import keras

from towers.errors import ConfigError, nearest
from towers.models.keras.networks import IMAGES
from towers.models.keras.noise import WithNoise
from towers.models.layers.core import Dropout


def without_noise(model: keras.Model, layer: str = "") -> keras.Model:
    """The network from its images alone to its logits, or to the output of a layer.

    Dropout layers, which change nothing in inference, and all inputs of noise are left
    out. The other layers are shared with the model.

    Raises:
        ConfigError: there is no such layer.
    """
    if len(model.inputs) == 1 and not layer:
        return model
    outputs = {}

    def call(operation, inputs, *args, **kwargs):
        if isinstance(operation, Dropout):
            return inputs[0]
        if isinstance(operation, WithNoise):
            output = operation.call_of(operation.layer, inputs)
        else:
            output = operation(inputs, *args, **kwargs)
        outputs[operation.name] = output
        return output

    # `layer.output` may be of another network that the layer is part of as well.
    clone = keras.models.clone_model(
        model,
        input_tensors=model.input,
        clone_function=lambda layer: layer,
        call_function=call,
    )
    if layer and layer not in outputs:
        raise ConfigError(
            f"features={layer}: there is no such layer; {nearest(layer, outputs)}"
            f"layers: {', '.join(outputs)}"
        )
    [images] = (x for x in model.inputs if x.name == IMAGES)
    output = outputs[layer] if layer else clone.outputs[0]
    return keras.Model(images, output, name=model.name)

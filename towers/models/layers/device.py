"""Layers that compute in the way that suits a kind of device."""

import keras

from towers.keras_internals import layers_of


class OnDevice(keras.layers.Layer):
    """A layer that knows the kind of device it runs on, CPU or GPU.

    The kind is an argument because a trace has no device. On the other kind the layer
    computes the same, only slower.
    """

    def __init__(self, *args, device_kind: str = "CPU", **kwargs):
        super().__init__(*args, **kwargs)
        self.device_kind = device_kind

    def get_config(self):
        return super().get_config() | {"device_kind": self.device_kind}


def set_device_kind(model: keras.Model, device_kind: str) -> None:
    """Choose the kind of device, CPU or GPU, for all layers of a network."""
    for layer in layers_of(model):
        if isinstance(layer, OnDevice):
            layer.device_kind = device_kind

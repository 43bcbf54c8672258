"""TensorBoard's own reader."""

import tensorflow as tf
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator,
)


def read_board(folder, kind):
    """tag -> [(step, array)], through TensorBoard's own reader."""
    events = EventAccumulator(str(folder / kind), size_guidance={"tensors": 0})
    events.Reload()
    return {
        tag: [(e.step, tf.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }

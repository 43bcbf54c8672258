"""TFLite Metadata, which MediaPipe, ML Kit and Android Studio read.

The numbers are from the schema, `metadata_schema.fbs` in MediaPipe and in TensorFlow's
tflite-support: a table is a dict from the number of a field to its value.
"""

from collections.abc import Sequence

import flatbuffers
import numpy as np

from towers.tf_internals import tflite_files

NAME, LABELS = b"TFLITE_METADATA", "labels.txt"
AXIS_LABELS, IMAGE, NORMALIZATION = 2, 2, 1  # kinds of file, content and process unit
COLOR_SPACES = {3: 1, 1: 2}  # RGB, grayscale


def with_metadata(content: bytes, channels: int, files: Sequence[str]) -> bytes:
    """Return a .tflite file with metadata; its first output becomes "probabilities"."""
    model = tflite_files().read_model_from_bytearray(bytearray(content))
    [graph, *_], [signature, *_] = model.subgraphs, model.signatureDefs
    names = {x.tensorIndex: x.name.decode() for x in signature.outputs}
    graph.outputs = sorted(names, key=lambda x: (names[x] != "probabilities", names[x]))
    images = {
        0: "images",
        3: {0: IMAGE, 1: {0: COLOR_SPACES.get(channels, 0)}},
        4: [{0: NORMALIZATION, 1: {0: np.zeros(1), 1: np.ones(1)}}],
    }
    labels = [{0: LABELS, 2: AXIS_LABELS}]
    outputs = [{0: names[index], 6: labels} for index in graph.outputs]
    metadata = {
        0: "ImageClassifier",
        3: [{2: [images], 3: outputs}],
        6: [{0: file} for file in files],
        7: "1.0.0",  # the oldest version of the schema that has these fields
    }
    builder = flatbuffers.Builder()
    builder.Finish(_write(builder, metadata), b"M001")
    buffer, entry = type(model.buffers[0])(), type(model.metadata[0])()
    buffer.data = np.frombuffer(builder.Output(), np.uint8)
    entry.name, entry.buffer = NAME, len(model.buffers)
    model.buffers.append(buffer)
    model.metadata.append(entry)
    return tflite_files().convert_object_to_bytearray(model)


def _write(builder, value):
    """Write a text, floats, a list of tables, or a table; return its offset."""
    if isinstance(value, str):
        return builder.CreateString(value)
    if isinstance(value, np.ndarray):
        return builder.CreateNumpyVector(value.astype(np.float32))
    if isinstance(value, list):
        offsets = [_write(builder, x) for x in value]
        builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            builder.PrependUOffsetTRelative(offset)
        return builder.EndVector()
    fields = {
        i: x if isinstance(x, int) else _write(builder, x) for i, x in value.items()
    }
    builder.StartObject(1 + max(fields))
    for i, x in fields.items():
        if isinstance(value[i], int):
            builder.PrependInt8Slot(i, x, 0)
        else:
            builder.PrependUOffsetTRelativeSlot(i, x, 0)
    return builder.EndObject()

"""The formats of exports, a row of a table each."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Format:
    """A row of FORMATS. `writers` has a function write_NAME of each format, and
    `load_in_new_process` a function NAME of each that has the network.

    Attributes:
        suffix: of the file's name; empty for a folder.
        marks: texts in the file, in a folder in `saved_model.pb`, by which an earlier
            export is recognized.
        precisions: choices of `precision`.
        packages: needed to write it; installed by the extra of towers with its name.
        has_network: whether it has the network, not its parameters alone.
        is_trainable: whether it can be trained further; otherwise normalizations are
            folded.
    """

    suffix: str
    marks: tuple[bytes, ...]
    precisions: tuple[str, ...] = ("float32",)
    packages: tuple[str, ...] = ()
    has_network: bool = True
    is_trainable: bool = False


FORMATS = {
    "saved_model": Format("", (b"class_names", b"probabilities")),
    "keras": Format(".keras", (b"class_names.json",), is_trainable=True),
    "tflite": Format(".tflite", (b"labels.txt",), ("float32", "float16", "int8")),
    "onnx": Format(
        ".onnx", (b"class_names", b"probabilities"), packages=("tf2onnx", "onnxruntime")
    ),
    "safetensors": Format(".safetensors", (b"class_names",), has_network=False),
}

# Precision -> limits of the figures of `comparison.figures_of`; an export that exceeds
# one is doubtful. A single image is always allowed.
_FEWER_BITS = {"largest_difference": math.inf, "changed": 0.1, "accuracy_lost": 0.02}
LIMITS = {
    "float32": {"largest_difference": 1e-4},
    "float16": _FEWER_BITS,
    "int8": _FEWER_BITS,
}

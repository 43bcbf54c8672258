"""The formats of exports."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Format:
    """A row of FORMATS.

    Attributes:
        writer: Function of `writers` that writes it.
        checker: Function of `load_in_new_process` that loads it; empty if it has only
            parameters, which are checked in a new network.
        suffix: Ending of the file; empty for a folder.
        marks: Texts in the file, or in the folder's `saved_model.pb`, by which an
            earlier export is recognized.
        precisions: Valid values of `precision`.
        packages: Packages that it needs; the extra of towers with its name has them.
        has_probabilities: Whether its outputs have probabilities.
    """

    writer: str
    checker: str
    suffix: str
    marks: tuple[bytes, ...]
    precisions: tuple[str, ...] = ("float32",)
    packages: tuple[str, ...] = ()
    has_probabilities: bool = True


_NAMES, _OUTPUTS = b"class_names", b"probabilities"
_FEWER, _ONNX = ("float32", "float16", "int8"), ("tf2onnx", "onnxruntime")

FORMATS = {
    "saved_model": Format("write_saved_model", "saved_model", "", (_NAMES, _OUTPUTS)),
    "keras": Format(
        "write_keras", "keras", ".keras", (_NAMES,), has_probabilities=False
    ),
    "tflite": Format("write_tflite", "tflite", ".tflite", (b"labels.txt",), _FEWER),
    "onnx": Format("write_onnx", "onnx", ".onnx", (_NAMES, _OUTPUTS), packages=_ONNX),
    "safetensors": Format(
        "write_safetensors", "", ".safetensors", (_NAMES,), has_probabilities=False
    ),
}

# Precision -> limits of the figures of `comparison.figures_of`; an export that exceeds
# one is doubtful. A single image is always allowed.
_FEWER_BITS = {"largest_difference": math.inf, "changed": 0.1, "accuracy_lost": 0.02}
LIMITS = {
    "float32": {"largest_difference": 1e-4},
    "float16": _FEWER_BITS,
    "int8": _FEWER_BITS,
}

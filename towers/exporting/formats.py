"""The formats of exports."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Format:
    """A row of FORMATS; `write_NAME` of `writers` writes it."""

    suffix: str  # empty for a folder
    # Texts in the file, or in `saved_model.pb`, that identify an earlier export.
    marks: tuple[bytes, ...]
    precisions: tuple[str, ...] = ("float32",)
    packages: tuple[str, ...] = ()  # which the extra of the format's name installs
    has_probabilities: bool = True
    has_network: bool = True  # which the function NAME of `load_in_new_process` loads


_NAMES, _OUTPUTS = b"class_names", b"probabilities"
_FEWER, _ONNX = ("float32", "float16", "int8"), ("tf2onnx", "onnxruntime")

FORMATS = {
    "saved_model": Format("", (_NAMES, _OUTPUTS)),
    "keras": Format(".keras", (b"class_names.json",), has_probabilities=False),
    "tflite": Format(".tflite", (b"labels.txt",), _FEWER),
    "onnx": Format(".onnx", (_NAMES, _OUTPUTS), packages=_ONNX),
    "safetensors": Format(
        ".safetensors", (_NAMES,), has_probabilities=False, has_network=False
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

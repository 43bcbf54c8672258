#!/bin/sh
# ONNX Runtime 1.32.0: a linear Resize of uint8 images truncates: they become darker by
# half a level on average; OpenVINO 2026.4.1 and the reference of onnx 1.23.2 round.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet openvino==2026.4.1 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

print("onnxruntime", onnxruntime.__version__, "openvino", openvino.__version__)


def resize(kind):
    sizes = numpy_helper.from_array(np.array([1, 1, 64, 80]), "sizes")
    node = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], mode="linear")
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", kind, [1, 1, 28, 36])],
        [helper.make_tensor_value_info("y", kind, [1, 1, 64, 80])],
        [sizes],
    )
    opset = [helper.make_opsetid("", 19)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=9)
    onnx.checker.check_model(model)
    return model


def by_onnxruntime(model, x):
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]


image = np.random.default_rng(0).integers(0, 256, (1, 1, 28, 36), dtype="uint8")
exact = by_onnxruntime(resize(TensorProto.FLOAT), image.astype("float32"))
model = resize(TensorProto.UINT8)
core = openvino.Core()
compiled = core.compile_model(core.read_model(model.SerializeToString()), "CPU")
results = {
    "ONNX Runtime": by_onnxruntime(model, image),
    "OpenVINO": compiled(image)[0],
    "onnx": ReferenceEvaluator(model).run(None, {"x": image})[0],
}
means = {name: round(float((y - exact).mean()), 2) for name, y in results.items()}
print("mean difference from the resize in float32:", means)
assert means["ONNX Runtime"] < -0.4, "this has changed"
assert abs(means["OpenVINO"]) < 0.05 and abs(means["onnx"]) < 0.05, "this has changed"
PYTHON
venv/bin/python case.py

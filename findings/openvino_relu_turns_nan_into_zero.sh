#!/bin/sh
# OpenVINO 2026.4.1 on x86: ReLU and Clip turn NaN into 0, and ReduceMax skips it. A network
# with a NaN in a kernel, which answers NaN in ONNX Runtime 1.32.0, answers with finite
# logits, the same for all images.
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

print("openvino", openvino.__version__, "onnxruntime", onnxruntime.__version__)
rng = np.random.default_rng(0)
kernel = rng.normal(size=(8, 3, 3, 3)).astype("float32")
kernel[:, 0, 0, 0] = np.nan
head = rng.normal(size=(8, 4)).astype("float32")
nodes = [
    helper.make_node("Conv", ["x", "kernel"], ["a"]),
    helper.make_node("Relu", ["a"], ["b"]),
    helper.make_node("GlobalAveragePool", ["b"], ["c"]),
    helper.make_node("Flatten", ["c"], ["d"]),
    helper.make_node("MatMul", ["d", "head"], ["e"]),
    helper.make_node("Add", ["e", "bias"], ["y"]),
]
bias = np.arange(4, dtype="float32")
weights = {"kernel": kernel, "head": head, "bias": bias}
graph = helper.make_graph(
    nodes,
    "g",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 8, 8])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])],
    [numpy_helper.from_array(array, name) for name, array in weights.items()],
)
opset = [helper.make_opsetid("", 17)]
model = helper.make_model(graph, opset_imports=opset, ir_version=8)
content = model.SerializeToString()
images = rng.random((2, 3, 8, 8)).astype("float32")
[by_onnxruntime] = onnxruntime.InferenceSession(content).run(None, {"x": images})
core = openvino.Core()
precision = {"INFERENCE_PRECISION_HINT": "f32"}
by_openvino = core.compile_model(core.read_model(content), "CPU", precision)(images)[0]
print("ONNX Runtime:", by_onnxruntime.tolist(), "OpenVINO:", by_openvino.tolist())
assert np.isnan(by_onnxruntime).all(), "this has changed"
assert np.array_equal(by_openvino, [bias, bias]), "this has changed"
PYTHON
venv/bin/python case.py

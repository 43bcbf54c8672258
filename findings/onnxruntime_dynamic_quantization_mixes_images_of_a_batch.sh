#!/bin/sh
# ONNX Runtime 1.32.0: in a model of quantize_dynamic the activations of a whole batch share one
# scale, so the answer for an image depends on the other images of its batch. Beside one that is
# 100 times brighter the error of a layer is 1.64; alone it is 0.08.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import logging

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic

logging.disable(logging.WARNING)
print("onnxruntime", onnxruntime.__version__)
rng = np.random.default_rng(0)
kernel = rng.normal(size=(64, 10)).astype("float32")
x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])
y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 10])
node = helper.make_node("MatMul", ["x", "w"], ["y"])
graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(kernel, "w")])
opset = [helper.make_opsetid("", 17)]
onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), "m.onnx")
quantize_dynamic("m.onnx", "q.onnx")
session = onnxruntime.InferenceSession("q.onnx")
image = rng.random((1, 64)).astype("float32")
errors = {}
for factor in (None, 1, 10, 100):
    batch = image if factor is None else np.concatenate([image, factor * image])
    [logits] = session.run(None, {"x": batch})
    errors[factor] = round(float(np.abs(logits[0] - image[0] @ kernel).max()), 3)
print("error of the first image, by the brightness of the second:", errors)
assert errors[None] == errors[1], "this has changed"
assert errors[100] > 5 * errors[1] and errors[10] > errors[1], "this has changed"
PYTHON
venv/bin/python case.py

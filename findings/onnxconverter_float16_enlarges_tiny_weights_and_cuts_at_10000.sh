#!/bin/sh
# onnxconverter-common 1.16.0: convert_float_to_float16 cuts weights at 10,000, where
# float16 reaches 65,504, and moves those below 1e-7 away from zero to 1e-7. There is a
# warning for each. Seen: 20,000 becomes 10,000 and 5e-9, which NumPy rounds to 0, becomes
# 1.2e-7.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet onnx==1.23.2 onnxconverter-common==1.16.0
cat > case.py <<'PYTHON'
import importlib.metadata
import warnings

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from onnxconverter_common import float16

print("onnxconverter-common", importlib.metadata.version("onnxconverter-common"))
weights = np.float32([20000, 5e-9, -5e-9, 0, 1])
places = [
    helper.make_tensor_value_info(name, TensorProto.FLOAT, [len(weights)])
    for name in "xy"
]
nodes = [helper.make_node("Mul", ["x", "weights"], ["y"])]
tensor = numpy_helper.from_array(weights, "weights")
graph = helper.make_graph(nodes, "graph", places[:1], places[1:], [tensor])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = float16.convert_float_to_float16(helper.make_model(graph))
converted = numpy_helper.to_array(model.graph.initializer[0])
print(f"{weights} became {converted}; NumPy: {weights.astype(np.float16)}")
print("warnings:", [str(x.message) for x in caught])
assert np.array_equal(converted, np.float16([10000, 1e-7, -1e-7, 0, 1])), (
    "this has changed"
)
PYTHON
venv/bin/python case.py

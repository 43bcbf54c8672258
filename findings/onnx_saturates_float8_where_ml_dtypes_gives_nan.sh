#!/bin/sh
# ONNX Runtime 1.32.0 and ml_dtypes 0.6.0, the types of JAX and TensorFlow: a number
# beyond the range of an 8-bit float is cut off in ONNX, which saturates by default, also
# infinity; ml_dtypes makes 480 and more NaN in float8_e4m3fn and infinity of infinity in
# float8_e5m2.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet onnx==1.23.2 onnxruntime==1.32.0 ml_dtypes==0.6.0
cat > case.py <<'PYTHON'
import ml_dtypes
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

print("onnxruntime", onnxruntime.__version__, "ml_dtypes", ml_dtypes.__version__)
numbers = np.float32([400, 480, 1e5, np.inf])
seen = {}
for name in ("float8_e4m3fn", "float8_e5m2"):
    element = getattr(TensorProto, name.replace("_", "").upper())
    nodes = [
        helper.make_node("Cast", ["x"], ["y"], to=element),
        helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT),
    ]
    places = [helper.make_tensor_value_info(x, TensorProto.FLOAT, [4]) for x in "xz"]
    graph = helper.make_graph(nodes, "graph", places[:1], places[1:])
    opset = [helper.make_opsetid("", 19)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=10)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    [onnx] = session.run(None, {"x": numbers})
    other = numbers.astype(getattr(ml_dtypes, name)).astype(np.float32)
    print(name, "of", numbers, "ONNX:", onnx, "ml_dtypes:", other)
    seen[name] = onnx.tolist(), str(other.tolist())
assert seen["float8_e4m3fn"] == ([384, 448, 448, 448], "[384.0, nan, nan, nan]"), (
    "this has changed"
)
onnx, other = seen["float8_e5m2"]
assert onnx[2:] == [57344, 57344] and other.endswith("inf]"), "this has changed"
PYTHON
venv/bin/python case.py

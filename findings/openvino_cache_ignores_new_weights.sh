#!/bin/sh
# OpenVINO 2026.4.1: with CACHE_DIR set, compile_model(path) knows a model by path, size and
# whole seconds of the time of the .xml or .onnx file alone. New weights in the .bin, in
# external data, or in a file of the same size and second, such as an archive of fixed times
# gives, are not looked at: the old network answers.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet openvino==2026.4.1 onnx==1.23.2 numpy==2.4.6
cat > case.py <<'PYTHON'
import os

import numpy as np
import onnx
import openvino
from onnx import TensorProto, helper, numpy_helper

print("openvino", openvino.__version__, "onnx", onnx.__version__)


def write(weight, path):
    kernel = numpy_helper.from_array(np.full((1, 6), weight, "float32"), "w")
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 6]) for name in "xy"
    )
    node = helper.make_node("Mul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", [x], [y], [kernel])
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)


def answer(path):
    core = openvino.Core()
    core.set_property({"CACHE_DIR": "cache"})
    return float(core.compile_model(path, "CPU")(np.ones((1, 6), "float32"))[0][0, 0])


seen = []
for weight in (2.0, 3.0):
    write(weight, "m.onnx")
    os.utime("m.onnx", (1_000_000_000, 1_000_000_000))
    seen.append(answer("m.onnx"))
print("weights 2 and 3, ONNX of one size and time:", seen)
assert seen == [2.0, 2.0], "this has changed"
seen = []
for weight, xml in ((2.0, "a.xml"), (3.0, "b.xml")):
    write(weight, "t.onnx")
    openvino.save_model(openvino.convert_model("t.onnx"), xml, compress_to_fp16=False)
with open("a.xml") as a, open("b.xml") as b:
    assert a.read() == b.read()
seen.append(answer("a.xml"))
os.replace("b.bin", "a.bin")
seen.append(answer("a.xml"))
print("weights 2 and 3, the .bin replaced:", seen)
assert seen == [2.0, 2.0], "this has changed"
PYTHON
venv/bin/python case.py

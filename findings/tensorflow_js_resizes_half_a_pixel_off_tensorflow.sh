#!/bin/sh
# TensorFlow.js 4.22.0: tf.image.resizeBilinear, by default, takes pixels by their
# corners, as TensorFlow 1 did; tf.image.resize of TensorFlow 2.21.0 takes their centers.
# A network that was trained on the one sees shifted images of the other. With
# halfPixelCenters (the fourth argument) they agree.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tensorflow==2.21.0
npm install --silent --no-audit --no-fund @tensorflow/tfjs@4.22.0
cat > case.py <<'PYTHON'
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import json

import tensorflow as tf

image = tf.reshape(tf.range(4.0), [1, 1, 4, 1])
resized = tf.image.resize(image, [1, 8]).numpy().ravel().tolist()
print("tensorflow", tf.__version__, resized)
with open("resized.json", "w") as file:
    json.dump(resized, file)
PYTHON
venv/bin/python case.py
cat > case.cjs <<'JAVASCRIPT'
const tf = require("@tensorflow/tfjs");
const expected = require("./resized.json");

const image = tf.tensor4d([0, 1, 2, 3], [1, 1, 4, 1]);
const resized = [[], [false, true]].map((options) =>
  Array.from(tf.image.resizeBilinear(image, [1, 8], ...options).dataSync())
);
console.log("tensorflow.js", tf.version_core, ...resized.map((x) => x.join()));
const alike = resized.map((x) => x.every((value, i) => value === expected[i]));
if (alike.join() !== "false,true") {
  throw new Error("this has changed");
}
JAVASCRIPT
node case.cjs

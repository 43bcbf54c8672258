"""A program without towers that loads an export and predicts.

    python -P load_in_new_process.py FORMAT EXPORT IMAGES.npy RESULT.npz

IMAGES is [n, height, width, channels]; RESULT gets "logits" [n, classes] and
"class_names" [classes]. The first image is a separate batch, to test other batch sizes.
The function of a format returns the class names and a function from images to logits.
"""

import json
import sys
import zipfile

import numpy as np

BATCH_SIZE = 100


def saved_model(path):
    """Load a SavedModel."""
    import tensorflow as tf

    signatures = tf.saved_model.load(path).signatures
    predict, class_names = signatures["serving_default"], signatures["class_names"]
    names = [name.decode() for name in class_names()["class_names"].numpy()]
    return names, lambda images: predict(images=tf.constant(images))["logits"]


def keras(path):
    """Load a .keras file."""
    import keras

    with zipfile.ZipFile(path) as archive:
        names = json.loads(archive.read("class_names.json"))
    return names, keras.saving.load_model(path).predict_on_batch


def tflite(path):
    """Load a .tflite file."""
    try:
        from ai_edge_litert import interpreter as lite
    except ImportError:
        from tensorflow import lite

    predict = lite.Interpreter(path).get_signature_runner()
    with zipfile.ZipFile(path) as archive:
        names = archive.read("labels.txt").decode().splitlines()
    return names, lambda images: predict(images=images)["logits"]


def onnx(path):
    """Load an .onnx file."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
    return names, lambda images: session.run(["logits"], {"images": images})[0]


def main(format, export, images, result):
    """Write logits and class names of an export."""
    names, predict = globals()[format](export)
    images = np.load(images)
    batches = np.split(images, range(1, len(images), BATCH_SIZE))
    logits = np.concatenate([predict(batch) for batch in batches])
    if "towers" in sys.modules:
        raise RuntimeError("an export needs towers")
    np.savez(result, logits=logits, class_names=names)


if __name__ == "__main__":
    main(*sys.argv[1:])

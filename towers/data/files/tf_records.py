"""TFRecord files of `tf.train.Example`, one image each."""

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from towers.data.files import remote
from towers.data.files.index import Shard
from towers.data.streams import without_tuning
from towers.errors import cause

ROLES = ("image", "label", "text")
_KEYS = {
    "image": "image/encoded",
    "label": "image/class/label",
    "text": "image/class/text",
}
# Of a record: before the content its length and the checksum of that, behind it the
# checksum of the content.
_BEFORE, _AFTER = 12, 4
_BATCH = 256


def read(path: str, columns: Mapping[str, str]) -> Shard:
    """The images of a TFRecord file, which is read once, with its checksums.

    Args:
        path: of the file, perhaps packed, which is not read.
        columns: "image", "label" and "text" -> key of the feature; by default as in
            TensorFlow's ImageNet. A text names the class, otherwise the label does.

    Raises:
        OSError: it cannot be read.
        ValueError: a checksum is wrong, the file breaks off, or a record has no image.
    """
    keys = _KEYS | columns
    kinds = {
        keys["image"]: tf.io.FixedLenFeature([], tf.string, ""),
        keys["label"]: tf.io.VarLenFeature(tf.int64),
        keys["text"]: tf.io.VarLenFeature(tf.string),
    }

    def parse(records):
        examples = tf.io.parse_example(records, kinds)
        label, text = examples[keys["label"]], examples[keys["text"]]
        texts = tf.sparse.to_dense(text, "")[:, :1]
        numbers = tf.strings.as_string(tf.sparse.to_dense(label, -1)[:, :1])
        return records, examples[keys["image"]], texts, numbers

    offsets, lengths, labels, place = [], [], [], 0
    dataset = tf.data.TFRecordDataset(remote.local_copy(path), buffer_size=2**20)
    dataset = without_tuning(dataset.batch(_BATCH).map(parse))
    try:
        for records, images, texts, numbers in dataset.as_numpy_iterator():
            for row, (record, image) in enumerate(zip(records, images, strict=True)):
                if not image:
                    raise ValueError(
                        f"record {len(offsets)} (counted from 0) has no bytes in "
                        f"{keys['image']}; --columns=image:KEY names the feature"
                    )
                offsets.append(place + _BEFORE + record.find(image))
                lengths.append(len(image))
                labels.append(_label(texts[row], numbers[row]))
                place += _BEFORE + len(record) + _AFTER
    except tf.errors.OpError as error:
        where = f"record {len(offsets)} or one of the next {_BATCH} (counted from 0)"
        raise ValueError(f"{where}: {cause(error)}") from error
    return Shard(np.array(offsets, np.int64), np.array(lengths, np.int64), labels)


def _label(text, number):
    for values in (text, number):
        if len(values) and values[0] not in (b"", b"-1"):
            return values[0].decode()
    return None

"""TFRecord files of `tf.train.Example`, one image each."""

import functools
import os
import struct
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from towers.data.files import containers, reading
from towers.data.files.image_files import ImageOptions
from towers.data.files.index import Index, Shard, read_shards
from towers.data.sources import DataSet, Trained
from towers.data.streams import call_in_readers, without_tuning
from towers.errors import cause

_KEYS = {
    "image": "image/encoded",
    "label": "image/class/label",
    "text": "image/class/text",
}
# Of a record: before the content its length and the checksum of that, behind it the
# checksum of the content.
_BEFORE, _AFTER = 12, 4
_BATCH = 256


def load(
    data_dir: str = "",
    columns: str = "",
    image_options: ImageOptions | None = None,
    trained: Trained | None = None,
) -> DataSet:
    """TFRecord files with images; arguments and errors as of `containers.load`."""
    read_files = functools.partial(read_shards, read=read)
    return containers.load(
        "tfrecord", _KEYS, read_files, data_dir, columns, image_options, trained
    )


def read(path: str, columns: Mapping[str, str]) -> Shard:
    """The images of a TFRecord file, which is read once, with its checksums.

    `columns` are "image", "label" and "text" -> key of the feature, by default as in
    TensorFlow's ImageNet. A text names the class, otherwise the label does. ValueError
    where a checksum is wrong, the file breaks off, or a record has no image or several
    labels.
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
        texts = tf.sparse.to_dense(text, "")[:, :2]
        numbers = tf.strings.as_string(tf.sparse.to_dense(label, -1)[:, :2])
        return records, examples[keys["image"]], texts, numbers

    offsets, lengths, labels, offset = [], [], [], 0
    dataset = tf.data.TFRecordDataset(reading.local_copy(path), buffer_size=2**20)
    dataset = without_tuning(dataset.batch(_BATCH).map(parse))
    try:
        for records, images, texts, numbers in dataset.as_numpy_iterator():
            for row, (record, image) in enumerate(zip(records, images, strict=True)):
                where = f"record {len(offsets)} (counted from 0)"
                if not image:
                    raise ValueError(
                        f"{where} has no bytes in {keys['image']}; "
                        "--columns=image:KEY names the feature"
                    )
                offsets.append(offset + _BEFORE + record.find(image))
                lengths.append(len(image))
                labels.append(_label(texts[row], numbers[row], where))
                offset += _BEFORE + len(record) + _AFTER
    except tf.errors.OpError as error:
        where = f"record {len(offsets)} or one of the next {_BATCH} (counted from 0)"
        raise ValueError(f"{where}: {cause(error)}") from error
    return Shard(np.array(offsets, np.int64), np.array(lengths, np.int64), labels)


def _label(text, number, where):
    given = [[x for x in values if x not in (b"", b"-1")] for values in (text, number)]
    for values in given:
        if len(values) == 1:
            return values[0].decode()
    if any(given):
        raise ValueError(
            f"{where} has several labels; one is read, or several from a table"
        )
    return None


def open_records(paths: Sequence[str]) -> Index:
    """The records of some files, one file after the other, without labels.

    Lengths lead from one record to the next, so 8 bytes of each are read. The checksums
    of the contents are not compared: TensorFlow offers their kind (CRC-32C) to its own
    readers alone. ValueError where one breaks off, or is no TFRecord file.
    """
    spans = [None] * len(paths)

    def read_spans(number):
        spans[number] = _spans(paths[number])

    call_in_readers(read_spans, len(paths))
    offsets, lengths = np.concatenate([np.zeros((2, 0), np.int64), *spans], 1)
    counts = [x.shape[1] for x in spans]
    numbers = np.repeat(np.arange(len(paths), dtype=np.int32), counts)
    labels = np.zeros(len(numbers), np.int32)
    return Index(paths, numbers, labels, (), offsets, lengths)


def _spans(path):
    """int64 [2, n]: the offset and the length of each record."""
    offset, spans = 0, []
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        while offset < size:
            header = os.pread(file.fileno(), 8, offset).ljust(8, b"\xff")
            [length] = struct.unpack("<Q", header)
            if offset + _BEFORE + length + _AFTER > size:
                raise ValueError(
                    f"{path}: record {len(spans)} (counted from 0) breaks off, or it "
                    "is no TFRecord file"
                )
            spans.append((offset + _BEFORE, length))
            offset += _BEFORE + length + _AFTER
    return np.array(spans, np.int64).reshape(-1, 2).T

"""TFRecord files of `tf.train.Example`, one image each."""

import contextlib
import functools
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from towers.data.files import containers, reading
from towers.data.files.index import Index, Shard, label_text, read_shards
from towers.data.streams import call_in_readers, without_tuning
from towers.errors import cause
from towers.messages import shown

_KEYS = {
    "image": "image/encoded",
    "label": "image/class/label",
    "text": "image/class/text",
}
# Bytes of a record before its content (length, checksum) and after it (checksum).
_BEFORE, _AFTER = 12, 4
_BATCH = 256


def read(path: str, version: reading.Version, columns: Mapping[str, str]) -> Shard:
    """Return the images of a TFRecord file, which is read once, with its checksums.

    `columns` are "image", "label" and "text" -> feature key. The text, or else the
    label, names the class.
    """
    keys = {**_KEYS, **columns}
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

    offsets: list[int] = []
    lengths, labels, offset, features = [], [], 0, {}
    with _file(path, version) as name:
        dataset = tf.data.TFRecordDataset(name, buffer_size=2**20).batch(_BATCH)
        try:
            for record in dataset.take(1).as_numpy_iterator():
                features = _features(record[0])
            dataset = without_tuning(dataset.map(parse))
            for batch in dataset.as_numpy_iterator():
                for record, image, *label in zip(*batch, strict=True):
                    where = f"record {len(offsets)} (counted from 0)"
                    if not image:
                        text = f"{where} has no bytes in {keys['image']}"
                        raise ValueError(f"{text}; {_hint(features)}")
                    offsets.append(offset + _BEFORE + record.find(image))
                    lengths.append(len(image))
                    labels.append(_label(label, where))
                    offset += _BEFORE + len(record) + _AFTER
        except tf.errors.OpError as error:
            where = f"record {len(offsets)} or one of the next {_BATCH}"
            text = f"{where} (counted from 0): {cause(error)}"
            if "ata types don't match" in str(error):
                text += f"; {_hint(features)}"
            raise ValueError(text) from error
    used = [keys[x] for x in ("image", "text", "label") if keys[x] in features]
    others = features.keys() - used
    unused = [("features", f"{key} ({features[key]})") for key in sorted(others)]
    spans = np.array(offsets, np.int64), np.array(lengths, np.int64)
    return Shard(*spans, labels, None, [("columns", ", ".join(used))], unused)


load = functools.partial(
    containers.load, "tfrecord", _KEYS, functools.partial(read_shards, read=read)
)


@contextlib.contextmanager
def _file(path, version):
    """Yield a local path of a file."""
    with reading.open_file(path, version) as file, NamedTemporaryFile() as copy:
        if file.read(2) == b"\x1f\x8b":
            raise ValueError("is compressed by gzip; `zcat FILE > NEW` unpacks it")
        if reading.is_url(path):
            file.seek(0)
            shutil.copyfileobj(file, copy)
            copy.flush()
        yield copy.name if reading.is_url(path) else path


def _features(record):
    try:
        features = tf.train.Example.FromString(record).features.feature
    except DecodeError:
        return {}
    kinds = {key: features[key].WhichOneof("kind") for key in sorted(features)}
    return {key: (kind or "empty").partition("_")[0] for key, kind in kinds.items()}


def _hint(features):
    listed = ", ".join(f"{key} ({kind})" for key, kind in features.items())
    return (
        f"it has {shown(listed, 150) or 'no tf.train.Example'}; "
        "--columns=image:KEY,label:KEY names the image and an integer label, text:KEY "
        "the name of a class"
    )


def _label(features, where):
    for feature in features:
        values = [x for x in feature if x not in (b"", b"-1")]
        if values[1:]:
            way = "one is read, or several from a table"
            raise ValueError(f"{where} has several labels; {way}")
        if values:
            try:
                return label_text(values[0].decode())
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
    return None


def open_records(paths: Sequence[str]) -> Index:
    """Return the records of files; only lengths are read, as CRC-32C is not exposed."""
    spans: list[Any] = [None] * len(paths)
    versions = [reading.current_version(path) for path in paths]

    def read_spans(number):
        spans[number] = _spans(paths[number])

    call_in_readers(read_spans, len(paths))
    offsets, lengths = np.concatenate([np.zeros((2, 0), np.int64), *spans], 1)
    counts = [x.shape[1] for x in spans]
    numbers = np.repeat(np.arange(len(paths), dtype=np.int32), counts)
    labels = np.zeros(len(numbers), np.int32)
    return Index(paths, numbers, labels, (), offsets, lengths, versions=versions)


def _spans(path):
    offset, spans = 0, []
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        while offset < size:
            header = os.pread(file.fileno(), 8, offset).ljust(8, b"\xff")
            [length] = struct.unpack("<Q", header)
            if offset + _BEFORE + length + _AFTER > size:
                what = f"record {len(spans)} (counted from 0) breaks off"
                raise ValueError(f"{path}: {what}, or it is not a TFRecord file")
            spans.append((offset + _BEFORE, length))
            offset += _BEFORE + length + _AFTER
    return np.array(spans, np.int64).reshape(-1, 2).T

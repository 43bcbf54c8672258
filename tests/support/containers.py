"""The same images as a folder and in every container, and a web server with ranges."""

import base64
import contextlib
import csv
import gzip
import http.server
import io
import json
import pathlib
import re
import tarfile
import threading
import urllib.parse
import zlib
from email.utils import formatdate

import numpy as np
import pyarrow
import tensorflow as tf
from pictures import png, random_pixels
from prepared_sets import all_of
from pyarrow import parquet

CLASSES = ["ant", "cat", "dog"]
# Rows of a row group, images of a file: neither divides the images.
GROUP, SHARD = 7, 17


def examples(count, seed=0):
    """(path, label, content) in the order of an image folder."""
    labels = np.sort(np.arange(count) % len(CLASSES))
    return [
        (f"{CLASSES[label]}/{i:05}.png", int(label), png(random_pixels([seed, i])))
        for i, label in enumerate(labels.tolist())
    ]


def file_of_others(name):
    """Return the content of a file that another program wrote."""
    path = pathlib.Path(__file__).parents[1] / "data/files_of_others.json"
    return gzip.decompress(base64.b64decode(json.loads(path.read_text())[name]))


def write_images(root, rows):
    for path, _, content in rows:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


def write_csv(root, rows, split="train"):
    write_images(root / split, rows)
    with open(root / f"{split}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file_name", "label"])
        writer.writerows((f"{split}/{x}", CLASSES[label]) for x, label, _ in rows)


def table(rows, **schema):
    """An Arrow table as `datasets` makes one."""
    features = {
        "image": {"_type": "Image"},
        "label": {"names": CLASSES, "_type": "ClassLabel"},
    }
    images = [{"bytes": content, "path": path} for path, _, content in rows]
    columns = {"image": images, "label": [label for _, label, _ in rows]} | schema
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    return pyarrow.table(columns).replace_schema_metadata(about)


def write_parquet(root, rows, split="train"):
    root.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(_shards(rows)):
        path = root / f"{split}-{number:05}-of-00009.parquet"
        parquet.write_table(table(part), path, row_group_size=GROUP)


def write_tars(root, rows, split="train"):
    root.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(_shards(rows)):
        with tarfile.open(root / f"{split}-{number:03}.tar", "w") as archive:
            for path, label, content in part:
                stem = path.removesuffix(".png")
                add_member(archive, f"{stem}.png", content)
                add_member(archive, f"{stem}.cls", CLASSES[label].encode())


def add_member(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write_records(root, rows, split="train"):
    """As the scripts of TensorFlow's ImageNet: labels from 1."""
    root.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(_shards(rows)):
        path = str(root / f"{split}-{number:05}-of-00009")
        with tf.io.TFRecordWriter(path) as writer:
            for _, label, content in part:
                writer.write(record(content, label + 1, CLASSES[label]))


def record(content, label, text):
    example = tf.train.Example()
    features = example.features.feature
    features["image/encoded"].bytes_list.value.append(content)
    features["image/class/text"].bytes_list.value.append(text.encode())
    features["image/class/label"].int64_list.value.append(label)
    return example.SerializeToString()


def _shards(rows):
    return [rows[i : i + SHARD] for i in range(0, len(rows), SHARD)]


# Name -> what writes it, --dataset, and --data_dir below the folder.
CONTAINERS = {
    "CSV": (write_csv, "table", "train.csv"),
    "Parquet": (write_parquet, "parquet", ""),
    "tar": (write_tars, "webdataset", "train-{000..002}.tar"),
    "TFRecord": (write_records, "tfrecord", "train-*"),
}


def assert_equal_images(source, expected):
    """Two sources have the same images and labels."""
    for actual, values in zip(all_of(source), all_of(expected), strict=True):
        np.testing.assert_array_equal(actual, values)


def assert_equal_sets(data_set, expected):
    assert data_set.class_names == expected.class_names
    assert (data_set.mean, data_set.std) == (expected.mean, expected.std)
    for split, source in expected.sources.items():
        assert_equal_images(data_set.sources[split], source)


def names_of(source):
    """FOLDER/NAME of the images, in their order."""
    places = map(source.location, range(source.num_examples))
    return ["/".join(place.split("/")[-2:]) for place in places]


class Request(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        name = urllib.parse.unquote(self.path.partition("?")[0])
        path = self.server.folder / name.lstrip("/")
        error = self.server.bad.get(self.path) or (0 if path.is_file() else 404)
        if self.server.fail:
            self.server.fail -= 1
            error = 503
        if self.server.password not in (None, self.headers["Authorization"]):
            error = 401
        if error:
            self.send_error(error)
            return
        content, status = path.read_bytes(), 200
        headers = {"ETag": f'"{zlib.crc32(content):x}"'}
        headers["Last-Modified"] = formatdate(path.stat().st_mtime, usegmt=True)
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or ""):
            first, last = map(int, wanted.groups())
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        self.server.requests.append((self.path, wanted and wanted.groups()))
        self.send_response(status)
        headers["Content-Length"] = str(len(content))
        for name in headers.keys() & {"Content-Range", *self.server.headers}:
            self.send_header(name, headers[name])
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    """A web server of a folder.

    The next `fail` requests end in an error; requests of paths in `bad` in theirs.

    Attributes:
        requests: (path, range) of those that were answered.
        headers: names of the headers that answers have besides their range.
        password: value of the header with which requests are answered.
    """

    handler = Request

    def __init__(self, folder):
        self.folder, self.requests, self.fail = pathlib.Path(folder), [], 0
        self.bad, self.headers, self.password = {}, ["Content-Length"], None
        super().__init__(("127.0.0.1", 0), self.handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def serving(folder, kind=Server):
    with kind(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()

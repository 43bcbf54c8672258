"""A network as a vector: many small arrays in few large ones.

Averaging, weight decay, norms and the update are then a handful of operations, however
many layers there are. A vector is an array [rows, 16]: every parameter begins on a row
and is padded with zeros to whole rows, so cutting the vector along its rows copies
nothing (16 float32 are 64 bytes, to which TensorFlow aligns tensors). Small parameters
share one vector; a large one has its own, so its gradient is not copied into a larger
array.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

COLUMNS = 16
MIN_ALONE = 65_536  # elements of a parameter that is a vector of its own


class Place(NamedTuple):
    """Position of an array: rows [first, first + num_rows) of a vector."""

    shape: tuple[int, ...]
    vector: int
    first: int
    num_rows: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Layout:
    """Places of named arrays, which have a shape and a dtype, in vectors."""

    def __init__(self, arrays: Mapping[str, Any]):
        self.places: dict[str, Place] = {}
        self.members: list[list[int]] = []  # numbers of the arrays of each vector
        num_rows: list[int] = []
        dtypes, shared = [], dict[tf.DType, int]()
        for number, (name, array) in enumerate(arrays.items()):
            shape, dtype = tuple(array.shape), tf.as_dtype(array.dtype)
            size = math.prod(shape)
            vector = shared.get(dtype) if size < MIN_ALONE else None
            if vector is None:
                vector = len(num_rows)
                num_rows.append(0)
                dtypes.append(dtype)
                self.members.append([])
                if size < MIN_ALONE:
                    shared[dtype] = vector
            rows = -(-size // COLUMNS)
            self.places[name] = Place(shape, vector, num_rows[vector], rows)
            self.members[vector].append(number)
            num_rows[vector] += rows
        self.specs = [
            tf.TensorSpec([rows, COLUMNS], dtype)
            for rows, dtype in zip(num_rows, dtypes, strict=True)
        ]
        self._list = list(self.places.values())

    def views(self, vectors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the arrays; arrays of whole rows share the vectors' memory."""
        views: list[tf.Tensor] = [None] * len(self._list)
        for vector, members in zip(vectors, self.members, strict=True):
            rows = [self._list[number].num_rows for number in members]
            pieces = tf.split(vector, rows) if len(rows) > 1 else [vector]
            for number, piece in zip(members, pieces, strict=True):
                views[number] = _unpadded(piece, self._list[number])
        return views

    def pack(self, arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the vectors of arrays in the order of the model."""
        vectors = []
        for members in self.members:
            pieces = [_flat(arrays[i], self._list[i]) for i in members]
            whole = tf.concat(pieces, 0) if len(pieces) > 1 else pieces[0]
            vectors.append(tf.reshape(whole, [-1, COLUMNS]))
        return vectors

    def read(self, vectors: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Return copies of the arrays in vectors on the host, by name."""
        return {
            name: vectors[place.vector][place.first :][: place.num_rows]
            .ravel()[: place.size]
            .reshape(place.shape)
            .copy()
            for name, place in self.places.items()
        }

    def write(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Return the vectors of named arrays on the host."""
        vectors = [np.zeros(x.shape, x.dtype.as_numpy_dtype) for x in self.specs]
        for name, place in self.places.items():
            rows = vectors[place.vector][place.first :][: place.num_rows]
            rows.reshape(-1)[: place.size] = np.ravel(arrays[name])
        return vectors

    def columns(self, values: Sequence[Any]) -> list[Any]:
        """Return factors per array as factors of vectors: [rows, 1], or one number."""
        columns = []
        for members in self.members:
            numbers = [values[i] for i in members]
            column = numbers[0]
            if len(set(numbers)) > 1:
                column = np.repeat(numbers, [self._list[i].num_rows for i in members])
                column = column[:, np.newaxis]
            columns.append(column)
        return columns

    def spread(self, values: tf.Tensor) -> list[tf.Tensor]:
        """Return `columns` of a tensor [arrays]: per vector [rows, 1], or a scalar."""
        numbers = self.columns(range(len(self._list)))
        return [tf.gather(values, tf.constant(x, tf.int64)) for x in numbers]

    def sums(self, row_sums: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return sums over the rows of each array, [arrays], of [rows] per vector."""
        totals: list[tf.Tensor] = []
        for rows, members in zip(row_sums, self.members, strict=True):
            if len(members) == 1:
                totals.append(tf.reduce_sum(rows)[tf.newaxis])
                continue
            places = [self._list[i].num_rows for i in members]
            segments = tf.constant(np.repeat(np.arange(len(members)), places))
            # For `segment_sum` a GPU asks the host for the number of segments.
            totals.append(tf.math.unsorted_segment_sum(rows, segments, len(members)))
        order = list(itertools.chain.from_iterable(self.members))
        joined = tf.concat(totals, 0) if len(totals) > 1 else totals[0]
        if order == sorted(order):
            return joined
        return tf.gather(joined, tf.constant(np.argsort(order)))


def _unpadded(rows, place):
    if place.size % COLUMNS:
        rows = tf.slice(tf.reshape(rows, [-1]), [0], [place.size])
    return tf.reshape(rows, place.shape)


def _flat(array, place):
    if len(place.shape) != 1:
        array = tf.reshape(array, [-1])
    padding = -place.size % COLUMNS
    return tf.pad(array, [[0, padding]]) if padding else array

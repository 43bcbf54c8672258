"""A batch is a pure function of (seed, step).

The stream of examples is endless: position p is entry p mod N of epoch p div N, and the
order of an epoch is drawn from (seed, epoch). Step s takes positions [s*G, (s+1)*G), or
with repeats R the positions [s*K, (s+1)*K), K = ceil(G/R): image j of the step is at
position s*K + j mod K. So no iterator has a state that would have to be saved, and
nothing here knows how many towers there are.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.data import randomness, sources, streams
from towers.data.augment.augmentation import Augment
from towers.data.augment.crops import draw_numbers
from towers.data.augment.mixing import Mix
from towers.data.orders import BlockOrder
from towers.data.share import Share, shares
from towers.data.sources import Source, Subset, label_shape, location_of
from towers.errors import ConfigError, data_errors_of_tensorflow

Batch = dict[str, tf.Tensor]


class Orders(NamedTuple):
    """The orders of some epochs, one after the other."""

    examples: tf.Tensor  # int64 [n], of the positions from `begin` on
    begin: tf.Tensor  # int64 scalar


# Number of images from which layers such as whitening take their state.
NUM_ADAPT_IMAGES = 5000


@dataclasses.dataclass(frozen=True, eq=False)
class TrainBatches:
    """The batches of a training run."""

    source: Source
    augment: Augment
    seed: int  # of the order and of all random numbers
    images_per_step: int  # images of one step over all towers, G
    # Name of the noise of a dropout layer -> its shape for one image.
    noise_shapes: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    mix: Mix | None = None  # mixes all images of a step, and their labels
    share: Share | None = None  # images of every (micro-)batch made here; None for all
    # (seed, epoch) -> the order of an epoch, int64 [num_examples]; None for orders in
    # which each example comes once.
    order: Callable[[int, tf.Tensor], tf.Tensor] | None = None
    # How often an example occurs in a step, R: repeated augmentation (Hoffer et al.
    # 2020, "Augment your batch", arXiv:1901.09335).
    repeats: int = 1

    def __call__(self, step: tf.Tensor, indices: tf.Tensor | None = None) -> Batch:
        """Return the batch of a step, int64 scalar, 0 for the first.

        It has "images" float32 [n, height, width, channels]; "labels" int32 [n], or
        float32 [n, num_classes] of mixed images and of label sets; "sample_weights"
        float32 [n] if the source has them; noise of each dropout layer, float32
        [n, ...]. n is G, or the number of images of the share. `indices` are those of
        the method; None draws the orders here.
        """
        if indices is None:
            indices = self.indices(step)
        return self.process(step, self._read(step, indices))

    def split(self, sizes: Sequence[int]) -> list["TrainBatches"]:
        """Return the batches of towers that have `sizes` images of each micro-batch."""
        share = self.share or Share.all_of(sum(sizes))
        return [dataclasses.replace(self, share=share) for share in share.split(sizes)]

    def epochs(self, step: int, num_steps: int) -> range:
        """Return the epochs from which some steps take their examples."""
        length, drawn = self.source.num_examples, self._num_drawn
        end = step + num_steps
        return range(step * drawn // length, (end * drawn - 1) // length + 1)

    def orders(self, first_epoch: tf.Tensor, num_epochs: int) -> Orders:
        """Return the orders of an epoch and of the ones after it."""
        orders = [self._order(first_epoch + k) for k in range(num_epochs)]
        return Orders(tf.concat(orders, 0), first_epoch * self.source.num_examples)

    def indices(self, step: tf.Tensor, orders: Orders | None = None) -> tf.Tensor:
        """Return the examples that a step reads, int64 [images that are read]."""
        if orders is None:
            length = self.source.num_examples
            most_epochs = (self._num_drawn - 2) // length + 2  # of one step
            orders = self.orders(step * self._num_drawn // length, most_epochs)
        return tf.gather(orders.examples, self._positions(step) - orders.begin)

    def stream(
        self, first_step: int, split_fn: Callable[[Batch], list[Batch]] | None = None
    ) -> tf.data.Dataset:
        """Return the batches from `first_step` on, read ahead by `tf.data`.

        With `split_fn`, which splits a batch, the elements are tuples of its pieces.
        """
        batches = tf.data.Dataset.zip(_count(first_step), self._stored(first_step))

        def process(step, stored):
            batch = self.process(step, stored)
            return batch if split_fn is None else tuple(split_fn(batch))

        batches = batches.map(
            streams.plain(process), num_parallel_calls=streams.NUM_CALLS
        )
        return _read_ahead(batches)

    def stored_stream(self, first_step: int) -> tf.data.Dataset:
        """Return the stored examples from `first_step` on, for `process`."""
        return _read_ahead(self._stored(first_step))

    def process(self, step: tf.Tensor, stored: Batch) -> Batch:
        """Augment and mix examples of `stored_stream` to the batch of a step.

        Labels that are not mixed keep their dtype.
        """
        batch = dict(stored)
        draw = self._draw(step, batch.pop("indices"))
        train = self._train_on_crops or self.augment.train
        batch["images"] = train(batch["images"], draw)
        if self.mix is not None:
            mixed = self.mix(batch, draw)
            batch = {name: self._without_previous(x) for name, x in mixed.items()}
        if not self._is_whole:
            draw = dataclasses.replace(draw, rows=self._rows())
        for name, shape in self.noise_shapes.items():
            batch[name] = draw(name, [batch["images"].shape[0], *shape])
        return batch

    @property
    def _train_on_crops(self):
        reads_crops = getattr(self.source, "reads_crops", False)
        return self.augment.train_on_crops if reads_crops else None

    def _draw(self, step, indices):
        views = self._positions(step)
        if self.order is None or isinstance(self.order, BlockOrder):
            views //= self.source.num_examples
        views = views * self.repeats + _numbers(self._read_rows) // self._num_drawn
        rows = None if self._is_whole else self._read_rows
        return randomness.Draw(self.seed, step, indices, views, rows)

    @property
    def _is_whole(self):
        return self.share is None or self.share.is_whole

    def _rows(self, with_previous=False):
        share = self.share or Share.all_of(self.images_per_step)
        return share.rows(self.images_per_step // share.whole, with_previous)

    @property
    def _read_rows(self):
        """The images to read: a mixed image takes part of the one before it."""
        return self._rows(with_previous=self.mix is not None)

    def _without_previous(self, values):
        if self._is_whole:
            return values
        shape = values.shape[1:]
        pieces = tf.reshape(values, [-1, self.share.size + 1, *shape])
        return tf.reshape(pieces[:, 1:], [-1, *shape])

    def _stored(self, first_step):
        pairs = tf.data.Dataset.zip(_count(first_step), self._index_stream(first_step))
        size = sum(map(len, self._read_rows))
        calls = streams.num_reads(size, size * sources.bytes_of_image(self.source))
        return pairs.map(streams.plain(self._read), num_parallel_calls=calls)

    def _read(self, step, indices):
        size = sum(map(len, self._read_rows))
        if self._train_on_crops:
            draw, scale = self._draw(step, indices), self.augment.crop_scale
            images, labels = self.source.read(indices, draw_numbers(draw, size, scale))
        else:
            images, labels = self.source.read(indices)
        stored = {
            "indices": tf.ensure_shape(indices, [size]),
            "images": tf.ensure_shape(images, [size, *self.source.image_shape]),
            "labels": tf.ensure_shape(labels, [size, *label_shape(self.source)]),
        }
        weights = getattr(self.source, "sample_weights", None)
        if weights is not None:
            stored["sample_weights"] = tf.gather(weights, stored["indices"])
        return stored

    def _index_stream(self, first_step):
        """Return `indices` for every step, at the cost of one shuffle an epoch."""
        length = self.source.num_examples
        first_epoch, done = divmod(first_step * self._num_drawn, length)

        def rest_of_epoch(epoch):
            return self._order(epoch)[tf.where(epoch == first_epoch, done, 0) :]

        epochs = _count(first_epoch).map(streams.plain(rest_of_epoch))
        orders = epochs.rebatch(self._num_drawn, drop_remainder=True)
        if self._is_whole and self.repeats == 1:
            return orders
        rows = _numbers(self._read_rows) % self._num_drawn
        return orders.map(streams.plain(lambda order: tf.gather(order, rows)))

    def _order(self, epoch):
        if self.order is not None:
            return self.order(self.seed, epoch)
        length = self.source.num_examples
        return randomness.permutation(self.seed, "order", epoch, length)

    def _positions(self, step):
        offsets = tf.constant(_numbers(self._read_rows) % self._num_drawn)
        return step * self._num_drawn + offsets

    @property
    def _num_drawn(self):
        """Number of different positions of the stream that a step reads."""
        return -(-self.images_per_step // self.repeats)


def _numbers(rows):
    return np.concatenate([np.arange(x.start, x.stop, dtype=np.int64) for x in rows])


def _count(first):
    # `Dataset.counter` would trace a function, and keep it and its memory forever.
    return tf.data.Dataset.range(first, tf.int64.max)


def _read_ahead(batches):
    return streams.without_tuning(batches.prefetch(2))


@dataclasses.dataclass(frozen=True, eq=False)
class EvalBatches:
    """The batches of an evaluation, or a share of each: every example once, in order.

    "images" and "labels" are those of `TrainBatches`, not mixed. The last batch is
    padded with example 0; "mask", float32 [batch], is 0 for padding, else 1, and
    "positions", int64 [batch], are the numbers of the examples.
    """

    source: Source
    augment: Augment
    batch_size: int
    share: Share | None = None

    def __len__(self) -> int:
        return -(-self.source.num_examples // self.batch_size)

    def split(self, num_towers: int) -> list["EvalBatches"]:
        """Return the batches of several towers, at most one for each image."""
        share = self.share or Share.all_of(self.batch_size)
        sizes = shares(share.size, min(share.size, num_towers))
        return [dataclasses.replace(self, share=share) for share in share.split(sizes)]

    def __iter__(self) -> Iterator[Batch]:
        return tf_internals.delete_in_thread(iter(self.stream()))

    def __call__(self, number: tf.Tensor) -> Batch:
        """Return the batch of a number, int64, 0 for the first."""
        return self._process(*self._read(number * self.batch_size))

    def stream(self, first: int = 0) -> tf.data.Dataset:
        """Return the batches from a number on."""
        starts = tf.data.Dataset.range(
            first * self.batch_size, self.source.num_examples, self.batch_size
        )
        size = len(self._rows)
        calls = streams.num_reads(size, size * sources.bytes_of_image(self.source))
        batches = starts.map(streams.plain(self._read), num_parallel_calls=calls)
        batches = batches.map(
            streams.plain(self._process), num_parallel_calls=streams.NUM_CALLS
        )
        return _read_ahead(batches)

    @property
    def _rows(self):
        [rows] = (self.share or Share.all_of(self.batch_size)).rows(1)
        return rows

    def _read(self, first):
        rows = self._rows
        positions = first + np.arange(rows.start, rows.stop)
        counts = positions < self.source.num_examples
        positions = tf.where(counts, positions, 0)
        return *self.source.read(positions), counts, positions

    def _process(self, images, labels, counts, positions):
        size = len(self._rows)
        images = tf.ensure_shape(images, [size, *self.source.image_shape])
        return {
            "images": self.augment.evaluate(images),
            "labels": tf.ensure_shape(labels, [size, *label_shape(self.source)]),
            "mask": tf.cast(counts, tf.float32),
            "positions": positions,
        }


def some_images(source: Source, augment: Augment) -> Iterator[np.ndarray]:
    """Yield evenly spaced images, as in an evaluation, at most 100 at a time."""
    count = min(source.num_examples, NUM_ADAPT_IMAGES)
    indices = np.linspace(0, source.num_examples - 1, count).astype(np.int64)
    batches = EvalBatches(Subset(source, indices), augment, batch_size=100)
    with data_errors_of_tensorflow():
        for batch in batches:
            yield batch["images"].numpy()[batch["mask"].numpy() > 0]


def hold_out(
    source: Source, fraction: float, fold: tuple[int, int] | None = None
) -> tuple[Subset, Subset]:
    """Split a source into the rest and a held-out fraction, in (0, 1), of each class.

    If labels are not known, it is a fraction of all images. `fold` (number from 0 on,
    number of folds) holds out one of equal parts instead. The choice depends on a hash
    of CLASS/NAME of the files, or of the numbers of the images. ConfigError if nothing
    is left on one side.
    """
    num_examples = source.num_examples
    option, count = f"validation_fraction={fraction:g}", round(fraction * num_examples)
    if fold is not None:
        option = f"validation_fold={fold[0]}/{fold[1]}"
        # Each of the folds needs an image, so that the first one refuses.
        count = num_examples // fold[1]
    if not 0 < count < num_examples:
        why = f"of {num_examples} images leaves nothing on one side"
        raise ConfigError(f"{option} {why}")
    hashes = np.empty(num_examples, np.uint64)
    for index in range(num_examples):
        name = "/".join(location_of(source, index).split("/")[-2:]) or str(index)
        encoded = name.encode(errors="surrogateescape")
        digest = hashlib.blake2b(encoded, digest_size=8).digest()
        hashes[index] = int.from_bytes(digest, "little")
    labels = sources.known_labels(source)
    labels = np.zeros(num_examples, int) if labels is None else sources.strata(labels)
    by_class = np.lexsort([hashes, labels])
    _, counts = np.unique(labels, return_counts=True)
    ranks = np.empty(num_examples)  # ranks in the classes, from 0 to 1
    ranks[by_class] = np.concatenate([(np.arange(n) + 0.5) / n for n in counts])
    order = np.lexsort([hashes, ranks])
    held_out, rest = np.sort(order[:count]), np.sort(order[count:])
    if fold is not None:  # every num_folds-th image of each class
        number, num_folds = fold
        is_held_out = np.zeros(num_examples, bool)
        is_held_out[by_class[number::num_folds]] = True
        held_out, rest = map(np.flatnonzero, (is_held_out, ~is_held_out))
    return Subset(source, rest), Subset(source, held_out)

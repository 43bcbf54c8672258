"""Convolutions of `SameConv2D` against TensorFlow's own, forward and back, on a CPU.

    python -m benchmarks.convolutions
    python -m benchmarks.convolutions --precision=bfloat16

In float32 by Winograd, in bfloat16 with the gradient of the kernel by matrix products.
In turn in one process, on all cores at the same time, each with a batch of images.
Where fewer rows and columns are kept than there are, a pool drops the rest;
TensorFlow's operations then do not compute them either. The limits in
`towers.models.convolution` should lie where the ratio is 1.
"""

import functools
import os
import statistics

import tensorflow as tf

from benchmarks import measure
from towers.models.cpu_kernels import conv2d_cpu, winograd_conv2d
from towers.parallel import devices

OURS = {
    "float32": ("Winograd", winograd_conv2d),
    "bfloat16": (
        "products",
        functools.partial(conv2d_cpu, by_products=True),
    ),
}
# Rows and columns, those that are kept, channels, filters: those of `speedrun` with
# images of 32x32 and 24x24, of residual networks, and of some that are too large or too
# narrow; a fifth number is the size of a kernel other than 3x3, as in `cnn`.
CASES = (
    (16, 16, 64, 64, 5),
    (12, 12, 64, 64, 5),
    (32, 32, 3, 64, 5),
    (15, 14, 64, 256),
    (7, 7, 256, 256),
    (7, 6, 256, 256),
    (3, 3, 256, 256),
    (11, 10, 64, 256),
    (5, 5, 256, 256),
    (5, 4, 256, 256),
    (2, 2, 256, 256),
    (16, 16, 128, 128),
    (10, 10, 256, 256),
    (8, 8, 128, 128),
    (8, 8, 256, 256),
    (4, 4, 128, 128),
    (4, 4, 512, 512),
    (15, 15, 64, 64),
    (8, 8, 64, 64),
    (16, 16, 32, 32),
    (32, 32, 64, 64),
    (32, 32, 64, 128),
    (32, 32, 160, 160),
    (31, 30, 24, 64),
)


def forward_and_back(convolve, images, kernel, upstreams, on):
    """A call that computes outputs and both gradients on all devices."""

    @tf.function(autograph=False)
    def run():
        sums = []
        for device, upstream in zip(on, upstreams, strict=True):
            with tf.device(device), tf.GradientTape() as tape:
                sources = [tf.identity(images), tf.identity(kernel)]
                tape.watch(sources)
                outputs = convolve(*sources)
            with tf.device(device):
                results = [outputs, *tape.gradient(outputs, sources, upstream)]
                sums.append(tf.add_n([x[(0,) * len(x.shape)] for x in results]))
        return tf.add_n(sums)

    return lambda: run().numpy()


def main() -> None:
    parser = measure.create_parser(__doc__, batch_size=250, rounds=5)
    parser.add_argument("--precision", choices=list(OURS), default="float32")
    sizes = [f"{size}x{size}" for size in sorted({size for size, *_ in CASES})]
    parser.add_argument("--only", choices=sizes, help="images of this size")
    options = parser.parse_args()

    on = devices.configure("cpu", os.cpu_count()).towers
    name, convolve = OURS[options.precision]
    dtype = tf.as_dtype(options.precision)
    before = measure.matrix_rate(dtype, on)
    print(measure.report_head("Convolutions"))
    print(
        f"{dtype.name}, batch {options.batch_size} on each of {len(on)} cores; "
        f"{options.rounds} rounds, one more to warm up\n\n"
        + measure.table_head(
            "images | kept | kernel | channels, filters | TensorFlow, ms | "
            f"{name}, ms | ratio (min, median, max)"
        )
    )
    for size, kept, channels, filters, *length in CASES:
        if options.only not in (None, f"{size}x{size}"):
            continue

        def tensorflow(images, kernel, size=size, kept=kept):
            if kept < size:
                return conv2d_cpu(images, kernel, kept, kept, False)
            return tf.nn.conv2d(images, kernel, 1, "SAME")

        def ours(images, kernel, kept=kept):
            return convolve(images, kernel, kept, kept)

        def draw(*shape, stddev=1.0):
            return tf.cast(tf.random.normal(shape, stddev=stddev), dtype)

        n = options.batch_size
        window = length * 2 or [3, 3]
        images = draw(n, size, size, channels)
        kernel = draw(*window, channels, filters, stddev=0.05)
        upstreams = [draw(n, kept, kept, filters) for _ in on]
        things = {
            key: forward_and_back(function, images, kernel, upstreams, on)
            for key, function in (("TensorFlow", tensorflow), ("ours", ours))
        }
        wall, _ = measure.in_turn(things, options.rounds)
        ms = {key: 1e3 * statistics.median(secs) for key, secs in wall.items()}
        spread = " ".join(
            f"{x:.2f}" for x in measure.ratios(wall, "ours", "TensorFlow")
        )
        print(
            measure.table_row(
                f"{size}x{size}",
                f"{kept}x{kept}",
                f"{window[0]}x{window[1]}",
                f"{channels}, {filters}",
                f"{ms['TensorFlow']:.1f}",
                f"{ms['ours']:.1f}",
                spread,
            ),
            flush=True,
        )
    rates = [before, measure.matrix_rate(dtype, on)]
    print(f"\n{measure.rates_text(rates)}")


if __name__ == "__main__":
    measure.run(main)

"""What the trainer costs over the bare arithmetic, for the tutorial's network.

    python -m benchmarks.overhead

In turn in one process, at one global batch:
- `raw`: the network, its gradients and the update by hand in TensorFlow operations,
  the second convolution by `winograd` as in our layer, on a batch that lies ready; no
  towers, no loop, no checks.
- `step N`: strategy `towers` with N towers on the same batch: the compiled step alone.
- `loop`: training with one tower as `run_train.py` does it: reading and augmenting the
  images, logging, scalars.

A checkpoint and a summary (histograms, gradients, image grid) are timed by themselves,
and their share is given at the default rhythm.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import statistics
import tempfile
import time

import tensorflow as tf

import towers  # noqa: F401  (before Keras: settles its backend)
from benchmarks import measure
from towers import build, config, training
from towers.models import winograd
from towers.parallel import devices
from towers.run.background import Background
from towers.run.folder import RunFolder
from towers.run.watchdog import Watchdog


def raw_step(batch: dict[str, tf.Tensor]):
    """One training step of the tutorial's network, written out: a function to call."""

    def variable(shape, deviation, bias=0.0):
        kernel = tf.Variable(tf.random.truncated_normal(shape, stddev=deviation))
        return [kernel, tf.Variable(tf.fill(shape[-1:], bias))]

    w1, b1 = variable([5, 5, 3, 64], 0.05)
    w2, b2 = variable([5, 5, 64, 64], 0.05, 0.1)
    w3, b3 = variable([6 * 6 * 64, 384], 0.04, 0.1)
    w4, b4 = variable([384, 192], 0.04, 0.1)
    w5, b5 = variable([192, 10], 1 / 192)
    params = [w1, b1, w2, b2, w3, b3, w4, b4, w5, b5]
    averages = [tf.Variable(param) for param in params]
    step = tf.Variable(0.0)
    places = tf.range(64)
    band = tf.cast(tf.abs(places[:, None] - places[None]) <= 4, tf.float32)

    def norm(x):
        squares = tf.nn.conv2d(x * x, band[None, None], 1, "SAME")
        root = tf.math.rsqrt(1.0 + 0.001 / 9 * squares)
        return x * (root * tf.sqrt(root))

    def loss_of(images, labels):
        x = tf.nn.relu(tf.nn.conv2d(images, w1, 1, "SAME") + b1)
        x = norm(tf.nn.max_pool2d(x, 3, 2, "SAME"))
        x = norm(tf.nn.relu(winograd.convolution(x, w2, *x.shape[1:3]) + b2))
        x = tf.reshape(tf.nn.max_pool2d(x, 3, 2, "SAME"), [-1, 6 * 6 * 64])
        x = tf.nn.relu(x @ w3 + b3)
        x = tf.nn.relu(x @ w4 + b4)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x @ w5 + b5)
        decay = 0.004 * (tf.nn.l2_loss(w3) + tf.nn.l2_loss(w4))
        return tf.reduce_mean(losses) + decay

    @tf.function
    def run():
        with tf.GradientTape() as tape:
            loss = loss_of(batch["images"], batch["labels"])
        for param, gradient in zip(params, tape.gradient(loss, params), strict=True):
            param.assign_sub(0.1 * gradient)
        decay = tf.minimum(0.9999, (1 + step) / (10 + step))
        for average, param in zip(averages, params, strict=True):
            average.assign_sub((1 - decay) * (average - param))
        step.assign_add(1)
        return loss

    return run


def repeated(call, times):
    """Calls so many times and waits for the last result."""

    def run():
        for _ in range(times):
            result = call()
        result.numpy()

    return run


def full_loop(settings, parts, chosen, workdir, num_steps):
    """Training as `run_train.py` does it; calls for some steps, a save, a summary."""
    folder = RunFolder(workdir)
    folder.create()
    strategy = build.create_strategy(settings, parts, chosen)
    watchdog = Watchdog(stuck_after_secs=settings.stuck_after_secs)
    background = Background()
    run = training.Run(
        settings, folder, parts, strategy, watchdog, background, last_step=0
    )

    def more_steps(count=num_steps):
        run.last_step += count
        with contextlib.redirect_stdout(io.StringIO()):
            training.train_loop(run)

    def save():
        more_steps(1)
        started = time.perf_counter()
        training.save(run)
        snapshot_secs = time.perf_counter() - started
        background.wait()
        return snapshot_secs, time.perf_counter() - started

    def summarize():
        run.config = dataclasses.replace(settings, summary_every_steps=1)
        started = time.perf_counter()
        more_steps(1)
        with_summary = time.perf_counter() - started
        run.config = settings
        started = time.perf_counter()
        more_steps(1)
        return with_summary - (time.perf_counter() - started)

    return more_steps, save, summarize


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", default="", help="CIFAR-10; synthetic without it")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--towers", type=int, default=4, help="most towers")
    parser.add_argument("--steps", type=int, default=50, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()

    counts = [n for n in (1, 2, 4, 8) if n <= options.towers]
    chosen = devices.configure("cpu", options.towers, own_cores=False)
    settings = config.Config(
        dataset="cifar10" if options.data_dir else "synthetic",
        data_dir=options.data_dir,
        batch_size=options.batch_size,
        input="stream",
        num_epochs=1000.0,
        eval_every_epochs=0.0,
        summary_every_steps=0,
    )
    parts = build.build(settings)
    still = measure.on_still_batch(parts)
    rates = [measure.matrix_rate()]

    things = {"raw": repeated(raw_step(still.train_batches.batch), options.steps)}
    for n in counts:
        strategy = build.create_strategy(
            settings,
            still,
            dataclasses.replace(chosen, towers=chosen.towers[:n]),
        )
        things[f"step {n}"] = functools.partial(strategy.train, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        one = dataclasses.replace(chosen, towers=chosen.towers[:1])
        things["loop"], save, summarize = full_loop(
            settings, parts, one, folder, options.steps
        )
        wall, processor = measure.in_turn(things, options.rounds)
        saves = [save() for _ in range(5)]
        snapshot_secs, save_secs = map(statistics.median, zip(*saves, strict=True))
        summary_secs = statistics.median([summarize() for _ in range(6)][1:])
    rates.append(measure.matrix_rate())

    images = options.steps * options.batch_size
    print(measure.report_head("Cost of the trainer over the bare arithmetic"))
    print(
        f"cnn at 24x24, float32, batch {options.batch_size}; {options.rounds} rounds "
        f"of {options.steps} steps, one more to warm up; "
        f"{measure.told_rates(*rates)}\n"
    )
    print(
        "| what | images/s, median | time / raw (min, median, max) | time / step 1 "
        "| processor time / raw | processor time / step 1 |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for name, values in wall.items():
        cells = [
            " ".join(f"{x:.3f}" for x in measure.ratios(seconds, name, base))
            for seconds in (wall, processor)
            for base in ("raw", "step 1")
        ]
        speed = images / statistics.median(values)
        print(f"| {name} | {speed:.0f} | {' | '.join(cells)} |")
    step_secs = statistics.median(wall["step 1"]) / options.steps
    defaults = config.Config()
    print(
        f"\nA checkpoint takes {save_secs:.2f} s, {snapshot_secs:.3f} of which hold up "
        "training, every "
        f"{defaults.checkpoint_every_secs:.0f} s by default: "
        f"{snapshot_secs / defaults.checkpoint_every_secs:.3%}. (The writing takes "
        "processor time from training.) A summary takes "
        f"{summary_secs:.2f} s, every {defaults.summary_every_steps} steps by default: "
        f"{summary_secs / (defaults.summary_every_steps * step_secs):.2%}."
    )


if __name__ == "__main__":
    main()

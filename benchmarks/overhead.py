"""The cost of the trainer over the bare arithmetic, for the tutorial's network.

    python -m benchmarks.overhead --data_dir=DATA

In turn in one process, at one global batch, seconds of a step:
- `raw`: the network, its gradients and the update by hand in TensorFlow operations,
  the second convolution by `winograd_conv2d` as in our layer, on a batch that lies
  ready; no towers, no loop, no checks.
- `step N`: strategy `towers` with N towers on the same batch: the compiled step alone.
- `loop`: `train` with one tower, as `run_train.py` calls it: reading and augmenting the
  images, logging, scalars. The others run when it has written a line of its log.

Every fifth line of the log comes with a summary (histograms, gradients, image grid) and
every seventh with a checkpoint. The table leaves out these and the line after each;
what they take longer is given as a share of the training time at the default periods.
"""

import contextlib
import dataclasses
import functools
import io
import json
import pathlib
import statistics
import tempfile
import time

import tensorflow as tf

from benchmarks import measure, trainers
from towers import build
from towers.config import Config
from towers.models.cpu_kernels import winograd_conv2d
from towers.training import train

SUMMARY_EVERY, CHECKPOINT_EVERY = 5, 7  # lines of the log
FIRST_LINES = 2  # of the loop, which compile and warm up


def raw_step(batch: dict[str, tf.Tensor]):
    """One training step of the tutorial's network, written out: a function to call."""

    def variable(shape, stddev, bias=0.0):
        kernel = tf.Variable(tf.random.truncated_normal(shape, stddev=stddev))
        return [kernel, tf.Variable(tf.fill(shape[-1:], bias))]

    w1, b1 = variable([5, 5, 3, 64], 0.05)
    w2, b2 = variable([5, 5, 64, 64], 0.05, 0.1)
    w3, b3 = variable([6 * 6 * 64, 384], 0.04, 0.1)
    w4, b4 = variable([384, 192], 0.04, 0.1)
    w5, b5 = variable([192, 10], 1 / 192)
    params = [w1, b1, w2, b2, w3, b3, w4, b4, w5, b5]
    averages = [tf.Variable(param) for param in params]
    step = tf.Variable(0.0)
    channels = tf.range(64)
    band = tf.cast(tf.abs(channels[:, None] - channels[None]) <= 4, tf.float32)

    def norm(x):
        squares = tf.nn.conv2d(x * x, band[None, None], 1, "SAME")
        root = tf.math.rsqrt(1.0 + 0.001 / 9 * squares)
        return x * (root * tf.sqrt(root))

    def loss_fn(images, labels):
        x = tf.nn.relu(tf.nn.conv2d(images, w1, 1, "SAME") + b1)
        x = norm(tf.nn.max_pool2d(x, 3, 2, "SAME"))
        x = norm(tf.nn.relu(winograd_conv2d(x, w2, *x.shape[1:3]) + b2))
        x = tf.reshape(tf.nn.max_pool2d(x, 3, 2, "SAME"), [-1, 6 * 6 * 64])
        x = tf.nn.relu(x @ w3 + b3)
        x = tf.nn.relu(x @ w4 + b4)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x @ w5 + b5)
        decay = 0.004 * (tf.nn.l2_loss(w3) + tf.nn.l2_loss(w4))
        return tf.reduce_mean(losses) + decay

    @tf.function
    def run():
        with tf.GradientTape() as tape:
            loss = loss_fn(batch["images"], batch["labels"])
        for param, gradient in zip(params, tape.gradient(loss, params), strict=True):
            param.assign_sub(0.1 * gradient)
        decay = tf.minimum(0.9999, (1 + step) / (10 + step))
        for average, param in zip(averages, params, strict=True):
            average.assign_sub((1 - decay) * (average - param))
        step.assign_add(1)
        return loss

    return run


def train_in_turn(config: Config, things: dict) -> tuple[dict, dict]:
    """Trains, and runs everything else once at each line of the log.

    Returns:
        Seconds for each line, by the wall clock and of processor time; `loop` first.
    """
    wall = {name: [] for name in ("loop", *things)}
    processor = {name: [] for name in wall}
    clocks, passed = (time.perf_counter, time.process_time), [0.0, 0.0]
    with tempfile.TemporaryDirectory() as workdir:
        log = pathlib.Path(workdir) / "metrics.jsonl"
        started, lines = [clock() for clock in clocks], 0

        def after_call():
            nonlocal started, lines, passed
            passed = [
                p + clock() - s
                for p, s, clock in zip(passed, started, clocks, strict=True)
            ]
            count = len(log.read_text().splitlines()) if log.exists() else 0
            if count > lines:
                others = measure.in_turn(things, 1, warm_up=0)
                for seconds, loop, other in zip(
                    (wall, processor), passed, others, strict=True
                ):
                    seconds["loop"].append(loop)
                    for name, [secs] in other.items():
                        seconds[name].append(secs)
                lines, passed = count, [0.0, 0.0]
            started = [clock() for clock in clocks]

        with contextlib.redirect_stdout(io.StringIO()):
            train(workdir=workdir, config=config, after_call=after_call)
        written = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    if len(written) != len(wall["loop"]):
        raise RuntimeError(
            f"{len(written)} lines of the log, but {len(wall['loop'])} timed"
        )
    return wall, processor


def main() -> None:
    parser = measure.create_parser(__doc__, steps=20, rounds=21, device="cpu")
    parser.add_argument("--towers", type=measure.numbers, default="1,2,4")
    options = parser.parse_args()
    if options.rounds < CHECKPOINT_EVERY:
        parser.error(f"--rounds={options.rounds} should be at least {CHECKPOINT_EVERY}")

    chosen = measure.all_devices("cpu", max(options.towers))
    count = FIRST_LINES + options.rounds
    config = Config(
        **measure.dataset(options),
        batch_size=options.batch_size,
        device="cpu",
        num_towers=1,
        input="stream",
        num_epochs=1000.0,
        max_steps=count * options.steps,
        log_every_steps=options.steps,
        eval_every_epochs=0.0,
        summary_every_steps=SUMMARY_EVERY * options.steps,
        checkpoint_every_steps=CHECKPOINT_EVERY * options.steps,
        checkpoint_every_secs=0.0,
    )
    still = trainers.on_still_batch(build.build(config))
    raw = raw_step(still.train_batches.batch)

    def run_raw():
        for _ in range(options.steps):
            loss = raw()
        loss.numpy()

    things = {"raw": run_raw}
    for n in options.towers:
        one = dataclasses.replace(config, num_towers=n)
        trainer = trainers.create_trainer(one, still, chosen)
        things[f"step {n}"] = functools.partial(trainer.train, options.steps)
    for thing in things.values():
        thing()  # compiles
    rates = [measure.matrix_rate()]
    wall, processor = train_in_turn(config, things)
    rates.append(measure.matrix_rate())

    numbers = range(FIRST_LINES, count)
    periods = (SUMMARY_EVERY, CHECKPOINT_EVERY)
    plain = [i for i in numbers if all((i + 1) % p and i % p for p in periods)]
    print(measure.report_head("Cost of the trainer over the bare arithmetic"))
    print(
        f"cnn at 24x24, float32, batch {options.batch_size}; {len(plain)} rounds "
        f"of {options.steps} steps; {measure.rates_text(rates)}\n\n"
        + measure.table_head(
            "part | images/s, median | time / raw (min, median, max) | time / step 1 | "
            "processor time / raw | processor time / step 1"
        )
    )
    bases = ("raw", f"step {options.towers[0]}")
    wall_plain, processor_plain = (
        {name: [values[i] for i in plain] for name, values in seconds.items()}
        for seconds in (wall, processor)
    )
    for name, values in wall_plain.items():
        cells = [
            " ".join(f"{x:.3f}" for x in measure.ratios(seconds, name, base))
            for seconds in (wall_plain, processor_plain)
            for base in bases
        ]
        speed = options.steps * options.batch_size / statistics.median(values)
        print(measure.table_row(name, f"{speed:.0f}", *cells))

    usual = statistics.median(wall_plain["loop"])

    def more_secs(every, other):
        lines = [i for i in numbers if (i + 1) % every == 0 and (i + 1) % other]
        return statistics.median(wall["loop"][i] for i in lines) - usual

    defaults = Config()
    save_secs = more_secs(CHECKPOINT_EVERY, SUMMARY_EVERY)
    summary_secs = more_secs(SUMMARY_EVERY, CHECKPOINT_EVERY)
    default_secs = defaults.summary_every_steps * usual / options.steps
    print(
        f"\nA checkpoint holds up training by {save_secs:.3f} s, every "
        f"{defaults.checkpoint_every_secs:.0f} s by default: "
        f"{save_secs / defaults.checkpoint_every_secs:.3%}. (The writing goes on in "
        "the background and takes processor time from training.) A summary takes "
        f"{summary_secs:.2f} s, every {defaults.summary_every_steps} steps by default: "
        f"{summary_secs / default_secs:.2%}."
    )


if __name__ == "__main__":
    measure.run(main)

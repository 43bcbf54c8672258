"""Workers on links of limited speed, next to PyTorch's and Keras 2's.

    python -m benchmarks.links --torch=PYTHON --tf_keras=PYTHON

In turn, on batches that lie ready, in network namespaces of this machine whose links
are limited (`benchmarks.namespaces`; it takes root on Linux), one worker in each:
- `towers`: strategy `multi_worker`, one tower in each worker; with
  `--all_reduce_dtype=bfloat16` too.
- `DDP`: PyTorch's DistributedDataParallel over gloo, and with its hook that sends
  float16 (its hook for bfloat16 needs NCCL), by a Python that has PyTorch
  (`--torch=PYTHON`).
- `tf_keras`: the steps of `fit` under TensorFlow's MultiWorkerMirroredStrategy, by a
  Python that has tf_keras (`--tf_keras=PYTHON`).

Cores are divided among the workers. "Of the wire" is the speed over the speed at which
the links would do nothing but carry 2 (n - 1) / n times the bytes of the gradients in
full TCP segments: computing, waiting and headers of a protocol would cost nothing. It
is above 1 where computing alone is slower than the links. Bytes are of the network
devices, headers included, over those that the ring needs.

`--trace` adds when the buckets of a step are sent, from TensorFlow's profiler.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from tensorflow.tsl.profiler.protobuf import xplane_pb2

from benchmarks import measure, trainers
from benchmarks.namespaces import Network, namespaces
from benchmarks.peers import ProgramSteps
from towers import build
from towers.config import Config
from towers.launch.supervisor import divide

COLUMNS = (
    "network | workers | link, Mbit/s | delay, ms | trained by | "
    "images/s, median (least, most) | "
    "of the wire | bytes / ring's | of DDP | of tf_keras"
)
SIDES = {"cnn": 24}  # as in the recipe; others 32
# Of a TCP segment in an Ethernet frame without a VLAN, with time stamps.
PAYLOAD, FRAME = 1448, 1514
HALF = "towers, bfloat16", "DDP, float16"


def parse_options() -> argparse.Namespace:
    parser = measure.create_parser(__doc__, rounds=3)
    parser.add_argument("--models", type=measure.names, default="cnn,resnet18")
    parser.add_argument("--workers", type=measure.numbers, default="2")
    parser.add_argument(
        "--mbits", type=measure.numbers, default="0,10000,1000,100", help="0: no limit"
    )
    parser.add_argument(
        "--delays", type=measure.numbers, default="0", help="ms from worker to worker"
    )
    parser.add_argument("--torch", metavar="PYTHON", default="")
    parser.add_argument("--tf_keras", metavar="PYTHON", default="")
    parser.add_argument("--secs", type=float, default=5.0, help="of each cell")
    parser.add_argument("--trained_by", type=measure.names, help="some of the programs")
    parser.add_argument("--trace", action="store_true")
    return parser.parse_args()


@contextlib.contextmanager
def programs(options, model: str, network: Network) -> Iterator[dict[str, list]]:
    """Name -> the workers of each, which have started."""
    count, side = len(network.hosts), SIDES.get(model, 32)
    size, started, port = options.batch_size, {}, iter(range(2222, 3000))
    fields = trainers.STEP_ALONE | measure.dataset(options)
    fields |= {"model": model, "batch_size": size, "image_size": side}
    fields |= {"strategy": "multi_worker", "num_towers": 1}
    torch, own = ["with_torch", options.torch, model, side, size // count, 1], {}
    own["DDP"] = [*torch, "float32"]
    own["DDP, float16"] = [*torch, "float32", "--float16_gradients"]
    own["tf_keras"] = ["with_tf_keras", options.tf_keras, model, side, size]
    shares = divide(count, os.environ, "cpu")

    def start(index, name):
        place = {"prefix": network.prefix(index), "share": shares[index]}
        if name.startswith("towers"):
            dtype = "bfloat16" if name in HALF else "float32"
            addresses = [f"{host}:{number}" for host in network.hosts]
            cluster = {"addresses": addresses, "index": index}
            named = fields | {"all_reduce_dtype": dtype}
            return trainers.TrainerProcess(named, "cpu", 2, **place, **cluster)
        return ProgramSteps(*own[name], environ=environ(index), **place)

    def environ(index):
        cluster = {"worker": [f"{host}:{number}" for host in network.hosts]}
        task = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        return {
            "TF_CONFIG": json.dumps(task),
            "no_grpc_proxy": ",".join(network.hosts),
            "MASTER_ADDR": network.hosts[0],
            "MASTER_PORT": str(number),
            "RANK": str(index),
            "WORLD_SIZE": str(count),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": str(len(shares[index].cores) or os.cpu_count()),
        }

    with contextlib.ExitStack() as stack:
        names = ["towers", "towers, bfloat16"]
        names += ["DDP", "DDP, float16"] if options.torch else []
        names += ["tf_keras"] if options.tf_keras else []
        for name in [x for x in names if x in (options.trained_by or names)]:
            number, started[name] = next(port), []
            for index in range(count):
                process = start(index, name)
                stack.callback(process.close)
                started[name].append(process)
            if name.startswith("towers"):
                for process in started[name]:
                    process.wait()
        yield started


def measure_link(options, model, network, started, mbits, delay, num_params) -> None:
    """Prints the rows of a link."""
    network.limit(mbits)
    count, rounds = len(network.hosts), options.rounds
    ring = {
        name: 2 * (count - 1) / count * num_params * (2 if name in HALF else 4)
        for name in started
    }
    things, sent, steps = {}, {name: [] for name in started}, {}

    def train(name, processes, num_steps):
        before = network.sent_bytes(0)
        trainers.take_steps(processes, num_steps)
        sent[name].append((network.sent_bytes(0) - before) / num_steps)

    for name, processes in started.items():
        trainers.take_steps(processes, 1)  # the first on this link
        begun = time.perf_counter()
        trainers.take_steps(processes, 1)
        secs = options.secs / rounds / (time.perf_counter() - begun)
        steps[name] = max(1, round(secs))
        things[name] = functools.partial(train, name, processes, steps[name])
    wall, _ = measure.in_turn(things, rounds, warm_up=0)
    speeds = {
        name: [options.batch_size * steps[name] / x for x in secs]
        for name, secs in wall.items()
    }
    medians = {name: statistics.median(x) for name, x in speeds.items()}
    for name, median in medians.items():
        wire = f"{median / options.batch_size * ring[name] / capacity(mbits):.3f}"
        spread = f"{median:,.0f} ({min(speeds[name]):,.0f}, {max(speeds[name]):,.0f})"
        ddp = "DDP, float16" if name in HALF else "DDP"
        peers = (medians.get(ddp), medians.get("tf_keras"))
        row = measure.table_row(
            *(model, count, f"{mbits:,}" if mbits else "none", f"{delay}"),
            *(name, spread),
            wire if mbits else "",
            f"{statistics.median(sent[name]) / ring[name]:.3f}",
            *(f"{median / peer:.2f}" if peer else "" for peer in peers),
        )
        print(row, flush=True)


def traced(workers: Sequence[trainers.TrainerProcess]) -> str:
    """When the first worker computes and exchanges buckets in the last of two steps."""
    with tempfile.TemporaryDirectory() as folder:
        workers[0].say(f"2 {folder}")
        for worker in workers[1:]:
            worker.say(2)
        for worker in workers:
            worker.finish()
        [path] = pathlib.Path(folder).glob("plugins/profile/*/*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
    events = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                begin = line.timestamp_ns * 1e-6 + event.offset_ps * 1e-9
                name = plane.event_metadata[event.metadata_id].name
                events.append((begin, begin + event.duration_ps * 1e-9, name))
    computed = sorted(x for x in events if x[2].startswith("tower_"))
    start = max(begin for begin, _, name in computed if name == computed[0][2])
    end = max(x[1] for x in computed) - start
    buckets = ", ".join(
        f"{begin - start:.0f} to {until - start:.0f}"
        for begin, until, name in sorted(events)
        if name.endswith(":CollectiveReduceV2") and begin > start
    )
    return f"forward and backward pass from 0 to {end:.0f} ms, buckets {buckets}"


def count_params(options, model: str) -> int:
    fields = measure.dataset(options) | {"model": model}
    built = build.build(Config(**fields, image_size=SIDES.get(model, 32))).model
    return sum(math.prod(x.shape) for x in built.trainable_variables)


def capacity(mbits: float) -> float:
    """The bytes a second of a link in full TCP segments."""
    return mbits * 1e6 / 8 * PAYLOAD / FRAME if mbits else float("inf")


def main() -> None:
    options = parse_options()
    print(measure.report_head("Workers on links of limited speed"))
    print(
        f"Batch {options.batch_size} over all workers; {options.rounds} rounds in "
        f"turn, {options.secs:g} s in all of each; load average "
        f"{os.getloadavg()[0]:.2f} before\n\n{measure.table_head(COLUMNS)}",
        flush=True,
    )
    traces = []
    for model, count, delay in itertools.product(
        options.models, options.workers, options.delays
    ):
        with (
            namespaces(count, delay * 1e-3) as network,
            programs(options, model, network) as started,
        ):
            num_params = count_params(options, model)
            for name, processes in started.items():
                for process in processes:
                    other = getattr(process, "num_params", num_params)
                    if other != num_params:
                        sys.exit(
                            f"{model}: {num_params:,} parameters; {name} {other:,}"
                        )
            for mbits in options.mbits:
                measure_link(options, model, network, started, mbits, delay, num_params)
                if options.trace and mbits:
                    text = traced(started["towers"])
                    link = f"{mbits} Mbit/s, {delay} ms"
                    traces.append(f"{model}, {count} workers, {link}: {text}")
    print("\n".join(["", *traces]))


if __name__ == "__main__":
    # Namespaces outlive a process that ends without cleaning up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("links: terminated"))
    measure.run(main)

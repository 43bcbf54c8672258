"""Batches of a container, read by another program; `benchmarks.containers` calls it.

    PYTHON benchmarks/with_torch/containers.py READER FOLDER SECS

READER is webdataset, datasets or datasets_streamed, each with PyTorch's DataLoader and
a worker for each core. Prints a line of JSON: seconds to the first batch after the
imports, images/s after it, megabytes at the peak of the process and its workers.
"""

import contextlib
import glob
import io
import json
import os
import sys
import threading
import time

BATCH = 256
SHUFFLED = 10_000  # images of a buffer


def measure(batches, secs, begin, images_of=len):
    """Draws batches for so many seconds; a dict of what is printed."""
    peak, is_over = [0.0], threading.Event()

    def watch():
        while not is_over.wait(0.2):
            peak[0] = max(peak[0], memory_mb())

    threading.Thread(target=watch, daemon=True).start()
    next(batches)
    first, before = time.perf_counter(), cpu_secs()
    count = 0
    while time.perf_counter() < first + secs:
        count += images_of(next(batches))
    speed = count / (time.perf_counter() - first)
    cpu = cpu_secs() - before
    is_over.set()
    return {
        "first_secs": first - begin,
        "images_per_sec": speed,
        "cpu_us": 1e6 * cpu / count,
        "peak_mb": max(peak[0], memory_mb()),
    }


def processes():
    """The process and its workers."""
    pids = [os.getpid()]
    for pid in pids:
        for task in glob.glob(f"/proc/{pid}/task/*/children"):
            with contextlib.suppress(OSError), open(task) as file:  # it may have ended
                pids += map(int, file.read().split())
    return pids


def memory_mb():
    """Of all processes, without the pages of files; what they share counts once."""
    total = 0
    for pid in processes():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
            for name in ("Pss_Anon", "Pss_Shmem"):
                total += int(lines[name].split()[0])
    return total / 1000


def cpu_secs():
    """Seconds of the processor that all processes took."""
    total = 0
    for pid in processes():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def pixels(content):
    import numpy as np
    import torch
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        return torch.from_numpy(np.array(image.convert("RGB")))


def loader(data, **options):
    from torch.utils.data import DataLoader

    cores = len(os.sched_getaffinity(0))
    return DataLoader(data, batch_size=BATCH, num_workers=cores, **options)


def webdataset(folder):
    import webdataset as wds

    def example(members):
        return pixels(members["jpg"]), int(members["cls"])

    shards = sorted(glob.glob(f"{folder}/tar/*.tar"))
    data = wds.WebDataset(shards, shardshuffle=len(shards), seed=0)
    return loader(data.shuffle(SHUFFLED).map(example))


def datasets(folder, streaming=False):
    import torch
    from datasets import Image, load_dataset

    files = sorted(glob.glob(f"{folder}/parquet/*.parquet"))
    data = load_dataset(
        "parquet",
        data_files=files,
        split="train",
        streaming=streaming,
        cache_dir=f"{folder}/datasets_cache",
    ).cast_column("image", Image(decode=False))
    options = {"buffer_size": SHUFFLED} if streaming else {}
    data = data.shuffle(seed=0, **options)

    def collate(rows):
        images = torch.stack([pixels(row["image"]["bytes"]) for row in rows])
        return images, torch.tensor([row["label"] for row in rows])

    return loader(data, collate_fn=collate)


def datasets_streamed(folder):
    return datasets(folder, streaming=True)


READERS = {x.__name__: x for x in (webdataset, datasets, datasets_streamed)}


def main():
    reader, folder, secs = sys.argv[1:]
    import torch  # noqa: F401

    __import__(reader.split("_")[0])
    begin = time.perf_counter()
    batches = iter(READERS[reader](folder))
    row = measure(batches, float(secs), begin, lambda batch: len(batch[1]))
    print(json.dumps(row), flush=True)
    os._exit(0)  # the workers have read ahead


if __name__ == "__main__":
    main()

"""Runs the author's airbench94_muon.py (Jordan 2024), for the section `recipe`.

    PYTHON airbench.py FILE [--data_dir=DIR] [--device=cpu]

FILE is of github.com/KellerJordan/cifar10-airbench. It trains on the binary files of
CIFAR-10 in DIR, or on noise, after a run that warms up: without `torch.compile`, then
with it. The seconds leave out evaluations of epochs, as published; the accuracy is with
test-time augmentation. On a CPU it is in miniature and float32.
"""

import argparse
import os
import pathlib
import sys
import tempfile
import time
import types

import numpy as np
import torch

FILES = {"train": ("data_batch_?.bin", 50_000), "test": ("test_batch.bin", 10_000)}
RUNS, TINY, COMPILE = 2, 8, torch.compile


class Clock:
    """A timer of the CPU in place of an event of CUDA."""

    def __init__(self, enable_timing):
        self.record = lambda: setattr(self, "secs", time.perf_counter())

    def elapsed_time(self, other):
        return 1e3 * (other.secs - self.secs)


def write_images(folder, split, is_tiny):
    """The file that the program writes after a download."""
    pattern, count = FILES[split]
    paths = sorted(folder.rglob(pattern)) if folder else []
    if folder and not paths:
        sys.exit(f"--data_dir={folder}: there is no {pattern}")
    rows = [np.fromfile(path, np.uint8) for path in paths]
    rows = rows or [
        np.random.default_rng(count).integers(0, 256, 3073 * count, np.uint8)
    ]
    rows = torch.tensor(np.concatenate(rows).reshape(-1, 3073))
    rows = rows[:TINY] if is_tiny else rows
    images = rows[:, 1:].reshape(-1, 3, 32, 32).permute(0, 2, 3, 1).contiguous()
    content = {"images": images, "labels": rows[:, 0].long() % 10, "classes": []}
    torch.save(content, f"cifar10/{split}.pt")


def normalize(mean, std):
    mean, std = (x.view(3, 1, 1) for x in (mean, std))
    return lambda x: (x - mean.to(x)) / std.to(x)


def names_of(source, on_cpu, compiles):
    """What the program defines; of torchvision it needs the normalization alone."""
    vision, transforms = types.ModuleType("torchvision"), types.ModuleType("transforms")
    vision.transforms, transforms.Normalize = transforms, normalize
    sys.modules |= {"torchvision": vision, "torchvision.transforms": transforms}
    torch.compile = COMPILE if compiles else lambda function: function
    if on_cpu:
        torch.cuda.Event, torch.cuda.synchronize = Clock, lambda: None
        source = source.replace('"cuda"', '"cpu"').replace(".half()", ".float()")
        source = source.replace("batch_size = 2000", f"batch_size = {TINY}")
    names = {"__name__": "airbench"}
    exec(compile(source, "airbench94_muon.py", "exec"), names)
    return names


def main(options):
    source, on_cpu = options.file.read_text(), options.device == "cpu"
    folder = options.data_dir and pathlib.Path(options.data_dir).resolve()
    sys.argv[0] = str(pathlib.Path(__file__).resolve())  # which the program reads
    print("| airbench94_muon | seconds | accuracy |\n| --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as cwd:
        os.chdir(cwd)
        os.mkdir("cifar10")
        for split in FILES:
            write_images(folder, split, on_cpu)
        for title in ("PyTorch",) if on_cpu else ("PyTorch", "PyTorch, compiled"):
            names = names_of(source, on_cpu, "," in title)
            model = names["CifarNet"]().to("cpu" if on_cpu else "cuda")
            model = model.to(memory_format=torch.channels_last)
            if "," in title:
                model.compile(mode="max-autotune")
            last = {}
            names["print_training_details"] = lambda row, **_: last.update(row)  # noqa: B023
            if not on_cpu:
                names["main"]("warmup", model)
            for run in range(1 if on_cpu else RUNS):
                accuracy = names["main"](run, model)
                secs = f"{last['time_seconds']:.2f}"
                print(f"| {title} | {secs} | {accuracy:.4f} |", flush=True)
        os.chdir("/")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--data_dir", default="")
    parser.add_argument("--device", default="auto")
    main(parser.parse_args())

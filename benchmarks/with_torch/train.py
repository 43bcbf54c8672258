"""Trains the Vision Transformer of `step.py` on CIFAR-10, plainly in PyTorch.

    PYTHON train.py FOLDER [--seed=N] [--epochs=N] [--images=N] [--precision=bfloat16]

The recipe of configs/cifar10_vit_tiny.py, on the first N images of FOLDER, which holds
data_batch_1.bin and so on. It prints the training loss of each epoch, and at the end
the accuracy on all test images. With `--exchange=FILE` it takes the steps in the file
that `exchange.py` writes, and prints the largest difference of a loss.
"""

import argparse
import math
import pathlib

import numpy as np
import torch
import torch.nn.functional as F
from step import SIDE, vit_tiny
from torch import nn

BATCH_SIZE, PADDING, WARMUP_EPOCHS = 128, 4, 2
RATE, DECAY, BETAS, EPSILON, CLIP_NORM = 0.001, 0.05, (0.9, 0.999), 1e-7, 1.0


def positions(side, channels):
    """Sines and cosines of x and y (Chen et al. 2021, arXiv:2104.02057)."""
    rates = 10_000.0 ** -np.linspace(0, 1, channels // 4)
    y, x = (np.outer(places.ravel(), rates) for places in np.mgrid[:side, :side])
    return torch.tensor(np.hstack([np.sin(x), np.cos(x), np.sin(y), np.cos(y)])).float()


def initialize(model):
    """LeCun's truncated normal for the patches, zeros for the head, else Glorot's."""
    for name, param in model.named_parameters():
        if name == "patches.weight":
            std = param[0].numel() ** -0.5 / 0.87962566103423978  # of what is left
            nn.init.trunc_normal_(param, std=std, a=-2 * std, b=2 * std)
        elif name.startswith("head") or name.endswith("bias"):
            nn.init.zeros_(param)
        elif param.ndim > 1:
            for kernel in param.chunk(3) if "qkv" in name else [param]:
                nn.init.xavier_uniform_(kernel)


def load(model, arrays):
    """Parameters by the names of `towers`."""
    kinds = {1: {"weight": "gamma", "bias": "beta"}, 0: {"weight": "kernel"}}
    for name, param in model.named_parameters():
        *_, layer, kind = name.replace("head", "logits").split(".")
        scope = f"block{int(name.split('.')[1]) + 1}_" if "blocks" in name else ""
        layer = "last_norm" if name.startswith("norm") else scope + layer
        kind = kinds["norm" in name].get(kind, kind)
        layers = ["query", "key", "value"] if "qkv" in name else [""]
        values = [arrays[f"{layer.replace('qkv', x)}/{kind}"] for x in layers]
        values = np.concatenate(values, -1)
        order = (3, 2, 0, 1) if values.ndim == 4 else None
        param.data = torch.tensor(values.transpose(order)).contiguous()


class Trainer:
    """AdamW with a warm-up and a cosine, and decay of kernels alone."""

    def __init__(self, model, steps, warmup_steps, precision):
        self.model, self.step, self.precision = model, 0, precision
        self.steps, self.warmup_steps = steps, warmup_steps
        params = list(model.parameters())
        groups = [
            {"params": [x for x in params if x.ndim > 1], "weight_decay": DECAY},
            {"params": [x for x in params if x.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=BETAS)

    def logits(self, images):
        is_narrow = self.precision == "bfloat16"
        with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
            return self.model(images).float()

    def __call__(self, images, labels):
        rate = RATE * min(1, self.step / self.warmup_steps)
        rate *= 0.5 * (1 + math.cos(math.pi * self.step / self.steps))
        self.step += 1
        # Next to the root of the moment before its correction.
        epsilon = EPSILON / math.sqrt(1 - BETAS[1] ** self.step)
        for group in self.optimizer.param_groups:
            group.update(lr=rate, eps=epsilon)
        loss = F.cross_entropy(self.logits(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        return loss.item()


def read(folder, names):
    rows = [np.fromfile(folder / f"{name}.bin", np.uint8) for name in names]
    rows = torch.tensor(np.concatenate(rows).reshape(-1, 1 + 3 * SIDE * SIDE))
    return rows[:, 1:].reshape(-1, 3, SIDE, SIDE), rows[:, 0].long()


def augmented(images):
    """A random window of each padded image, every other one mirrored."""
    n = len(images)
    rows, columns = torch.randint(2 * PADDING + 1, (2, n, 1)) + torch.arange(SIDE)
    columns = torch.where(torch.rand(n, 1) < 0.5, columns.flip(1), columns)
    padded = F.pad(images, 4 * [PADDING]).permute(0, 2, 3, 1)
    windows = padded[torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None]]
    return windows.permute(0, 3, 1, 2)


def main(options):
    torch.manual_seed(options.seed)
    model = vit_tiny().to(memory_format=torch.channels_last)
    model.positions = positions(SIDE // 4, 192)
    if options.exchange:
        file = np.load(options.exchange)
        load(model, file)
        images = torch.tensor(file["images"]).permute(0, 1, 4, 2, 3)
        train = Trainer(model, *file["length"].tolist(), "float32")
        losses = list(map(train, images, torch.tensor(file["labels"]).long()))
        print("loss,", "loss of PyTorch\n", np.stack([file["losses"], losses], 1))
        return print("largest difference", abs(file["losses"] - losses).max())
    initialize(model)
    names = [f"data_batch_{number}" for number in range(1, 6)]
    images, labels = (x[: options.images] for x in read(options.folder, names))
    deviation, mean = torch.std_mean(images.double(), (0, 2, 3), correction=0)
    mean, deviation = (x.float()[:, None, None] for x in (mean, deviation))
    lengths = (x * len(images) / BATCH_SIZE for x in (options.epochs, WARMUP_EPOCHS))
    train = Trainer(model, *lengths, options.precision)
    order, losses, epoch = torch.tensor([], dtype=torch.long), [], 1
    while train.step < train.steps:
        if len(order) < BATCH_SIZE:  # a batch may be of two epochs
            order = torch.cat([order, torch.randperm(len(images))])
        chosen, order = order[:BATCH_SIZE], order[BATCH_SIZE:]
        batch = augmented((images[chosen] - mean) / deviation)
        losses.append(train(batch, labels[chosen]))
        if train.step * BATCH_SIZE >= epoch * len(images):
            print(f"epoch {epoch}, loss {np.mean(losses):.4f}", flush=True)
            losses, epoch = [], epoch + 1
    images, labels = read(options.folder, ["test_batch"])
    with torch.no_grad():
        batches = ((x - mean) / deviation for x in images.split(500))
        classes = torch.cat([train.logits(x).argmax(1) for x in batches])
    print(f"test_accuracy {(classes == labels).double().mean():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--exchange", default="")
    main(parser.parse_args())

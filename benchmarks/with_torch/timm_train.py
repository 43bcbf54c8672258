"""Runs train.py of timm, for `python -m benchmarks.fine_tuning`.

    PYTHON timm_train.py CLONE [ARGUMENTS OF train.py ...]

A torchvision for GPUs next to a torch without CUDA lacks its operators, which no
classifier needs; its import asks for their names alone.
"""

import runpy
import sys

import torch

if not hasattr(torch.ops.torchvision, "nms"):
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor boxes, Tensor scores, float least) -> Tensor")

if __name__ == "__main__":
    clone = sys.argv.pop(1)
    sys.path[0] = clone  # the package timm of the same commit
    runpy.run_path(f"{clone}/train.py", run_name="__main__")

"""Runs train.py or validate.py of timm, for `benchmarks.fine_tuning` and `serving`.

    PYTHON timm_program.py CLONE/PROGRAM.py [ARGUMENTS ...]

A torchvision for GPUs next to a torch without CUDA lacks its operators, which no
classifier needs; its import asks for their names alone.
"""

import os
import runpy
import sys

import torch

if not hasattr(torch.ops.torchvision, "nms"):
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor boxes, Tensor scores, float least) -> Tensor")

if __name__ == "__main__":
    program = sys.argv.pop(1)
    sys.path[0] = os.path.dirname(program)  # the package timm of the same commit
    runpy.run_path(program, run_name="__main__")

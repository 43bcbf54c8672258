"""Options of the parallelism: strategy, devices, all-reduce, batch size."""

import dataclasses

from towers.config import choices
from towers.config.options import option


@dataclasses.dataclass(frozen=True)
class ParallelismOptions:
    """Strategy, devices, all-reduce and the size of a batch."""

    strategy: str = option(
        "towers",
        f"Placement of the variables and averaging: {choices.explained('strategy')}.",
        table="strategy",
        free=True,
    )
    num_towers: int = option(
        0, "Number of devices; 0 takes every GPU, or one CPU.", at_least=0, free=True
    )
    device: str = option(
        "auto",
        "Where the towers run; cpu makes a logical device per tower.",
        choices=("auto", "cpu", "gpu"),
        free=True,
    )
    parameter_device: str = option(
        "auto",
        "Where strategies towers and async_towers keep and update the variables; auto "
        "is the CPU, or with a single tower its own device.",
        read_by="strategy",
        choices=("auto", "cpu", "gpu"),
        free=True,
    )
    async_scale_gradients: bool = option(
        True,
        "Whether strategy async_towers scales a tower's gradients by its share of the "
        "batch, so that an epoch moves the parameters as far as in the others.",
        read_by="strategy",
    )
    max_staleness: int = option(
        0,
        "Most updates by others between fetch and update of a tower in strategy "
        "async_towers; 0 does not bound them.",
        read_by="strategy",
        at_least=0,
        free=True,
    )
    group_size: int = option(
        1,
        "Devices that hold one network in strategy model_parallel; num_towers is a "
        "multiple of it.",
        read_by="strategy",
        at_least=1,
        free=True,
    )
    device_order: str = option(
        "",
        "Order in which devices are taken, such as 0,1,4,5: neighbors make a group; "
        "empty for the driver's order.",
        free=True,
    )
    device_memory_mb: float = option(
        0.0,
        "Megabytes that training may take on a device; refused where the variables "
        "alone take more. On GPUs also the limit of the logical devices made of them. "
        "0 for all.",
        at_least=0,
        at_most=1e9,
        free=True,
    )
    batch_norm: str = option(
        "local",
        "Moments of batch normalization: of each tower's images (local) or of the "
        "whole batch (sync).",
        choices=("local", "sync"),
    )
    all_reduce: str = option(
        "auto",
        "Algorithm that adds up the gradients of strategy replicated: star (on one "
        "device), tree, ring, or nccl (two or more GPUs); or of multi_worker: ring or "
        "nccl. auto is nccl between GPUs, else star, or of multi_worker ring.",
        read_by="strategy",
        choices=("auto", "star", "tree", "ring", "nccl"),
        free=True,
    )
    all_reduce_pack_mb: float = option(
        -1.0,
        "Megabytes of the buffers in which gradients travel between workers; 0 for a "
        "single one, -1 for a default.",
        read_by="strategy",
        at_least=-1,
        at_most=1e9,
        free=True,
    )
    all_reduce_dtype: str = option(
        "float32",
        "Type of the numbers that are all-reduced; bfloat16 halves them and rounds the "
        "gradients.",
        read_by="strategy",
        choices=("float32", "bfloat16"),
    )
    batch_size: int = option(
        128,
        "Images over all towers together: of a step, or of a micro-batch with "
        "--accumulate_steps.",
        at_least=1,
    )
    accumulate_steps: int = option(
        1,
        "Micro-batches whose mean gradient makes one step of a synchronous strategy; "
        "a step then has batch_size x accumulate_steps images.",
        at_least=1,
    )
    deterministic: bool = option(
        False, "Ask TensorFlow for kernels that repeat bit for bit (GPUs).", free=True
    )

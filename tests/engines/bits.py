"""Print a hash of the state after twelve steps of each kind of training.

    python -m tests.engines.bits [NAME ...] > hashes

On one machine the lines stay the same after a change that does not touch the
mathematics. CPU towers train on drawn images.
"""

import contextlib
import hashlib
import io
import sys
import tempfile
import warnings

import numpy as np

BASE = {
    "dataset": "shapes",
    "augment": "pad_crop_flip",
    "model": "resnet20",
    "width": 0.25,
    "batch_size": 24,
    "num_epochs": 1.0,
    "max_steps": 12,
    "num_towers": 2,
    "device": "cpu",
    "weight_decay": 1e-3,
    "ema_decay": 0.9,
    "eval_every_epochs": 0.0,
    "summary_every_secs": 0.0,
    "summary_every_steps": 0,
    "checkpoint_every_secs": 0.0,
}
SPLIT = {"strategy": "model_parallel", "num_towers": 4, "group_size": 2}
SETTINGS = {
    "model_parallel": SPLIT,
    "towers": {"strategy": "towers"},
    "towers_uneven": {"strategy": "towers", "num_towers": 3, "batch_size": 25},
    "replicated_star": {"strategy": "replicated", "all_reduce": "star"},
    "replicated_ring": {"strategy": "replicated", "all_reduce": "ring"},
    "async_towers": {"strategy": "async_towers", "num_towers": 1},
    "multi_worker": {"strategy": "multi_worker"},
    "sync_normalization": {"batch_norm": "sync"},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16"},
    "accumulated": {"accumulate_steps": 3},
    "recomputed": {"recompute": True},
    "muon": {"model": "speedrun", "optimizer": "muon"},
    "lamb": {"optimizer": "lamb", "learning_rate": 1e-3},
    "adamw_mixup": {"optimizer": "adamw", "mixup": 0.2, "learning_rate": 1e-3},
    "clipped": {"clip_norm": 0.5, "label_smoothing": 0.1},
    "phases": {"early_sizes": "16:0.5", "num_epochs": 0.03},
    "frozen": {"freeze": "stage1*"},
    "dropout": {"model": "cnn", "dropout": 0.3, "augment": "tutorial"},
}


def state_hash(options: dict) -> str:
    """Return the hash of all tensors after the last step, by name."""
    from towers import Config, train

    quiet = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, quiet:
        config = Config(**BASE | options)
        state = train(folder, config, progress="off", report=False).state
    digest = hashlib.sha256()
    for name in sorted(state):
        array = np.asarray(state[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:24]


def main() -> None:
    """Print a line for each setting, or for those that are named."""
    from towers.parallel.devices import configure

    warnings.simplefilter("ignore")
    configure("cpu", 4)  # TensorFlow creates its devices once.
    for name in sys.argv[1:] or SETTINGS:
        try:
            print(f"{name:20} {state_hash(SETTINGS[name])}", flush=True)
        except Exception as error:
            print(f"{name:20} {error}", flush=True)


if __name__ == "__main__":
    main()

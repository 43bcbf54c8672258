"""DINOv3's Vision Transformers (Siméoni et al. 2025, arXiv:2508.10104)."""

from typing import Any

import keras

from towers.models.zoo import vit

# Parameter names in timm checkpoints.
_TABLE = vit.TORCH_NAMES[0] | {r"block(\d+)_scale(\d)/gamma": r"blocks.{\1-1}.gamma_\2"}
del _TABLE["tokens/positions"]
TORCH_NAMES = (_TABLE,)


def create_model(**options: Any) -> keras.Model:
    """Build a network with the options of `vit`.

    Queries and keys are rotated by their positions and have no biases; epsilon is 1e-5.
    The head reads the mean of the patches, timm's default; the authors' head of ViT-7B
    also reads the class token.
    """
    options |= {"patch_size": 16, "num_registers": 4, "initial_scale": 1e-5}
    return vit.create_model(is_rotary=True, **options)

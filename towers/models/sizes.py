"""Scaled numbers of channels, and the smallest images of a network."""

from towers.errors import ConfigError

# Below it, a product with `width` is exact to one channel.
MOST_CHANNELS = 2**53


def scaled(count: int, width: float, multiple_of: int = 1) -> int:
    """A number of channels times `width`: a multiple, and not zero.

    Raises:
        ConfigError: there are more than a dimension can have.
    """
    if count * width >= MOST_CHANNELS:
        raise ConfigError(
            f"width={width:g}: a layer would have {count * width:.3g} channels, and "
            f"{MOST_CHANNELS:.3g} can be counted; lower --width"
        )
    return multiple_of * max(1, round(count * width / multiple_of))


def check_image_size(
    model: str, image_shape: tuple[int, int, int], at_least: int
) -> None:
    """Raises ConfigError where pooling would leave nothing of an image."""
    height, width, _ = image_shape
    if min(height, width) < at_least:
        raise ConfigError(
            f"model={model} needs images of at least {at_least}x{at_least}, not "
            f"{height}x{width}; choose another --model or --augment"
        )

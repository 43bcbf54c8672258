"""Numbers of epochs, counted in images without rounding errors."""

from fractions import Fraction

# No run needs a finer part of an epoch, or more images.
_FINEST = Fraction(1, 10**7)
_MOST_IMAGES = 2**100


def exact(number: float) -> Fraction:
    """The fraction that a float approximates: 11/10 for 1.1, and 5/6 for the result of
    5 / 6. A number above 0 stays above 0."""
    if 0 < number < _FINEST:
        return _FINEST
    return Fraction(number).limit_denominator(_FINEST.denominator)


def num_images(epochs: float, num_examples: int) -> Fraction:
    """Number of images in `epochs` of `num_examples` each.

    In floats 1.1 epochs of 50,000 are 55,000.00000000001 images, and a step too many.
    """
    return min(exact(epochs) * num_examples, Fraction(_MOST_IMAGES))

"""TIFF files that Pillow does not read as 8-bit gray or colors, by tifffile."""

import io

import numpy as np
from PIL import ExifTags, TiffImagePlugin

from towers.data.files.bands import Bands, Refused

# Values of PhotometricInterpretation, and of ExtraSamples.
WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, CMYK, YCBCR, LAB = 0, 1, 2, 5, 6, 8
ASSOCIATED_ALPHA, ALPHA = 1, 2


def tiff(content: bytes) -> Bands | None:
    """Read a TIFF file that Pillow 13.0 misreads or refuses; None for others."""
    if content.startswith(b"MM\0\x2b"):
        raise Refused("is a big-endian BigTIFF file, which is not read; save it anew")
    tag, file = ExifTags.Base, io.BytesIO(content)
    start = 16 if 43 in content[2:4] else 8  # BigTIFF
    tags = TiffImagePlugin.ImageFileDirectory_v2(content[:start])
    file.seek(tags.next)
    tags.load(file)
    kind = tags.get(tag.PhotometricInterpretation, WHITE_IS_ZERO)
    bits = max(tags.get(tag.BitsPerSample, (1,)))
    extra = tuple(tags.get(tag.ExtraSamples, ()))
    num_bands = tags.get(tag.SamplesPerPixel, 1)
    num_bands -= extra.count(ALPHA) + extra.count(ASSOCIATED_ALPHA)
    compression = tags.get(tag.Compression, 1)
    is_planar = tags.get(tag.PlanarConfiguration) == 2
    is_sampled = tags.get(tag.YCbCrSubSampling, (1, 1)) != (1, 1)
    is_signed = set(tags.get(tag.SampleFormat, (1,))) != {1}
    expected = {WHITE_IS_ZERO: 1, BLACK_IS_ZERO: 1, RGB: 3}.get(kind, num_bands)
    is_misread = compression == 1 and is_planar and (not kind or bits != 8)
    is_known = compression in TiffImagePlugin.COMPRESSION_INFO
    is_8_bit = bits in (1, 2, 4, 8) and not is_signed
    is_photo = is_8_bit and num_bands == expected and is_known and not is_misread
    is_other = kind not in (WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, CMYK)
    refused = {
        "a thumbnail, as of a raw photo": tags.get(tag.NewSubfileType, 0) & 1,
        "planar LAB": kind == LAB and is_planar,
        "subsampled YCbCr": kind == YCBCR and compression == 1 and is_sampled,
        f"{bits} bits, photometric interpretation {kind}": not is_photo and is_other,
        "signed or floating numbers with white as zero": not kind and is_signed,
    }
    if what := next(filter(refused.get, refused), ""):
        hint = "save it as gray, colors or bands"
        raise Refused(f"is a TIFF file of {what}, which is not read; {hint}")
    if is_photo:
        return None
    return _bands(content, kind, bits, extra, tags.get(tag.Orientation, 1))


def _bands(content, kind, bits, extra, orientation):
    from tifffile import TiffFile

    # Other files of a set, which OME-TIFF names, are not read.
    file = TiffFile(io.BytesIO(content), _multifile=False)
    series = file.series[0]
    axes = zip(series.axes, series.shape, strict=True)
    sizes = {x: n for x, n in axes if n > 1 or x in "YX"}
    if {*sizes} - {"C"} - {"S"} != {"Y", "X"} or len(sizes) > 3:
        raise Refused(
            f"is a TIFF file of {len(file.pages)} pages, {list(series.shape)} with "
            f"axes {series.axes}, and it is unclear which are bands; save one page, or "
            "[height, width, bands] by tifffile.imwrite(NAME, image, photometric="
            "'minisblack', planarconfig='contig')"
        )
    axis = next((i for i, x in enumerate(sizes) if x in "CS"), None)
    count = sizes.get("C", sizes.get("S", 1))
    kinds = (0,) * (count - len(extra)) + extra
    kept = [i for i, x in enumerate(kinds) if x not in (ALPHA, ASSOCIATED_ALPHA)]
    num_bands = 3 if kind == CMYK else len(kept)

    def decode():
        pixels = series.asarray().reshape(tuple(sizes.values()))
        pixels = pixels[..., None] if axis is None else np.moveaxis(pixels, axis, -1)
        most = np.float64(2**bits - 1)
        colors = pixels[..., kept]
        if kind == WHITE_IS_ZERO:
            colors = most - colors
        if ASSOCIATED_ALPHA in kinds:
            alpha = pixels[..., [kinds.index(ASSOCIATED_ALPHA)]]
            colors = np.minimum(colors * (most / np.where(alpha, alpha, most)), most)
        if kind == CMYK:
            colors = (most - colors[..., :3]) * ((most - colors[..., 3:4]) / most)
        if colors.dtype != pixels.dtype and pixels.dtype.kind == "u":
            colors = np.rint(colors).astype(pixels.dtype)
        return colors

    shape = sizes["Y"], sizes["X"], num_bands
    return Bands(series.dtype, shape, decode, bits, orientation)

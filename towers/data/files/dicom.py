"""DICOM files, by pydicom."""

import io

import numpy as np

from towers.data.files.bands import Bands, Refused

HINT = "is a DICOM file; install the extra dicom (pip install pydicom)"


def dicom(content: bytes, windows: bool = True) -> Bands:
    """Read the first frame of a DICOM file.

    Gray levels are the values of the modality, such as Hounsfield units, mapped by the
    first window or table of the file if `windows` is True, and inverted if the lowest
    is white (PS3.3 C.11.1 and C.11.2, PS3.4 N.2). Colors are RGB.
    """
    try:
        import pydicom
    except ImportError:
        raise Refused(HINT) from None
    from pydicom import pixels

    header = pydicom.dcmread(io.BytesIO(content))
    if "PixelData" not in header:
        raise Refused("is a DICOM file without PixelData of integers")
    kind = header.PhotometricInterpretation
    is_color = header.SamplesPerPixel > 1 or kind == "PALETTE COLOR"

    def decode():
        image = pixels.pixel_array(header, index=0)
        if kind == "PALETTE COLOR":
            return pixels.apply_color_lut(image, header)[..., :3]
        if is_color:
            return image
        image = pixels.apply_modality_lut(image, header)
        low, high = _bounds(header)
        if windows:
            image = pixels.apply_voi_lut(image, header)
            if "VOILUTSequence" in header:
                low, high = 0, 2 ** header.VOILUTSequence[0].LUTDescriptor[2] - 1
        return low + high - image if kind == "MONOCHROME1" else image

    bits = header.BitsAllocated
    if kind == "PALETTE COLOR":
        bits = header.RedPaletteColorLookupTableDescriptor[2]
    dtype = np.dtype(f"uint{bits}" if is_color else np.float32)
    return Bands(dtype, (header.Rows, header.Columns, 3 if is_color else 1), decode)


def _bounds(header):
    """Return the lowest and highest value of the modality that a file may hold."""
    if "ModalityLUTSequence" in header:
        return 0, 2 ** header.ModalityLUTSequence[0].LUTDescriptor[2] - 1
    first = header.PixelRepresentation * -(2 ** (header.BitsStored - 1))
    bounds = np.array([first, first + 2**header.BitsStored - 1])
    slope = float(header.get("RescaleSlope", 1))
    return tuple(bounds * slope + float(header.get("RescaleIntercept", 0)))

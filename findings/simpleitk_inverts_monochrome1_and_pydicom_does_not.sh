#!/bin/sh
# SimpleITK 2.5.7 returns a DICOM image in which 0 is white (MONOCHROME1) inverted, and
# still says MONOCHROME1; pydicom 3.0.2 returns the stored numbers. Who inverts by the
# header turns it back with SimpleITK.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet SimpleITK==2.5.7 pydicom==3.0.2 numpy==2.4.6
cat > case.py <<'PYTHON'
import numpy as np
import pydicom
import SimpleITK
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage

print("SimpleITK", SimpleITK.__version__, "pydicom", pydicom.__version__)
file = Dataset()
file.file_meta = FileMetaDataset()
file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
file.SOPClassUID, file.SOPInstanceUID = SecondaryCaptureImageStorage, "1.2.3"
file.Modality, file.Rows, file.Columns, file.SamplesPerPixel = "DX", 2, 2, 1
file.PhotometricInterpretation, file.PixelRepresentation = "MONOCHROME1", 0
file.BitsAllocated, file.BitsStored, file.HighBit = 16, 12, 11
file.PixelData = np.array([0, 1000, 2000, 4095], "<u2").tobytes()
file["PixelData"].VR = "OW"
file.save_as("image.dcm", enforce_file_format=True)
image = SimpleITK.ReadImage("image.dcm")
itk = SimpleITK.GetArrayFromImage(image).ravel().tolist()
header = image.GetMetaData("0028|0004").strip()
stored = pydicom.dcmread("image.dcm").pixel_array.ravel().tolist()
print("pydicom", stored, "SimpleITK", itk, header)
assert stored == [0, 1000, 2000, 4095], "this has changed"
assert itk == [4095, 3095, 2095, 0] and header == "MONOCHROME1", "this has changed"
PYTHON
venv/bin/python case.py

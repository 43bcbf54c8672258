"""Predicts a folder of image files by an export of towers, without towers.

    python predict.py FORMAT EXPORT FOLDER SIDE BATCH_SIZE

FORMAT is a function of towers/exporting/load_in_new_process.py, or `keras`, whose
`predict` is called. `image_dataset_from_directory` of Keras reads the files.
"""

import pathlib
import sys

import keras

EXPORTING = pathlib.Path(__file__).resolve().parents[2] / "towers" / "exporting"


def main(name: str, export: str, folder: str, side: int, batch_size: int) -> None:
    images = keras.utils.image_dataset_from_directory(
        folder,
        labels=None,
        image_size=(side, side),
        batch_size=batch_size,
        shuffle=False,
        crop_to_aspect_ratio=True,
    )
    if name == "keras":
        keras.models.load_model(export).predict(images.prefetch(2), verbose=0)
        return
    sys.path.append(str(EXPORTING))
    import load_in_new_process

    _, predict = getattr(load_in_new_process, name)(export)
    for batch in images.prefetch(2):
        predict(batch.numpy().round().astype("uint8"))


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))

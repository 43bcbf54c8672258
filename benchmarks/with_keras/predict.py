"""Predicts a folder of image files by an export of towers, with Keras alone.

python predict.py MODEL.keras FOLDER SIDE BATCH_SIZE
"""

import sys

import keras


def main(export: str, folder: str, side: int, batch_size: int) -> None:
    images = keras.utils.image_dataset_from_directory(
        folder,
        labels=None,
        image_size=(side, side),
        batch_size=batch_size,
        shuffle=False,
        crop_to_aspect_ratio=True,
    )
    keras.models.load_model(export).predict(images.prefetch(2), verbose=0)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))

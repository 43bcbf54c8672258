"""Fine-tunes a network of ImageNet as a user of Keras does, without towers.

    python fine_tune.py PHOTOS NETWORK.keras EPOCHS SEED

PHOTOS has a folder of images for each class in train/ and in test/. The network takes
(x - 127) / 128 of pixels x, and its last layer is the head. The last line of the output
is the test accuracy.
"""

import sys

import keras

SIZE, BATCH_SIZE, LEARNING_RATE = 128, 32, 5e-4


def main(photos: str, network_path: str, num_epochs: int, seed: int) -> None:
    keras.utils.set_random_seed(seed)
    train, test = (
        keras.utils.image_dataset_from_directory(
            f"{photos}/{split}",
            image_size=(SIZE, SIZE),
            batch_size=BATCH_SIZE,
            shuffle=split == "train",
        )
        for split in ("train", "test")
    )
    network = keras.models.load_model(network_path)
    for layer in network.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False
    model = keras.Sequential(
        [
            keras.layers.RandomFlip("horizontal"),
            keras.layers.Rescaling(1 / 128, -127 / 128),
            keras.Model(network.input, network.layers[-2].output),
            keras.layers.Dense(len(train.class_names)),
        ]
    )
    num_steps = num_epochs * len(train)
    schedule = keras.optimizers.schedules.CosineDecay(LEARNING_RATE, num_steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    adam = keras.optimizers.Adam(schedule)
    model.compile(adam, loss, metrics=["accuracy"])
    model.fit(train.prefetch(2), epochs=num_epochs, verbose=2)
    print(model.evaluate(test.prefetch(2), verbose=0)[1])


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))

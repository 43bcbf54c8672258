"""A folder of images of your own, with a network that Keras has trained on ImageNet.

    python run_train.py --config=photos_finetune --data_dir=ROOT
    python run_train.py --config=photos_finetune --data_dir=ROOT --init_from=FILE.keras

The weights are those of Keras, which it downloads, or of a file. The head is new; the
layers below it are trained at a tenth of its rate, and their batch normalization keeps
its moments, which so few steps would not average. With --model=keras:NAME for another
network --freeze has the names of its normalizations.

Not measured: no weights of ImageNet could be had where the other recipes were measured.
"""

from towers.config import Config


def get_config() -> Config:
    return Config(
        dataset="image_folder",
        image_size=224,
        augment="random_resized_crop",
        model="keras:MobileNetV3Small",
        init_from="imagenet",
        optimizer="adamw",
        learning_rate=0.001,
        param_rates="conv*:0.1,expanded*:0.1",
        weight_decay=0.05,
        schedule="cosine",
        warmup_epochs=1.0,
        clip_norm=1.0,
        ema_decay=0.99,
        batch_size=32,
        num_epochs=15.0,
        eval_every_epochs=5.0,
    )

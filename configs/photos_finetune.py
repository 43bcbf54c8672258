"""A folder of images of your own, with a network that Keras has trained on ImageNet.

    python run_train.py --config=photos_finetune --data_dir=ROOT \
        --freeze='conv*,expanded*' --param_rates= --num_epochs=5 \
        --workdir=runs/head
    python run_train.py --config=photos_finetune --data_dir=ROOT --init_from=runs/head

The first command trains the head alone, the second all layers, those below the head at
a tenth of its rate. The second alone is enough with --init_from=imagenet, the default
here; a file of Keras' weights can be given instead. Not measured.
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

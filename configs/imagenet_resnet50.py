"""ResNet-50 on ImageNet, at 224x224.

    python run_train.py --config=imagenet_resnet50 --data_dir=DATA --num_towers=8

DATA is the folder in which tensorflow-datasets has prepared imagenet2012; a folder of
images in train/CLASS and test/CLASS instead: --dataset=image_folder --data_dir=ROOT.
Published: 0.7640 for this network, batch 256, in 90 epochs (Goyal et al. 2017,
arXiv:1706.02677, table 1: a top-1 error of 23.60 %), whose linear rule for the rate,
warm-up, weight decay, Nesterov momentum and initial scales these are; it smooths
no labels. For another batch size that rule is --learning_rate=0.1 per 256 images. As
there it is evaluated on the middle 224x224 of the image resized to 256. Not measured
here.
"""

from towers.config import Config


def get_config() -> Config:
    return Config(
        dataset="tfds:imagenet2012",
        image_size=224,
        center_crop=0.875,
        model="resnet50",
        augment="random_resized_crop",
        optimizer="nesterov",
        learning_rate=0.4,
        momentum=0.9,
        weight_decay=0.0001,
        schedule="piecewise",
        epoch_factors="30:0.1,60:0.01,80:0.001",
        warmup_epochs=5.0,
        ema_decay=0.0,
        batch_size=1024,
        num_epochs=90.0,
    )

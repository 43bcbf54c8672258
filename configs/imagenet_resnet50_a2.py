"""ResNet-50 on ImageNet by procedure A2 of "ResNet strikes back", at 224x224.

    python run_train.py --config=imagenet_resnet50_a2 --data_dir=DATA --num_towers=8

For a machine with GPUs. DATA is the folder in which tensorflow-datasets has prepared
imagenet2012; a folder of images in train/CLASS and test/CLASS instead:
--dataset=image_folder --data_dir=ROOT.
Published: 0.798 in 300 epochs (Wightman et al. 2021, arXiv:2110.00476). There
the magnitude of RandAugment varies with a standard deviation of 0.5 and each of its
operations is left out at random half of the time. Not measured here.
"""

from towers.config import Config


def get_config() -> Config:
    return Config(
        dataset="tfds:imagenet2012",
        image_size=224,
        center_crop=0.95,
        model="resnet50",
        stochastic_depth=0.05,
        augment="random_resized_crop",
        policy="rand_augment",
        rand_augment="2,7",
        repeats=3,
        mixup=0.1,
        cutmix=1.0,
        loss="binary_cross_entropy",
        target_threshold=0.2,
        optimizer="lamb",
        learning_rate=0.005,
        momentum=0.0,
        weight_decay=0.02,
        schedule="cosine",
        warmup_epochs=5.0,
        ema_decay=0.0,
        batch_size=2048,
        num_epochs=300.0,
    )

"""ViT-S/16 on ImageNet, at 224x224, with the hyperparameters of big_vision.

    python run_train.py --config=imagenet_vit_small --data_dir=DATA --num_towers=8

For a machine with GPUs. DATA is the folder in which tensorflow-datasets has prepared
imagenet2012; a folder of images in train/CLASS and test/CLASS instead:
--dataset=image_folder --data_dir=ROOT.
Published: 0.765 in 90 epochs, 0.80 in 300 (Beyer et al. 2022, arXiv:2205.01580;
big_vision/configs/vit_s16_i1k.py). There a hidden layer is before the logits, GELU is
approximated, and RandAugment has sixteen operations at magnitude 10 of 10: its shears
and rotations equal magnitude 30 of 30 here, its translations are 100 pixels (here 101),
its factors 1.9 (here 0.1 or 1.9), and its solarize does nothing. The weight decay of
0.0001 there, which the rate of 0.001 does not multiply, is 0.1 here; the warm-up is of
its 10,000 steps. Not measured here.
"""

from towers.config import Config


def get_config() -> Config:
    return Config(
        dataset="tfds:imagenet2012",
        image_size=224,
        center_crop=0.875,
        model="vit_small",
        augment="random_resized_crop",
        crop_scale="0.05,1",
        policy="rand_augment",
        rand_augment="2,30",
        mixup=0.2,
        optimizer="adamw",
        learning_rate=0.001,
        momentum=0.0,
        epsilon=1e-8,
        weight_decay=0.1,
        clip_norm=1.0,
        schedule="cosine",
        warmup_epochs=8.0,
        ema_decay=0.0,
        batch_size=1024,
        num_epochs=90.0,
    )

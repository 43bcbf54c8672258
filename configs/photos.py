"""A folder of images of your own, from scratch, in minutes on a CPU.

    python run_train.py --data_dir=ROOT
    python run_train.py --config=photos --data_dir=ROOT

ROOT/CLASS/*.jpg or ROOT/train/CLASS/*.jpg. The first command chooses the size of the
images and the number of epochs from the folder (towers/data/sets/photos.py); the second
takes those below, which are for a few hundred images. docs/own_images.md goes through
it with drawn photos.

On three sets of drawn photos 0.97 and more was measured, on a fourth with 15 images of
one class 0.81, means of five seeds (benchmarks/reports/2026-11-25-photos_recipe.md).
"""

from towers.config import Config


def get_config() -> Config:
    return Config(
        dataset="image_folder",
        image_size=64,
        augment="random_resized_crop",
        crop_scale="0.35,1",
        color_jitter=0.3,
        random_gray=0.2,
        model="speedrun",
        width=0.25,
        optimizer="muon",
        learning_rate=0.06,
        momentum=0.9,
        weight_decay=0.01,
        schedule="cosine",
        warmup_epochs=2.0,
        sampler="balanced",
        logit_adjustment=2.0,
        clip_norm=1.0,
        ema_decay=0.97,
        batch_size=32,
        num_epochs=40.0,
        eval_every_epochs=10.0,
    )

"""CIFAR-10 in eight epochs, after the fastest public trainings.

    python run_train.py --config=cifar10_speedrun --data_dir=DATA

Published: 0.94 with six-view TTA in 2.6 s on one A100 (KellerJordan/cifar10-airbench,
airbench94_muon), with these widths, epochs and rates; theirs are for the summed loss,
so that here biases have the rate 0.053 * 2000 and the head, whose logits they divide by
256, 0.67 * 2000 / 256^2. The factors depend on this rate and batch size: after a change
of either, compute `param_rates` and `weight_decay` again.

Measured: 0.9079 with six-view TTA and 0.8973 without, the mean of five seeds, on a JPEG
copy of the images and two CPU cores (`--num_towers=2`), in 11 minutes and 5 GB; with
`--precision=bfloat16`, for which the processor had instructions, 0.9059 and 0.8952 in 4
to 5 minutes (benchmarks/reports/2026-11-22-time_to_accuracy.md); 0.9081 on an H200
(benchmarks/reports/2026-11-27-gpu.md).
"""

from towers.config import Config


def get_config() -> Config:
    return Config(
        dataset="cifar10",
        model="speedrun",
        augment="translate_flip",
        optimizer="muon",
        learning_rate=0.24,
        muon_momentum=0.6,
        momentum=0.85,
        param_rates="whitening/bias:441.7:3,*/beta:441.7,logits/kernel:0.0852",
        weight_decay=1 / 60,  # 2e-6 * 2000 for a step at the rate 0.24
        label_smoothing=0.2,
        schedule="linear",
        warmup_epochs=0.0,
        ema_decay=0.0,
        strategy="replicated",  # Muon's products are then computed on a GPU
        batch_size=2000,
        num_epochs=8.0,
        eval_every_epochs=8.0,
        tta="translate",
    )

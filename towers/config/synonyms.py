"""Names that other programs have for our options and values, to suggest ours."""

import re
from collections.abc import Callable, Container, Iterable, Sequence

from towers.errors import did_you_mean

# Value of an option -> names that other programs have for it.
VALUES = {
    "bfloat16": "bf16 mixed_bfloat16",
    "binary_cross_entropy": "bce bce_loss",
    "cosine": "cos cosine_annealing cosine_decay",
    "cross_entropy": "ce crossentropy softmax",
    "float16": "fp16 half amp mixed_float16 mixed",
    "float32": "fp32 full single",
    "gpu": "cuda",
    "lamb": "lambc fusedlamb nvlamb",
    "nesterov": "nag sgd_nesterov",
    "one_cycle": "onecycle 1cycle",
    "piecewise": "step multistep multi_step steps",
    "plateau": "reduce_on_plateau reduce_lr_on_plateau reducelronplateau",
    "replicated": "ddp dp mirrored data_parallel distributed_data_parallel",
}

# Flag -> names that other programs have for it.
SYNONYMS = {
    "accumulate_steps": "accum accumulation accumulation_steps grad_accum "
    "accumulate_grad_batches gradient_accumulation gradient_accumulation_steps",
    "augment": "aug augmentation augmentations transform transforms data_augmentation",
    "batch_size": "bs b batch batchsize train_batch_size global_batch_size "
    "per_device_train_batch_size",
    "batch_norm": "sync_bn sync_batchnorm bn",
    "best_by": "monitor best_metric metric_for_best_model checkpoint_metric "
    "eval_metric",
    "center_crop": "crop_pct crop_ratio",
    "interpolation": "resample resampling",
    "checkpoint_every_secs": "save_secs save_interval save_interval_secs",
    "checkpoint_every_steps": "save_every save_every_steps save_steps save_freq",
    "clip_norm": "clip clip_grad clip_grad_norm grad_clip gradient_clip "
    "gradient_clip_val max_grad_norm",
    "cluster": "num_nodes nnodes",
    "compile": "xla jit jit_compile use_xla torch_compile",
    "config": "c cfg recipe config_file",
    "data_dir": "data data_path data_root dataset_dir dataset_path root d",
    "dataset": "dataset_name ds",
    "device": "use_gpu gpu cuda cpu no_cuda accelerator",
    "dropout": "drop drop_rate dropout_rate p_dropout",
    "dry_run": "fast_dev_run",
    "ema_decay": "ema model_ema model_ema_decay moving_average_decay",
    "patience": "early_stopping early_stopping_patience early_stop stop_patience",
    "eval_every_epochs": "eval_every eval_freq eval_interval check_val_every_n_epoch",
    "folds": "kfold k_fold num_folds n_splits cv",
    "image_size": "img_size imgsz resolution size input_size crop_size",
    "init_from": "pretrained finetune weights init_checkpoint initial_checkpoint "
    "load_from",
    "keep_checkpoints": "max_to_keep keep keep_last save_total_limit checkpoint_hist",
    "label_smoothing": "smoothing label_smooth label_smoothing_factor",
    "layer_decay": "llrd layerwise_decay layer_wise_decay layer_lr_decay",
    "learning_rate": "lr eta base_lr initial_lr learningrate",
    "loss": "criterion loss_fn bce_loss",
    "log_every_steps": "log_every log_interval log_freq print_freq log_steps "
    "log_every_n_steps",
    "max_steps": "steps num_steps train_steps iterations iters max_iter n_steps",
    "min_rate_factor": "min_lr eta_min lr_min final_lr end_lr",
    "model": "arch architecture net network backbone model_name",
    "num_epochs": "epochs epoch n_epochs max_epochs train_epochs num_train_epochs e",
    "num_workers": "workers n np nproc num_processes processes",
    "num_towers": "gpus num_gpus n_gpus ngpus towers num_devices devices "
    "num_replicas nproc_per_node",
    "optimizer": "opt optim optimiser",
    # Before "workdir", for which the same names stand in programs without --output.
    "output": "o out outfile out_file output_file output_dir outdir out_dir",
    "overwrite": "force restart clean",
    "policy": "aa auto_augment",
    "precision": "amp fp16 bf16 mixed_precision half dtype",
    "random_erasing": "reprob random_erase erasing",
    "repeats": "aug_repeats repeated_augmentation ra",
    "schedule": "scheduler lr_schedule lr_scheduler lr_scheduler_type sched "
    "learning_rate_schedule",
    "seed": "random_seed rng_seed manual_seed",
    "stochastic_depth": "drop_path drop_path_rate droppath stochdepth",
    "strategy": "distribution_strategy distribution parallel parallelism",
    "summary_every_secs": "save_summaries_secs",
    "summary_every_steps": "save_summaries_steps",
    "tta": "views test_time_augmentation",
    "use_ema": "ema averaged use_averages",
    "validation_fraction": "val_split validation_split val_fraction",
    "warmup_epochs": "warmup warm_up num_warmup_epochs warmup_ratio warmup_steps",
    "warmup_start_factor": "warmup_lr warmup_start_lr start_factor warmup_init_lr",
    "weight_decay": "wd l2 decay l2_reg",
    "width": "width_multiplier width_mult alpha",
    "teacher": "distill distillation teacher_model teacher_path teacher_run",
    "distillation_temperature": "temperature tau distill_temperature",
    "target_threshold": "bce_target_thresh",
    "focal_gamma": "gamma",
    "workdir": "output output_dir out out_dir outdir o save_dir logdir log_dir "
    "model_dir train_dir checkpoint_dir ckpt_dir ckpt checkpoint run_dir run",
}

# Names that mean exactly the same and are accepted.
ALIASES = set(
    "arch architecture batchsize data_path data_root dataset_dir dataset_path "
    "drop_rate dropout_rate epochs img_size imgsz k_fold kfold label_smoothing_factor "
    "learningrate lr model_name n_epochs n_splits num_folds num_train_epochs opt optim "
    "optimiser random_seed reprob smoothing train_epochs wd".split()
)

# The counterpart of other programs' flags -> the names of these flags.
ANSWERS = {
    "--track=wandb:PROJECT writes to Weights & Biases": "wandb use_wandb log_wandb "
    "wandb_project report_to",
    "a run always writes TensorBoard files, into its folder": "tensorboard tb "
    "use_tensorboard",
    "the data set (--dataset, --data_dir) gives the number of classes": "num_classes "
    "nb_classes n_classes",
    "--param_rates='logits/*:1,*:0' trains the head alone; --freeze='stem*' freezes "
    "parameters by name": "freeze_backbone freeze_encoder train_head_only",
    "--init_from=imagenet, or a file or run instead of imagenet, starts from trained "
    "weights": "pretrained use_pretrained",
    "the same command, with the same --workdir, continues a run": "resume resume_from "
    "auto_resume resume_from_checkpoint",
    "all GPUs train, without a launcher; --cluster adds machines": "ddp use_ddp "
    "distributed local_rank world_size master_addr",
    "--input=stream reads on all cores": "workers num_workers dataloader_num_workers",
}


def answer(name: str, known: Iterable[str]) -> str | None:
    """Return the counterpart of another program's flag, or None."""
    name = name.replace("-", "_").lower()
    rows = (text for text, names in ANSWERS.items() if name in names.split())
    return next((x for x in rows if {*re.findall(r"--(\w+)", x)} <= {*known}), None)


def with_our_names(
    arguments: Sequence[str], known: Container[str], is_bool: Callable[[str], bool]
) -> list[str]:
    """Return a command line, up to `--`, with our names in place of others."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    renamed = []
    for argument in arguments[:end]:
        dashes, name, rest = re.findall(r"(?s)^(-{0,2})([^=]*)(.*)$", argument)[0]
        typed = name.replace("-", "_")
        ours = typed if typed in known else typed in ALIASES and meant(typed, known)
        if typed.startswith("no_") and typed[3:] in known and is_bool(typed[3:]):
            ours = f"no{typed[3:]}"
        renamed.append(f"{dashes}{ours or name}{rest}" if dashes else argument)
    return [*renamed, *arguments[end:]]


def meant(name: str, known: Container[str]) -> str | None:
    """Return the known name for a name of other programs, or None."""
    name = name.replace("-", "_").lower()
    if name in known:
        return name
    rows = (VALUES | SYNONYMS).items()
    return next((x for x, names in rows if x in known and name in names.split()), None)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return 'did you mean ...? ' for a name, by meaning or spelling, or nothing."""
    by_meaning = meant(name, list(known))
    return f"did you mean {by_meaning!r}? " if by_meaning else did_you_mean(name, known)

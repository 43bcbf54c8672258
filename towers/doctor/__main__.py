"""Says why a run is not faster, for example with more GPUs.

    python -m towers.doctor --config=cifar10_resnet18 --num_towers=4

It takes the options of a run, times the parts of a step, an evaluation and a
checkpoint, and names the bottlenecks and which flags to try. Nothing is written into
the run folder. See docs/doctor.md.
"""

from towers.run.signals import exit_on_signals

if __name__ == "__main__":  # before the imports that take time
    exit_on_signals()

from absl import flags

from towers import console, quiet_imports
from towers.cli import flags as config_flags
from towers.cli import train_flags

PROGRAM = "towers.doctor"
PRINTS_RESULTS = True  # see `flags.start`


def main(_):
    config, workdir, origins, remark = train_flags.config_of_command()
    cluster = train_flags.cluster_of_flags(config)["cluster"]
    if remark:
        console.line(remark)
    with quiet_imports():
        from towers.doctor.diagnosis import diagnose
    num_workers = cluster.size if cluster else 1
    diagnose(workdir, config, flags.FLAGS.measure_secs, num_workers, origins)


if __name__ == "__main__":
    train_flags.define_run_flags()
    train_flags.define_cluster_flags()
    config_flags.define_config_flags()
    about = "Time for measuring, after the step is traced."
    flags.DEFINE_float("measure_secs", 40.0, about, 1.0)
    config_flags.start(main, program=PROGRAM)

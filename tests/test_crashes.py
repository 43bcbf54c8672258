"""Training processes killed at any moment, and restarted until they are done; row 1.

What remains must be bit-equal to what an uninterrupted run leaves: parameters, slots,
moving averages, state of the network, and all lines of metrics.jsonl except times.
"""

import collections
import itertools
import pathlib
import random

import pytest
from engines.killed_runs import Kill, Processes, said_steps
from pictures import write_folder
from small_runs import assert_equal_states, records, saved, saved_steps, small_config

pytestmark = pytest.mark.slow

CLASSES = dict.fromkeys("abcde", 10)

# 24 steps, three an epoch; with augmentation, dropout and batch normalization.
RUN = {
    "dataset": "image_folder",
    "image_size": 8,
    "validation_fraction": 0.4,
    "eval_every_epochs": 2.0,
    "num_epochs": 8.0,
    "log_every_steps": 1,
    "checkpoint_every_steps": 2,
    "keep_checkpoints": 2,
    "learning_rate": 0.02,
    # A kill between two steps is one between two calls.
    "steps_per_loop": 1,
}
LAST_STEP = 24


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    with Processes(tmp_path_factory.mktemp("processes")) as started:
        yield started


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    write_folder(folder, "train", CLASSES)
    write_folder(folder, "test", CLASSES, seed=1)
    return str(folder)


def go_on(processes: Processes, workdir: pathlib.Path, config, kill=None) -> bool:
    """Trains or continues a run; False where the process was killed before its end.
    Either way, what it had saved is there."""
    is_done = processes.train(workdir, config, kill)
    said = said_steps(workdir)
    if said:
        assert saved(workdir).step >= said[-1]
    return is_done


def random_kill(rng: random.Random) -> Kill:
    """Most of the time of a process passes before its first step; so kills by the clock
    alone would seldom meet a step or a save."""
    kinds = [
        Kill(after_secs=rng.uniform(0.01, 1.5)),
        Kill(step=rng.randint(1, 6), delay_secs=rng.uniform(0.0, 0.05)),
        Kill(save=rng.randint(1, 3), delay_secs=rng.uniform(0.0, 0.05)),
        Kill(save=rng.randint(1, 3), operation=rng.randint(1, 40)),
    ]
    return rng.choices(kinds, weights=[1, 2, 2, 2])[0]


def runs_despite_kills(processes, folder, config, rng, num_kills):
    """The folders of runs that have come to their end, with so many kills in all."""
    num_killed = 0
    for number in itertools.count():
        workdir, is_done = folder / f"run-{number}", False
        while not is_done:
            kill = random_kill(rng) if num_killed < num_kills else None
            is_done = go_on(processes, workdir, config, kill)
            num_killed += not is_done
        yield workdir
        if num_killed == num_kills:
            return


def assert_as_uninterrupted(run: pathlib.Path, whole: pathlib.Path) -> None:
    assert records(run) == records(whole)
    # Killed after its last save, it has not removed the checkpoints before that.
    assert set(saved_steps(run)) >= set(saved_steps(whole))
    ours, expected = saved(run), saved(whole)
    assert ours.step == LAST_STEP
    assert ours.trainer_state["best"] == expected.trainer_state["best"]
    assert_equal_states(ours.tensors, expected.tensors)
    kinds = {name.split("/")[0] for name in ours.tensors}
    assert {"params", "slots", "state", "averages"} <= kinds


NUM_KILLS = 13
CASES = [
    {"num_towers": 1},
    {"num_towers": 2},
    {"num_towers": 4},
    {"num_towers": 2, "strategy": "replicated"},
    {"num_towers": 4, "strategy": "replicated"},
    {"num_towers": 2, "strategy": "model_parallel", "group_size": 2},
    {"num_towers": 4, "strategy": "model_parallel", "group_size": 2},
    {"num_towers": 1, "strategy": "async_towers"},
]


@pytest.mark.parametrize("options", CASES)
@pytest.mark.row(1, 32)
def test_row_1_killed_anywhere_a_run_ends_as_the_uninterrupted_one(
    processes, data_dir, tmp_path, count, options
):
    config = small_config(data_dir=data_dir, **RUN, **options)
    whole, rng = tmp_path / "whole", random.Random(str(options))
    assert processes.train(whole, config)
    for run in runs_despite_kills(processes, tmp_path, config, rng, NUM_KILLS):
        assert_as_uninterrupted(run, whole)
    count("kills survived", NUM_KILLS)


@pytest.mark.row(2)
def test_row_2_killed_before_each_file_operation_of_a_save(
    processes, data_dir, tmp_path, count
):
    """Each time in the second save of a process, so that the run advances."""
    config = small_config(data_dir=data_dir, **RUN)
    whole, workdir = tmp_path / "whole", tmp_path / "run-0"
    assert processes.train(whole, config)
    operation, operations = 1, []
    while True:
        is_new = not workdir.exists()
        kill = Kill(save=2, operation=operation)
        if not go_on(processes, workdir, config, kill):
            last_line = processes.output.splitlines()[-1]
            operations.append(last_line.removeprefix("killed before "))
            operation += 1
            continue
        assert_as_uninterrupted(workdir, whole)
        if is_new:  # it has saved more than twice, but with fewer operations
            break
        workdir = tmp_path / f"run-{operation}"
    met = collections.Counter(operations)
    assert met["fsync"] >= 6 and met["open"] >= 10 and met["os.rename"] >= 2
    assert met["write"] == 1 and met["os.mkdir"] >= 1 and met["os.remove"] >= 3
    count("kills survived", len(operations))


@pytest.mark.row(1)
def test_row_1_a_killed_run_of_asynchronous_towers_goes_on(
    processes, data_dir, tmp_path, count
):
    """Their order differs from run to run, so the values do; nothing saved is lost."""
    options = {"strategy": "async_towers", "num_towers": 2}
    config = small_config(data_dir=data_dir, **RUN, **options)
    rng, num_kills = random.Random(0), 8
    for run in runs_despite_kills(processes, tmp_path, config, rng, num_kills):
        assert saved(run).step == LAST_STEP
        steps = [line["step"] for line in records(run)]
        assert steps == sorted(set(steps)) and steps[-1] == LAST_STEP
    count("kills survived", num_kills)

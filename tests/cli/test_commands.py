"""The commands as users and schedulers run them: exit code, message, files.

Every test runs processes of its own; "row" is one of reliability.md. Starting
TensorFlow takes some seconds, so most of them are marked slow.
"""

import os
import pathlib
import re
import signal

import pytest
from marks import slow
from pictures import random_pixels, tiff
from processes import HERE, ROOT, Program, on_linux, run
from small_runs import assert_equal_states, records, saved, saved_steps

TRAIN = ROOT / "run_train.py"
EVALUATE = ROOT / "run_eval.py"
PREDICT = ROOT / "run_predict.py"

STOP_SECS = 10  # from a signal to the end

# A run of ten steps.
RUN = (
    "--dataset=synthetic --augment=pad_crop_flip --optimizer=nesterov --momentum=0.9 "
    "--ema_decay=0.9 --batch_size=10 --num_epochs=2 --device=cpu --num_towers=2 "
    "--log_every_steps=1 --eval_every_epochs=1 --summary_every_steps=0 "
    "--checkpoint_every_secs=0 --workdir=run"
).split()


def small(place="nowhere", nth=1, hold_secs=0.0):
    """The command that trains on the small data set; see train_small.py."""
    return [HERE / "train_small.py", place, nth, hold_secs, *RUN]


@pytest.fixture
def start(tmp_path):
    """Starts a command in a folder of the test."""
    programs = []

    def start_program(*command, **options):
        programs.append(Program(command, tmp_path, **options))
        return programs[-1]

    yield start_program
    for program in programs:
        program.__exit__()


@pytest.fixture
def fails(start):
    """Runs a command that should fail; returns its one line of complaint."""

    def fail(exit_code, *command, **environ):
        program = start(*command, environ=environ)
        assert program.wait() == exit_code, program.output
        last = program.output.splitlines()[-1]
        assert "Traceback" not in program.output
        assert last.startswith(f"{pathlib.Path(command[0]).name}: ")
        return last

    return fail


# Refused before TensorFlow is imported (rows 16, 17, 30).


@pytest.mark.row(16, 17)
def test_rows_16_17_wrong_options_are_refused_before_tensorflow_is_imported(
    fails, tmp_path
):
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('it is imported')")
    flags = ["--workdir=run", "--batch_size=4", "--num_towers=8"]
    line = fails(2, TRAIN, *flags, PYTHONPATH=str(tmp_path))
    assert "batch_size=4 with num_towers=8: " in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "command,name,value",
    [(TRAIN, "KERAS_BACKEND", "jax"), (EVALUATE, "TF_USE_LEGACY_KERAS", "1")],
)
@pytest.mark.row(30)
def test_row_30_another_keras_is_refused(fails, command, name, value):
    line = fails(2, command, "--workdir=run", **{name: value})
    assert name in line and "unset" in line


# Rows 39 and 41: as early as possible, and what nobody has foreseen.


def catches_sigterm(program):
    status = pathlib.Path(f"/proc/{program.process.pid}/status").read_text()
    caught = int(re.search(r"^SigCgt:\s*(\w+)", status, re.M)[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def is_importing_tensorflow(program):
    """What it prints meanwhile goes to another file."""
    return not os.path.samefile(f"/proc/{program.process.pid}/fd/2", program.path)


@on_linux
@pytest.mark.parametrize(
    "command,is_time,number",
    [
        (TRAIN, is_importing_tensorflow, signal.SIGTERM),
        (EVALUATE, catches_sigterm, signal.SIGTERM),
        (PREDICT, catches_sigterm, signal.SIGINT),
        slow(TRAIN, catches_sigterm, signal.SIGINT),
        slow(EVALUATE, is_importing_tensorflow, signal.SIGINT),
        slow(PREDICT, is_importing_tensorflow, signal.SIGTERM),
    ],
)
@pytest.mark.row(39)
def test_row_39_a_signal_while_python_imports(
    start, tmp_path, command, is_time, number
):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)  # read with TensorFlow
    program = start(command, "--workdir=run", *["run"] * (command == PREDICT))
    program.wait_until(lambda: is_time(program))
    program.process.send_signal(number)
    assert program.wait(STOP_SECS) == 75
    words = "nothing to save; the same command continues"
    if command == PREDICT:
        words = "the same command begins again"
    assert program.output.endswith(f"stopped by {number.name}, {words}\n")


FAILING = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import towers
from towers import errors
from towers.cli import train as command
from towers.config import factories
from towers.cli import flags
later = lambda: factories.resolve('model', 'mine.py:create_model')()
def train(workdir, *args, **kwargs):
    BODY
towers.train = towers.cross_validate = train
command.define_flags()
flags.start(command.main)
"""


@pytest.fixture
def failing(tmp_path):
    """A run_train.py whose training is another statement."""

    def write(body):
        (tmp_path / "run_train.py").write_text(FAILING.replace("BODY", body))
        return tmp_path / "run_train.py"

    return write


@pytest.mark.parametrize("has_folder", [True, False])
@pytest.mark.row(41)
def test_row_41_an_unforeseen_error_is_three_lines_and_a_file(
    failing, tmp_path, has_folder
):
    script = failing('raise RuntimeError("a" * 1000 + "\\nb")')
    workdir = tmp_path / "run"
    if has_folder:
        workdir.mkdir()
    done = run(str(script), f"--workdir={workdir}", TMPDIR=str(tmp_path))
    assert done.returncode == 70 and not done.stdout.startswith("Traceback")
    first, second, third = done.stderr.splitlines()
    assert first.startswith("run_train.py: a defect in towers: RuntimeError: aaa")
    assert first.endswith("a b") and max(map(len, (first, second, third))) < 420
    saved = pathlib.Path(third.removeprefix("run_train.py: the traceback: "))
    assert saved.parent == (workdir if has_folder else tmp_path)
    text = saved.read_text()
    assert "Traceback" in text and f"--workdir={workdir}" in text and "towers 0" in text


# Trackers, which are made before TensorFlow is imported.

SLURM = {  # the second task of a sweep of single processes, see test_cluster_spec
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[2,10]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURMD_NODENAME": "n10",
}


@pytest.mark.parametrize("flags,environ", [(["--folds=5"], {}), ([], SLURM)])
def test_every_run_of_one_process_has_its_trackers(failing, tmp_path, flags, environ):
    (tmp_path / "mlflow.py").write_text("entities = MlflowClient = None\n")
    script = failing('print(kwargs["cluster"], len(kwargs["callbacks"]))')
    flags = [f"--workdir={tmp_path / 'run'}", "--track=mlflow:a", *flags]
    done = run(str(script), *flags, **environ)
    assert done.stdout.splitlines()[-1:] == ["None 1"], done.stderr


@pytest.mark.slow
def test_warnings_of_pillow_are_not_printed(tmp_path):
    for number in range(9):
        path = tmp_path / "data" / "ab"[number % 2] / f"{number}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Two widths, of which Pillow warns, and once 8 samples, which it logs.
        tags = {256: [8, 8], 258: [8], 262: [1], 277: [1 + 7 * (number == 8)]}
        path.write_bytes(tiff([random_pixels(number, 8, 8, 1).tobytes()], 8, 8, tags))
    grid = f"--grid={tmp_path / 'grid.png'}"
    done = run("-m", "towers.check", str(tmp_path / "data"), grid)
    assert done.returncode == 3 and len(done.stderr.splitlines()) == 1, done.stderr


# Row 12: signals.


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The run of ten steps, from its start to its end in one process."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    with Program(small(), folder) as program:
        assert program.wait() == 0, program.output
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    "place,nth,hold_secs,number",
    [
        ("computing", 7, 7, signal.SIGTERM),  # two towers: in the fourth step
        ("saving", 2, 60, signal.SIGKILL),
    ],
)
@pytest.mark.row(1, 12, 32)
def test_rows_1_12_stopped_or_killed_the_same_command_continues_to_the_same_end(
    start, tmp_path, uninterrupted, place, nth, hold_secs, number
):
    every_3 = "--checkpoint_every_steps=3"
    program = start(*small(place, nth, hold_secs), every_3)
    program.wait_for(f"halted at {place}")
    program.process.send_signal(number)
    program.process.send_signal(number)  # a second one
    code = program.wait(STOP_SECS)
    if number == signal.SIGKILL:
        assert code == -number and saved_steps(tmp_path / "run") == [3]
    else:
        assert code == 75, program.output
        last = program.output.splitlines()[-1]
        assert last.startswith("train_small.py: stopped by SIGTERM")
        assert last.endswith("; the same command continues")
        assert "SIGTERM: step 4 is finished first" in program.output
        assert "Traceback" not in program.output

    program = start(*small(), every_3)
    assert program.wait() == 0, program.output
    assert_equal_states(saved(tmp_path / "run").tensors, saved(uninterrupted).tensors)
    assert records(tmp_path / "run") == records(uninterrupted)


RECIPE = """
import threading
import tensorflow as tf
import towers

def multiply(number):
    matrix = tf.random.stateless_normal([1000, 1000], [1, number])
    for _ in range(300):
        matrix @= matrix
    return matrix

def work():
    while True:
        dataset = tf.data.Dataset.range(100).map(multiply, num_parallel_calls=4)
        next(iter(dataset.prefetch(2)))  # deleted here, once all calls have ended

def get_config():
    threading.Thread(target=work, daemon=True).start()
    return towers.Config(dataset="shapes", model="lenet", num_epochs=0.02)
"""


@pytest.mark.slow
def test_a_thread_in_tensorflow_does_not_break_the_end(tmp_path):
    """An interpreter that ended would crash; exit code 139."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    done = run(str(TRAIN), f"--config={recipe}", f"--workdir={tmp_path}/run")
    assert done.returncode == 0, done.stderr

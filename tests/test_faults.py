"""The commands as users and schedulers run them: exit code, message, files.

Every test runs processes of its own; "row" is one of reliability.md. Starting
TensorFlow takes some seconds, so most of them are marked slow.
"""

import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import time

import pytest
import tensorflow as tf
from full_pipes import fill
from marks import slow
from small_runs import assert_equal_states, records

from towers.data.published import PUBLISHED
from towers.run.checkpointer import Checkpointer

ROOT = pathlib.Path(__file__).resolve().parents[1]
TRAIN = [ROOT / "run_train.py"]
EVALUATE = [ROOT / "run_eval.py"]
PREDICT = [ROOT / "run_predict.py"]
SMALL = ROOT / "tests" / "train_small.py"

WAIT_SECS = 120  # for what takes some seconds on an idle machine
STOP_SECS = 10  # from a signal to the end

# A run of ten steps.
RUN = (
    "--dataset=synthetic --augment=pad_crop_flip --optimizer=nesterov --momentum=0.9 "
    "--ema_decay=0.9 --batch_size=10 --num_epochs=2 --device=cpu --num_towers=2 "
    "--log_every_steps=1 --eval_every_epochs=1 --summary_every_steps=0 "
    "--checkpoint_every_secs=0"
).split()


def small(place="nowhere", nth=1, hold_secs=0.0):
    """The command that trains on the small data set; see train_small.py."""
    return [SMALL, place, str(nth), str(hold_secs)]


class Program:
    """A running command, its output in a file."""

    def __init__(self, tmp_path, command, *flags, **environ):
        own = ("KERAS_BACKEND", "TF_CPP_MIN_LOG_LEVEL", "TF_USE_LEGACY_KERAS")
        inherited = {k: v for k, v in os.environ.items() if k not in own}
        self.path = tmp_path / f"output-{time.monotonic_ns()}.txt"
        with open(self.path, "w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, command), *flags],
                cwd=tmp_path,
                env=inherited | environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a signal to the tests is not one to it
            )

    @property
    def output(self) -> str:
        return self.path.read_text()

    def wait_until(self, condition):
        patience = time.monotonic() + WAIT_SECS
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < patience, self.output
            time.sleep(0.01)

    def wait_for(self, text):
        self.wait_until(lambda: text in self.output)

    def wait(self, secs=WAIT_SECS) -> int:
        """The exit code; the output has been plain lines (row 31)."""
        try:
            code = self.process.wait(secs)
        finally:
            self.process.kill()
        assert "\r" not in self.output and "\x1b" not in self.output
        return code


@pytest.fixture
def start(tmp_path):
    """Starts a command in a folder of the test."""
    programs = []

    def start_program(command, *flags, **environ):
        programs.append(Program(tmp_path, command, *flags, **environ))
        return programs[-1]

    yield start_program
    for program in programs:
        program.process.kill()
        program.process.wait()


@pytest.fixture
def fails(start):
    """Runs a command that should fail; returns its one line of complaint."""

    def run(exit_code, command, *flags, **environ):
        program = start(command, *flags, **environ)
        assert program.wait() == exit_code, program.output
        last = program.output.splitlines()[-1]
        assert "Traceback" not in program.output
        assert last.startswith(f"{pathlib.Path(command[0]).name}: ")
        return last

    return run


def final_state(workdir):
    return Checkpointer(workdir / "checkpoints").restore().tensors


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The run of ten steps, from its start to its end in one process."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    program = Program(folder, small(), *RUN, "--workdir=run")
    assert program.wait() == 0, program.output
    return folder / "run"


# Refused before TensorFlow is imported (rows 16, 17, 30).


@pytest.mark.parametrize(
    "flags,message",
    [
        (["--batchsize=4"], r"Unknown command line flag 'batchsize'.*batch_size"),
        (["--max_steps=many"], r"flag --max_steps=many"),
        (["--strategy=tower"], r"strategy='tower': did you mean 'towers'"),
        (["--batch_size=4", "--num_towers=8"], r"batch_size=4 with num_towers=8: .*--"),
        (
            ["--optimizer=nesterov", "--momentum=0"],
            r"optimizer=nesterov with momentum=0.0: .*--",
        ),
        (["--learning_rate=-1"], r"learning_rate=-1.0: must be above 0"),
        (
            ["--config=quickstrat"],
            r"did you mean 'quickstart'\? .*cifar10_cnn, ",
        ),
        (["--config=nonesuch"], r"recipes: .*cifar10_cnn, .*quickstart"),
        (["quickstart"], r"'quickstart' is no flag"),
    ],
)
@pytest.mark.row(16, 17)
def test_row_17_a_wrong_flag_is_refused_at_once(fails, tmp_path, flags, message):
    started = time.monotonic()
    assert re.search(message, fails(2, TRAIN, "--workdir=run", *flags))
    # An import of TensorFlow alone takes longer.
    assert time.monotonic() - started < 1.5
    assert not (tmp_path / "run").exists()


@pytest.mark.row(17)
def test_row_17_a_typo_in_a_recipe_names_the_nearest_option(fails, tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from towers.config import Config\n\n\n"
        "def get_config():\n    return Config(lerning_rate=0.1)\n"
    )
    line = fails(2, TRAIN, f"--config={recipe}")
    assert "no option 'lerning_rate'; did you mean 'learning_rate'?" in line


@pytest.mark.parametrize(
    "environ", [{"KERAS_BACKEND": "jax"}, {"TF_USE_LEGACY_KERAS": "1"}]
)
@pytest.mark.parametrize("command", [TRAIN, EVALUATE])
@pytest.mark.row(30)
def test_row_30_another_keras_is_refused(fails, command, environ):
    line = fails(2, command, "--workdir=run", **environ)
    assert next(iter(environ)) in line and "unset" in line


@pytest.mark.parametrize(
    "flags,message",
    [
        ([], "--workdir"),
        (["--workdir=nowhere"], "nowhere holds no run"),
        (["--workdir=nowhere", "--stepp=3"], "Unknown command line flag 'stepp'"),
    ],
)
def test_an_evaluation_of_no_run_is_refused(fails, flags, message):
    assert message in fails(2, EVALUATE, *flags)


# Rows 39 and 41: as early as possible, and what nobody has foreseen.

HAS_PROC = pathlib.Path("/proc/self/maps").exists()


def catches_sigterm(program):
    status = pathlib.Path(f"/proc/{program.process.pid}/status").read_text()
    caught = int(re.search(r"^SigCgt:\s*(\w+)", status, re.M)[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def has_diverted_stderr(program):
    """As long as TensorFlow is imported, what it prints goes to another file."""
    return not os.path.samefile(f"/proc/{program.process.pid}/fd/2", program.path)


@pytest.mark.skipif(not HAS_PROC, reason="no /proc")
@pytest.mark.parametrize(
    "is_time,number",
    [
        (catches_sigterm, signal.SIGTERM),
        (catches_sigterm, signal.SIGINT),
        (has_diverted_stderr, signal.SIGTERM),
    ],
)
@pytest.mark.parametrize("command", [TRAIN, EVALUATE, PREDICT])
@pytest.mark.row(39)
def test_row_39_a_signal_while_python_imports(
    start, tmp_path, command, is_time, number
):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)  # read with TensorFlow
    paths = ["run"] if command == PREDICT else []
    program = start(command, "--workdir=run", *paths)
    program.wait_until(lambda: is_time(program))
    program.process.send_signal(number)
    assert program.wait(STOP_SECS) == 75
    words = "nothing to save; the same command continues"
    if command == PREDICT:
        words = "the same command begins again"
    assert program.output == f"stopped by {number.name}, {words}\n"


@pytest.mark.parametrize("command", [TRAIN, EVALUATE, PREDICT])
@pytest.mark.row(39)
def test_row_39_signals_are_caught_before_the_first_import_that_takes_time(command):
    script = (
        "import runpy, signal, sys\n"
        "def signal_caught(number, handler):\n"
        "    print(sorted({'absl', 'dataclasses', 'numpy'} & set(sys.modules)))\n"
        "    sys.exit()\n"
        "signal.signal = signal_caught\n"
        f"runpy.run_path({str(command[0])!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr


FAILING = """
import sys
sys.path.insert(0, {root!r})
import run_train
from towers.config import factories, flags
def train(workdir, *args, **kwargs):
    {body}
run_train.train = train
flags.run(run_train.main)
"""


def test_a_training_starts_where_its_first_line_cannot_be_printed(tmp_path):
    script = tmp_path / "run_train.py"
    script.write_text(FAILING.format(root=str(ROOT), body="pass"))
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-u", script, f"--workdir={tmp_path / 'run'}"],
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_versions_that_cannot_be_printed_are_one_line(unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, *TRAIN, "--version"],
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert done.returncode == 2
    assert done.stderr == b"run_train.py: standard output: No space left on device\n"


@pytest.mark.parametrize("has_folder", [True, False])
@pytest.mark.row(41)
def test_row_41_an_unforeseen_error_is_three_lines_and_a_file(tmp_path, has_folder):
    script, workdir = tmp_path / "run_train.py", tmp_path / "run"
    body = 'raise RuntimeError("a" * 1000 + "\\nb")'
    script.write_text(FAILING.format(root=str(ROOT), body=body))
    if has_folder:
        workdir.mkdir()
    done = subprocess.run(
        [sys.executable, script, f"--workdir={workdir}"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 70 and not done.stdout.startswith("Traceback")
    first, second, third = done.stderr.splitlines()
    assert first.startswith("run_train.py: a defect in towers: RuntimeError: aaa")
    assert first.endswith("a b") and max(map(len, (first, second, third))) < 420
    saved = pathlib.Path(third.removeprefix("run_train.py: the traceback: "))
    assert saved.parent == (workdir if has_folder else tmp_path)
    text = saved.read_text()
    assert "Traceback" in text and f"--workdir={workdir}" in text and "towers 0" in text


@pytest.mark.parametrize(
    "body,message",
    [
        ("factories.resolve('model', '{mine}:create_model')()()", "{mine}:4: KeyError"),
        ("raise MemoryError", "out of memory: MemoryError; lower --batch_size"),
        (
            "import tensorflow as tf; raise tf.errors.InternalError(None, None, "
            "'on GPU:1: CUDA_ERROR_OUT_OF_MEMORY')",
            "out of memory on GPU:1: on GPU:1: CUDA_ERROR_OUT_OF_MEMORY; lower --batch",
        ),
    ],
)
def test_an_error_that_comes_later_is_one_line_where_its_cause_is_known(
    fails, tmp_path, body, message
):
    script, mine = tmp_path / "run_train.py", tmp_path / "mine.py"
    mine.write_text(
        "def create_model():\n"
        "    def call_later():\n"
        "        # a comment\n"
        "        raise KeyError('x')\n"
        "    return call_later\n"
    )
    body = body.format(mine=mine)
    script.write_text(FAILING.format(root=str(ROOT), body=body))
    assert message.format(mine=mine) in fails(2, [script], "--workdir=run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "flag,words",
    [
        ("--width=1000", "out of memory"),
        ("--batch_size=2000000000", "batch_size=2000000000: must be at most"),
        ("--num_towers=5000", "num_towers=5000: "),
        ("--image_size=1000000", "image_size=1000000 with max_image_pixels="),
    ],
)
def test_row_40_sizes_beyond_the_machine_are_one_line(tmp_path, flag, words):
    """Under `ulimit -v`, so that other tests keep their memory."""
    done = subprocess.run(
        ["bash", "-c", 'ulimit -v 6000000 && exec "$@"', "", sys.executable]
        + [*TRAIN, "--dataset=embedded", "--model=lenet", "--device=cpu"]
        + [f"--workdir={tmp_path}/run", flag],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=WAIT_SECS,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert words in line and len(line) <= 420


MUCH = """
import keras

def create(*, image_shape, num_classes):
    images = keras.Input(image_shape, name="images")
    x = keras.layers.UpSampling2D(2**14, name="larger")(images)
    x = keras.layers.GlobalAveragePooling2D(name="mean")(x)
    return keras.Model(images, keras.layers.Dense(num_classes, name="logits")(x))
"""


@pytest.mark.slow
@pytest.mark.row(40)
def test_row_40_a_step_without_memory_is_one_line(fails, tmp_path):
    (tmp_path / "mine.py").write_text(MUCH)
    network = f"--model={tmp_path / 'mine.py'}:create"
    flags = ["--dataset=embedded", "--device=cpu", "--num_towers=2", "--workdir=run"]
    line = fails(2, [ROOT / "run_train.py"], network, *flags)
    assert re.search(
        r"out of memory on CPU:[01]: tensor with shape\[64,.*float; ", line
    )
    assert all(
        f"--{x}" in line for x in ("batch_size", "accumulate_steps", "precision")
    )


# Row 12: signals.


def is_importing(program):
    maps = pathlib.Path(f"/proc/{program.process.pid}/maps")
    return "tensorflow" in maps.read_text()


@pytest.mark.skipif(not HAS_PROC, reason="no /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT)])
def test_row_12_a_signal_while_tensorflow_is_imported(start, tmp_path, number):
    program = start(TRAIN, "--workdir=run", *RUN)
    program.wait_until(lambda: is_importing(program))
    program.process.send_signal(number)
    assert program.wait(STOP_SECS) == 75
    line = f"stopped by {number.name}, nothing to save; the same command continues\n"
    assert program.output == line
    assert not (tmp_path / "run").exists()


def stop(program, *numbers):
    """Sends signals and waits for the end."""
    for number in numbers:
        program.process.send_signal(number)
        time.sleep(0.05)
    assert program.wait(STOP_SECS) == 75, program.output
    last = program.output.splitlines()[-1]
    assert last.startswith("train_small.py: stopped by SIG")
    assert last.endswith("; the same command continues")
    assert "Traceback" not in program.output
    return last


@pytest.mark.row(12)
def test_row_12_a_waiting_run_saves_and_ends(start, tmp_path):
    program = start(small("waiting", 6, 60), *RUN, "--workdir=run")
    program.wait_for("step 3/10")
    program.wait_for("halted at waiting")
    last = stop(program, signal.SIGTERM)
    (step,) = Checkpointer(tmp_path / "run" / "checkpoints").steps()
    assert step >= 3
    assert f"stopped by SIGTERM: step {step} of 10 is saved in run" in last


@pytest.mark.slow
@pytest.mark.parametrize(
    "place,nth,hold_secs,number",
    [
        ("tracing", 1, 60, signal.SIGTERM),
        ("waiting", 6, 60, signal.SIGTERM),
        ("waiting", 6, 60, signal.SIGINT),
        ("computing", 7, 2, signal.SIGTERM),  # two towers: in the fourth step
        ("computing", 7, 7, signal.SIGINT),  # a step that is worth a line
        ("drawing", 1, 60, signal.SIGTERM),
        ("evaluating", 1, 60, signal.SIGINT),
        ("evaluating", 2, 60, signal.SIGTERM),  # after the last step
        ("saving", 1, 2, signal.SIGTERM),
        ("saving", 1, 2, signal.SIGINT),
    ],
)
@pytest.mark.row(12)
def test_row_12_the_same_command_continues_to_the_same_end(
    start, tmp_path, uninterrupted, place, nth, hold_secs, number
):
    flags = [*RUN, "--workdir=run"]
    if place == "saving":
        flags.append("--checkpoint_every_steps=3")
    if place == "drawing":
        flags.append("--summary_every_steps=4")
    program = start(small(place, nth, hold_secs), *flags)
    program.wait_for(f"halted at {place}")
    stop(program, number, signal.SIGTERM)
    line = re.search(r"^SIG\w+: step 4 is finished first$", program.output, re.M)
    assert bool(line) == (hold_secs == 7)

    program = start(small(), *flags)
    assert program.wait() == 0, program.output
    assert_equal_states(final_state(tmp_path / "run"), final_state(uninterrupted))
    assert records(tmp_path / "run") == records(uninterrupted)


@pytest.mark.slow
@pytest.mark.row(12)
def test_row_12_a_run_whose_lines_nobody_reads_saves_and_ends(tmp_path):
    """It trains on, and is stopped as any other."""
    reader, writer = os.pipe()
    fill(writer)
    process = subprocess.Popen(
        [sys.executable, *small(), *RUN, "--num_epochs=1000", "--workdir=run"],
        cwd=tmp_path,
        stdout=writer,
        stderr=writer,
    )
    try:
        patience, metrics = time.monotonic() + WAIT_SECS, tmp_path / "run/metrics.jsonl"
        while not metrics.exists() or len(records(tmp_path / "run")) < 3:
            assert process.poll() is None and time.monotonic() < patience
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_SECS) == 75
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        os.close(writer)
    assert Checkpointer(tmp_path / "run" / "checkpoints").steps()[-1] >= 3


# Row 13: two processes.


@pytest.mark.slow
@pytest.mark.row(13)
def test_row_13_the_second_process_names_the_first(start, fails, tmp_path):
    first = start(small("waiting", 6, 60), *RUN, "--workdir=run")
    first.wait_for("step 3/10")
    line = fails(2, small(), *RUN, "--workdir=run")
    assert f"another process trains in run: process {first.process.pid} on " in line
    first.process.kill()
    first.process.wait()
    program = start(small(), *RUN, "--workdir=run")
    assert program.wait() == 0, program.output


# Rows 5, 7, 14, 16, 18: what goes wrong later.


@pytest.mark.slow
@pytest.mark.parametrize(
    "exit_code,flags,message",
    [
        (2, ["--workdir=file/run"], "the run folder file/run cannot be written"),
        (2, ["--device=gpu"], "device=gpu: TensorFlow sees no GPU"),
        (5, ["--learning_rate=1e30"], "is not finite; the parameters are those before"),
    ],
)
@pytest.mark.row(5, 18)
def test_rows_5_14_and_18_end_in_one_line(fails, tmp_path, exit_code, flags, message):
    if tf.config.list_physical_devices("GPU") and "--device=gpu" in flags:
        pytest.skip("there is a GPU")
    (tmp_path / "file").write_text("")
    line = fails(exit_code, small(), *RUN, "--workdir=run", *flags)
    assert message in line


@pytest.mark.slow
@pytest.mark.row(7)
def test_row_7_with_no_good_checkpoint_it_exits_4(start, fails, tmp_path):
    program = start(small(), *RUN, "--max_steps=2", "--workdir=run")
    assert program.wait() == 0, program.output
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    (saved / "tensors.index").write_bytes(b"")
    line = fails(4, small(), *RUN, "--workdir=run")
    assert "none of the 1 checkpoints" in line and "tensors.index: size is 0" in line
    assert saved.exists()


@pytest.mark.slow
@pytest.mark.row(9)
def test_row_9_another_config_exits_2_and_a_finished_run_0(start, fails, tmp_path):
    program = start(small(), *RUN, "--max_steps=2", "--workdir=run")
    assert program.wait() == 0, program.output
    line = fails(2, small(), *RUN, "--seed=4", "--workdir=run")
    assert "seed was 0 and is 4" in line and "--allow_change=seed" in line
    program = start(small(), *RUN, "--max_steps=2", "--workdir=run")
    assert program.wait() == 0
    assert "run is finished: step 2 of 2." in program.output.splitlines()[-1]


# Rows 19, 21, 22: data.


class Exploding:
    """Once unpickled, it leaves a file behind."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return (pathlib.Path.touch, (self._path,))


def no_data(folder):
    pass


def pickled_data(folder):
    (folder / "cifar-10-batches-py").mkdir()
    content = pickle.dumps(Exploding(folder / "executed"))
    for name in ("data_batch_1", "test_batch"):
        (folder / "cifar-10-batches-py" / name).write_bytes(content)


def truncated_data(folder):
    images = folder / "cifar-10-batches-bin"
    images.mkdir()
    for of_split in PUBLISHED["cifar10"].files.values():
        for name, num_records in of_split.items():
            (images / name).write_bytes(bytes(3073 * num_records))
    with open(images / "data_batch_3.bin", "r+b") as file:
        file.truncate(1_000_000)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lay_out,messages",
    [
        (no_data, ["CIFAR-10 was not found", "--dataset=embedded", "--data_dir"]),
        (pickled_data, ["cifar-10-batches-py", "cifar-10-batches-bin"]),
        (truncated_data, ["data_batch_3.bin"]),
    ],
)
@pytest.mark.row(19, 22)
def test_rows_19_21_and_22_bad_data_exit_3(fails, tmp_path, lay_out, messages):
    folder = tmp_path / "data"
    folder.mkdir()
    lay_out(folder)
    # No network, wherever the test runs, and no data of the user's own.
    environ = {
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "HTTP_PROXY": "http://127.0.0.1:9",
        "TFDS_DATA_DIR": str(tmp_path / "empty"),
        "KERAS_HOME": str(tmp_path / "empty"),
        "HOME": str(tmp_path),
    }
    flags = ["--dataset=cifar10", "--data_dir=data", "--workdir=run", "--device=cpu"]
    line = fails(3, TRAIN, *flags, **environ)
    for message in messages:
        assert message in line
    assert not (folder / "executed").exists()


# The evaluation, and what a user sees.


@pytest.mark.slow
@pytest.mark.row(31)
def test_train_evaluate_and_continue_with_the_commands_themselves(
    start, fails, tmp_path
):
    flags = "--dataset=synthetic --width=0.05 --device=cpu --workdir=run".split()
    flags = *flags, "--max_steps=3", "--log_every_steps=1", "--noreport"
    program = start(TRAIN, *flags)
    assert program.wait() == 0, program.output
    lines = program.output.splitlines()
    assert lines[-1] == "done: step 3 of 3 is saved in run"
    assert len(lines) < 25
    chatter = re.compile(r"[WIE]\d{4} |WARNING|.*oneDNN|.*cuda")
    assert not [line for line in lines if chatter.match(line)]

    program = start(EVALUATE, "--workdir=run", "--num_towers=3", "--device=cpu")
    assert program.wait() == 0, program.output
    assert re.search(
        r"^step 3: test accuracy 0\.\d{4} \(\d+ of 2000\); with ",
        program.output,
        re.MULTILINE,
    )
    assert len(program.output.splitlines()) < 20
    assert (tmp_path / "run" / "result.json").exists()
    assert (tmp_path / "run" / "mistakes.csv").exists()

    assert "no checkpoint of step 2" in fails(4, EVALUATE, "--workdir=run", "--step=2")
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "aside")
    assert "holds no checkpoint yet" in fails(4, EVALUATE, "--workdir=run")

"""The exit codes that reliability.md promises to scripts."""

import inspect
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

from towers import errors
from towers.cluster.workers import lost_worker
from towers.messages import MAX_CHARACTERS, one_line

EXIT_CODES = {
    "ConfigError": 2,
    "DataError": 3,
    "DoubtfulExport": 3,
    "CheckpointError": 4,
    "ExportError": 4,
    "RunFolderError": 4,
    "NumericError": 5,
    "StuckError": 6,
    "UnavailableDataError": 75,
    "Preempted": 75,
    "WorkerLostError": 75,  # EX_TEMPFAIL of sysexits.h
}


def test_exit_codes_are_the_promised_ones():
    exit_codes = {
        name: error.exit_code
        for name, error in inspect.getmembers(errors, inspect.isclass)
        if issubclass(error, errors.TowersError) and error is not errors.TowersError
    }
    assert exit_codes == EXIT_CODES


def test_the_page_has_every_exit_code():
    """1 is that of `faulthandler`, which ends a process while TensorFlow holds the
    interpreter's lock."""
    page = (pathlib.Path(__file__).parents[1] / "docs/reliability.md").read_text()
    [table] = re.findall(r"^\| exit code \|.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    listed = re.findall(r"^\| (\d+) \|", table, re.MULTILINE)
    assert list(map(int, listed)) == list(errors.IS_RETRYABLE)
    assert {0, 1, errors.DEFECT, *EXIT_CODES.values()} == set(errors.IS_RETRYABLE)


def test_one_line_is_one_printable_line_of_at_most_400_characters():
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(ValueError()) == "ValueError"
    assert one_line("é \x1b[31m \udcff") == r"é \x1b[31m \udcff"
    line = one_line(f"begins {'x' * 5000} ends")
    assert len(line) == 400 and "\n" not in line
    assert line.startswith("begins xx") and line.endswith("xx ends") and " ... " in line


def test_the_way_out_of_a_message_is_never_cut():
    names = ",".join(f"--an_option_{i}" for i in range(80))
    for begin in "x" * 300, "word " * 500, "x" * 10_000:
        error = errors.ConfigError(f"{begin}; {names}")
        line = one_line(error)
        assert line.endswith(names) and len(line) <= MAX_CHARACTERS


# reliability.md, row 40: memory that is not there.

CPU, GPU = "/job:localhost/replica:0/task:0/device:CPU:0", "/job:worker/device:GPU:"


NO_MEMORY = [
    (
        "Graph execution error:\n\n2 root error(s) found.\n  (0) RESOURCE_EXHAUSTED:  "
        f"OOM when allocating tensor with shape[64,7] and type half on {GPU}1 by "
        f"allocator GPU_1_bfc\n\t [[{{{{node a}}}}]]\n  (1) CANCELLED: x on {GPU}0",
        " on GPU:1: tensor with shape[64,7] and type half",
    ),
    (
        f"{{{{function_node __wrapped__Mul_device_{GPU}0}}}} failed to allocate memory "
        "[Op:Mul]",
        " on GPU:0: failed to allocate memory [Op:Mul]",
    ),
    (
        f"Failed copying input tensor from {CPU} to {GPU}2: "
        "Dst tensor is not initialized.",
        f" on GPU:2: Failed copying input tensor from {CPU} to {GPU}2: "
        "Dst tensor is not initialized.",
    ),
    (
        "Out of memory while trying to allocate 68852648264 bytes.\n\t [[{{node x}}]]",
        ": 68852648264 bytes",
    ),
    (
        "Failed to allocate request for 1.20GiB (1288490188B) on device ordinal 3",
        " on device ordinal 3: 1.20GiB",
    ),
    ("x\nCUBLAS_STATUS_ALLOC_FAILED", ": CUBLAS_STATUS_ALLOC_FAILED"),
    (
        "Detected at node PyFunc\nMemoryError: Unable to allocate 16.0 TiB for x",
        ": 16.0 TiB",
    ),
    (
        "libx.so.2: failed to map segment from shared object",
        ": libx.so.2: failed to map segment from shared object",
    ),
]


@pytest.mark.parametrize("text,expected", NO_MEMORY)
@pytest.mark.row(40)
def test_row_40_no_memory_is_told_with_device_and_size(text, expected):
    """As TensorFlow 2.21 and the libraries below word it, in errors of many types."""
    told = errors.out_of_memory(tf.errors.InternalError(None, None, text))
    assert told == f"out of memory{expected}"


@pytest.mark.row(40)
def test_row_40_what_numpy_cannot_allocate_is_told_and_a_full_disk_is_not_memory():
    with pytest.raises(MemoryError) as caught:
        np.zeros([2**30, 2**27])
    assert errors.out_of_memory(caught.value) == "out of memory: 1.00 EiB"
    full = tf.errors.ResourceExhaustedError(None, None, "x; No space left on device")
    assert errors.out_of_memory(full) == ""


@pytest.mark.parametrize("task,lost", [(0, None), (1, 1)])
@pytest.mark.row(40)
def test_row_40_a_worker_without_memory_is_not_taken_for_a_lost_one(task, lost):
    message = (
        "Detected at node CollectiveReduceV2: OOM when allocating tensor with shape[2] "
        f"and type float on /job:worker/replica:0/task:{task}/device:GPU:0"
    )
    told = lost_worker(message, ["a:1", "b:1"], index=0)
    assert (told and told.number) == lost


@pytest.mark.row(43)
def test_the_chief_does_not_take_itself_for_lost():
    """Two others are suspended: the error of its own service names none of them."""
    message = "Deadline Exceeded. RPC: /tensorflow.CoordinationService/Barrier"
    addresses = ["a:1", "b:1", "c:1"]
    assert lost_worker(message, addresses, index=0).number is None
    assert lost_worker(message, addresses, index=1).number == 0

"""Finds the lost worker in TensorFlow's errors, and reports it to all workers."""

import contextlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from towers import tf_internals
from towers.errors import one_line, out_of_memory

# What a worker tells the others of one that is lost.
_REPORTED = re.compile(r"lost: (worker (\d+) \([^)]*\) (?:ended|does not answer))\.")

# A key that the chief's service has.
_CHIEF = "towers/chief"

# In errors of calls to TensorFlow's service, which is the chief's.
_CALL_TO_CHIEF = "RPC: /tensorflow.CoordinationService/"

_TASK = re.compile(r"/job:worker/(?:replica:0/)?task:(\d+)")

# NCCL, whose errors name no worker.
_NCCL = re.compile(
    r"nccl(?: operation .* failed)?: |nccl(?:Remote|System)Error|ncclCommAbort"
    r"|nccl\w* (?:already )?aborted|remote process exited|closed by remote peer",
    re.IGNORECASE,
)

# An error of CUDA is one of this worker's GPU, and what is invalid is a defect.
_OWN_NCCL = re.compile(
    r"nccl(?: operation .* failed)?: (?:unhandled cuda|invalid)", re.IGNORECASE
)


class LostWorker(NamedTuple):
    """A worker that is gone: its number, None where unknown, and what to say of it."""

    number: int | None
    text: str


def lost_worker(
    message: str, addresses: Sequence[str], index: int
) -> LostWorker | None:
    """The worker that an error tells of; None where the error is of another kind.

    Args:
        message: of an error of TensorFlow.
        addresses: of all workers.
        index: of this one.
    """
    if match := _REPORTED.search(message):
        return LostWorker(int(match[2]), match[1])
    is_collective = "Collective" in message or "oordination" in message
    if not is_collective and not _NCCL.search(message):
        return None
    named = [int(number) for number in _TASK.findall(message)]
    others = [i for i in named if i != index and i < len(addresses)]
    if _CALL_TO_CHIEF in message or (not others and "CoordinationService" in message):
        others = [0]  # it did not answer, perhaps to another worker, named as well
    if others == [0] and not index:
        return LostWorker(None, "other workers do not answer")
    if not others:
        if out_of_memory(message) or _OWN_NCCL.search(message):
            return None  # of this worker
        lines = [line for line in message.splitlines() if _NCCL.search(line)]
        text = one_line(lines[0] if lines else message, 200)
        return LostWorker(None, f"a worker is lost: {text}")
    number, how = others[0], "does not answer"
    if "onnection reset" in message or "Socket closed" in message:
        how = "ended"
        if number and not _chief_answers():
            number, how = 0, "does not answer"  # the other one has noticed that
    return LostWorker(number, f"worker {number} ({addresses[number]}) {how}")


def announce_chief() -> None:
    """The chief does so at its start, for `lost_worker` of the others."""
    tf_internals.set_cluster_value(_CHIEF, "")


def _chief_answers():
    """True if the chief's service answers a worker that cannot reach another."""
    try:
        tf_internals.cluster_value(_CHIEF, 2000)
    except tf.errors.OpError:
        return False
    return True


def tell_others(lost: LostWorker) -> None:
    """Ends the wait of the others, who are not all connected to the lost worker."""
    if lost.number == 0 or not _chief_answers():
        return  # the chief's service is gone: to tell it would wait, for ever
    with contextlib.suppress(tf.errors.OpError):
        tf_internals.report_error_to_cluster(
            tf.errors.UNAVAILABLE, f"lost: {lost.text}."
        )

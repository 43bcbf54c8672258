"""A profile of some steps: a trace for TensorBoard, and its summary."""

import collections
import pathlib
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from towers import console
from towers.errors import ConfigError

# Maximum number of kinds of operations in the summary.
MAX_LISTED = 8

_PICOSECONDS = 1e12


class Profile:
    """A trace of the steps between two numbers of steps, if any, for TensorBoard.

    A context manager, which ends the trace if the run ends within it.
    """

    def __init__(self, steps: Sequence[int], folder: pathlib.Path):
        if steps and not (len(steps) == 2 and 0 <= steps[0] < steps[1]):
            way = "give two numbers of steps, the smaller one first, such as 100,110"
            raise ConfigError(f"profile_steps={','.join(map(str, steps))}: {way}")
        self._steps, self._folder = tuple(steps), folder
        self._is_tracing = self._is_done = False
        self._step = 0

    def steps_to_border(self, step: int) -> float:
        """Return the steps after `step` until the trace begins, or ends."""
        return min((x - step for x in self._steps if x > step), default=float("inf"))

    def at(self, step: int) -> None:
        """Begin or end the trace if it is due; the end prints the summary."""
        self._step = step
        if self._is_tracing and step >= self._steps[1]:
            self._end()
        elif not (self._is_tracing or self._is_done) and step in self._steps[:1]:
            tf.profiler.experimental.start(str(self._folder))
            self._is_tracing = True

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_tracing:
            self._end()
        elif self._steps and not self._is_done:
            first, last = self._steps
            why = f"the run was not at step {first} since its last start"
            console.warn(f"profile_steps={first},{last}: {why}")

    def _end(self):
        self._is_tracing, self._is_done = False, True
        tf.profiler.experimental.stop()
        first = self._steps[0]
        console.line(f"profile of steps {first} to {self._step}, for TensorBoard:")
        for line in summary(self._folder, max(self._step - first, 1)):
            console.line(f"  {line}")


def summary(folder: pathlib.Path, num_steps: int) -> list[str]:
    """Return lines about the slowest operations in the newest trace of a folder."""
    files = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))
    if not files:
        return [f"there is no trace in {folder}"]
    space = xplane_pb2.XSpace.FromString(files[-1].read_bytes())
    planes = [p for p in space.planes if "/device:GPU" in p.name] or space.planes
    secs: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    for plane in planes:
        for event in (event for line in plane.lines for event in line.events):
            kind = _kind(plane, event)
            if kind:
                secs[kind] += event.duration_ps / _PICOSECONDS
                calls[kind] += 1
    total = sum(secs.values())
    return [
        f"{value / total:6.1%}  {1000 * value / num_steps:9.2f} ms and "
        f"{calls[kind] / num_steps:g} calls a step  {kind}"
        for kind, value in secs.most_common(MAX_LISTED)
    ]


def _kind(plane, event):
    """Return the kind of operation of an event, by name or statistics, or None."""
    name = plane.event_metadata[event.metadata_id].name
    for stat in event.stats:
        if plane.stat_metadata[stat.metadata_id].name == "tf_op":
            name = stat.str_value or plane.stat_metadata[stat.ref_value].name
    operation, colon, kind = name.rpartition(":")
    if colon and " " not in name and "::" not in name:
        return kind.removeprefix("_Mkl").removeprefix("Native")
    return name[:50] if "/device:GPU" in plane.name else None

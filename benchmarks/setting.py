"""The setting of one section of `python -m benchmarks.gpu`."""

import dataclasses
import gc
import re
import time
import traceback
from collections.abc import Callable, Mapping

import tensorflow as tf

from benchmarks import measure
from towers.parallel.devices import Devices, configure

NUM_LOGICAL = 4  # two groups of two
LEFT_OUT = "Not measured, as no time was left"


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a section runs, for how long, and where its lines go.

    Attributes:
        device: "cpu", for tiny sizes on logical devices, or "gpu".
        write: takes a line of the report.
        ends_at: on the clock `time.monotonic`; no case is begun that would pass it.
        data_dir: CIFAR-10; empty for synthetic images.
        logical_mb: memory of each device where one GPU is cut into several.
    """

    device: str
    write: Callable[[str], None]
    ends_at: float
    data_dir: str = ""
    logical_mb: float = 3000.0

    @property
    def is_tiny(self) -> bool:
        return self.device == "cpu"

    @property
    def rounds(self) -> int:
        """Rounds of things that run in turn."""
        return 1 if self.is_tiny else 5

    def steps_of_round(self, step_secs: float) -> int:
        """The number of steps that fill a round."""
        return max(1, round((0.03 if self.is_tiny else 0.3) / step_secs))

    @property
    def shares_device(self) -> bool:
        """Whether all towers are logical devices of one physical device."""
        return self.is_tiny or len(tf.config.list_physical_devices("GPU")) == 1

    def devices(self, several: bool = True) -> Devices:
        """Every GPU; logical devices of the CPU, or with `several` of a single GPU."""
        if self.is_tiny:
            return configure("cpu", NUM_LOGICAL, core_per_tower=False)
        if several and self.shares_device:
            return configure("gpu", NUM_LOGICAL, device_memory_mb=self.logical_mb)
        return configure("gpu", 0)

    def dataset(self) -> dict[str, str]:
        """The fields of Config that name the data set."""
        return measure.dataset(self)

    def remark_on(self, devices: Devices) -> None:
        """A line that says which devices the table below is of."""
        count = len(devices.towers)
        cut = self.shares_device and count > 1
        which = (
            f"{count} logical devices of one {devices.kind}"
            if cut
            else (f"{count} device(s) of kind {devices.kind}")
        )
        self.write(f"{which}.\n")

    def table(
        self, columns: str, cases: Mapping[tuple, Callable[[], tuple]]
    ) -> list[tuple]:
        """Writes a table with a row for each case as soon as it is measured.

        A case that fails, or for which no time is left, has the reason in its row; the
        others are still measured.

        Args:
            columns: names of all columns, with bars between them.
            cases: the first cells of a row -> a function that gives the other cells.

        Returns:
            The first cells of cases that failed.
        """
        self.write(measure.table_head(columns))
        failed, left_out, last_secs = [], [], 0.0
        for cells, case in cases.items():
            started = time.monotonic()
            if left_out or started + last_secs > self.ends_at:
                left_out.append(" ".join(map(str, cells)))
                continue
            try:
                self.write(measure.table_row(*cells, *case()))
            except Exception as error:  # such as no memory left: a report goes on
                traceback.print_exc()
                failed.append(cells)
                self.write(measure.table_row(*cells, f"not measured: {reason(error)}"))
            gc.collect()  # the memory of this case's trainers
            last_secs = time.monotonic() - started
        self.write("")
        if left_out:
            self.write(f"{LEFT_OUT}: {'; '.join(left_out)}.\n")
        return failed


def reason(error: BaseException) -> str:
    """An error in one line that fits a table.

    TensorFlow's message ends with nodes, after stacks of Python; the line before the
    first node says what is wrong.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    nodes = [place for place, line in enumerate(lines) if line.startswith("[[")]
    line = lines[max(0, nodes[0] - 1) if nodes else 0]
    line = re.sub(r"^\(0\) [A-Z_]+: +", "", line)  # the first of several
    return f"{type(error).__name__}: {line.replace('|', '/')}"[:300]

"""Machines for the workers of a cluster: network namespaces, each with an address.

Where namespaces cannot be made, which takes root on Linux, all are this machine.
"""

import contextlib
import pathlib
import subprocess
from collections.abc import Iterator, Sequence

from engines.namespaces import Network, namespaces
from processes import ROOT, Program, free_ports


class Machines:
    """Some machines on one network.

    Args:
        addresses: host:port of a worker on each.
        network: None where all are this machine.
    """

    def __init__(self, addresses: Sequence[str], network: Network | None = None):
        self.addresses, self._network = addresses, network

    def start(
        self, index: int, folder: pathlib.Path, *flags: str, count: int = 0
    ) -> Program:
        """A worker that trains on a machine.

        Args:
            index: of the machine, and of the worker.
            folder: where it runs.
            *flags: of run_train.py.
            count: of the workers; by default one on each machine.
        """
        addresses = ",".join(self.addresses[: count or len(self.addresses)])
        place = [f"--cluster={addresses}", f"--task_index={index}"]
        command = [ROOT / "run_train.py", *flags, *place]
        return Program(command, folder, prefix=self._prefix(index))

    @property
    def can_be_cut_off(self) -> bool:
        return self._network is not None

    def plug(self, index: int, state: str) -> None:
        """As `Network.plug`."""
        self._network.plug(index, state)

    def listeners(self) -> list[str]:
        """The addresses on which somebody listens at the workers' ports."""
        found = []
        for index, address in enumerate(self.addresses):
            path = [*self._prefix(index), "cat", "/proc/net/tcp", "/proc/net/tcp6"]
            table = subprocess.run(path, capture_output=True, text=True).stdout
            port = f":{int(address.rpartition(':')[2]):04X}"
            rows = [line.split() for line in table.splitlines()]
            found += [
                f"{address}: {row[1]}"
                for row in rows
                if len(row) > 3 and row[1].endswith(port) and row[3] == "0A"
            ]
        return found

    def _prefix(self, index):
        return self._network.prefix(index) if self._network else []


@contextlib.contextmanager
def machines(count: int) -> Iterator[Machines]:
    """Machines in namespaces where these can be made; removed at the end."""
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(namespaces(count))
        except (OSError, subprocess.CalledProcessError):
            ports = free_ports(count)
            yield Machines([f"127.0.0.1:{port}" for port in ports])
            return
        yield Machines([f"{host}:2222" for host in network.hosts], network)

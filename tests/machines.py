"""Machines for the workers of a cluster: network namespaces, each with an address.

Where namespaces cannot be made, which takes root on Linux, all are this machine.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from processes import ROOT, Program, free_ports


class Machines:
    """Some machines on one network.

    Args:
        addresses: host:port of a worker on each.
        namespaces: of each, or none where all are this machine.
        switch: the namespace of the bridge that they are plugged into.
    """

    def __init__(
        self, addresses: Sequence[str], namespaces: Sequence[str] = (), switch: str = ""
    ):
        self.addresses, self._namespaces, self._switch = addresses, namespaces, switch

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
        prefix = []
        if self._namespaces:
            prefix = ["ip", "netns", "exec", self._namespaces[index]]
        return Program([ROOT / "run_train.py", *flags, *place], folder, prefix=prefix)

    @property
    def can_be_cut_off(self) -> bool:
        return bool(self._namespaces)

    def plug(self, index: int, state: str) -> None:
        """Cuts a machine off the network ("down"), or connects it again ("up")."""
        _ip("-n", self._switch, "link", "set", f"port{index}", state)

    def listeners(self) -> list[str]:
        """The addresses on which somebody listens at the workers' ports."""
        found = []
        for index, address in enumerate(self.addresses):
            path = ["cat", "/proc/net/tcp", "/proc/net/tcp6"]
            if self._namespaces:
                path = ["ip", "netns", "exec", self._namespaces[index], *path]
            table = subprocess.run(path, capture_output=True, text=True).stdout
            port = f":{int(address.rpartition(':')[2]):04X}"
            rows = [line.split() for line in table.splitlines()]
            found += [
                f"{address}: {row[1]}"
                for row in rows
                if len(row) > 3 and row[1].endswith(port) and row[3] == "0A"
            ]
        return found


@contextlib.contextmanager
def machines(count: int) -> Iterator[Machines]:
    """Machines in namespaces where these can be made; removed at the end."""
    switch, names = f"towers-{os.getpid()}", []
    try:
        for index in range(count):
            names.append(f"{switch}-{index}")
        try:
            _connect(switch, names)
        except (OSError, subprocess.CalledProcessError):
            ports = free_ports(count)
            yield Machines([f"127.0.0.1:{port}" for port in ports])
            return
        yield Machines([f"{_address(i)}:2222" for i in range(count)], names, switch)
    finally:
        for name in (switch, *names):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _connect(switch, names):
    if not shutil.which("ip"):
        raise FileNotFoundError("ip")
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")
    for index, name in enumerate(names):
        port = f"port{index}"
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        pair = ["link", "add", "eth0", "type", "veth", "peer", "name", port]
        _ip("-n", name, *pair, "netns", switch)
        _ip("-n", switch, "link", "set", port, "master", "bridge")
        _ip("-n", switch, "link", "set", port, "up")
        _ip("-n", name, "addr", "add", f"{_address(index)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")


def _address(index):
    return f"10.77.0.{index + 1}"


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)

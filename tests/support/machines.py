"""Machines for the workers of a cluster: network namespaces, each with an address.

They are plugged into a bridge, which takes root on Linux and `ip`. Where namespaces
cannot be made, all are this machine.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from processes import ROOT, Program, free_ports

NAMES = "towers-"  # Followed by the number of the process that created them.


class Machines:
    """Machines on one network, with the address host:port of a worker on each.

    `names` are their namespaces, and `switch` that of the bridge; empty if all are this
    machine.
    """

    def __init__(
        self, addresses: Sequence[str], names: Sequence[str] = (), switch: str = ""
    ):
        self.addresses, self._names, self._switch = addresses, names, switch

    def start(
        self, index: int, folder: pathlib.Path, *flags: str, count: int = 0
    ) -> Program:
        """Start a worker; `count` workers take part, by default one on each machine."""
        addresses = ",".join(self.addresses[: count or len(self.addresses)])
        place = [f"--cluster={addresses}", f"--task_index={index}"]
        command = [ROOT / "run_train.py", *flags, *place]
        return Program(command, folder, prefix=self._prefix(index))

    @property
    def can_be_cut_off(self) -> bool:
        return bool(self._names)

    def plug(self, index: int, state: str) -> None:
        """Cut a machine off the network ("down"), or connect it again ("up")."""
        _run("ip", "-n", self._switch, "link", "set", f"port{index}", state)

    def listeners(self) -> list[str]:
        """Return the addresses on which a process listens at the ports of workers."""
        found = []
        for index, address in enumerate(self.addresses):
            path = [*self._prefix(index), "cat", "/proc/net/tcp", "/proc/net/tcp6"]
            table = subprocess.run(path, capture_output=True, text=True, check=False)
            port = f":{int(address.rpartition(':')[2]):04X}"
            rows = [line.split() for line in table.stdout.splitlines()]
            found += [
                f"{address}: {row[1]}"
                for row in rows
                if len(row) > 3 and row[1].endswith(port) and row[3] == "0A"
            ]
        return found

    def _prefix(self, index):
        return ["ip", "netns", "exec", self._names[index]] if self._names else []


@contextlib.contextmanager
def machines(count: int) -> Iterator[Machines]:
    """Create machines, in namespaces if possible; they are removed at the end."""
    switch = f"{NAMES}{os.getpid()}"
    names = [f"{switch}-{index}" for index in range(count)]
    try:
        if not shutil.which("ip"):
            raise FileNotFoundError("ip")
        _remove(lambda pid: not pathlib.Path(f"/proc/{pid}").exists())
        _connect(switch, names)
    except (OSError, subprocess.CalledProcessError):
        yield Machines([f"127.0.0.1:{port}" for port in free_ports(count)])
        return
    try:
        addresses = [f"{_host(index)}:2222" for index in range(count)]
        yield Machines(addresses, names, switch)
    finally:
        _remove(lambda pid: pid == str(os.getpid()))


def _connect(switch, names):
    def inside(name, *arguments):
        _run("ip", "-n", name, *arguments)

    _run("ip", "netns", "add", switch)
    inside(switch, "link", "add", "bridge", "type", "bridge")
    inside(switch, "link", "set", "bridge", "up")
    for index, name in enumerate(names):
        port = f"port{index}"
        _run("ip", "netns", "add", name)
        inside(name, "link", "set", "lo", "up")
        pair = ["link", "add", "eth0", "type", "veth", "peer", "name", port]
        inside(name, *pair, "netns", switch)
        inside(switch, "link", "set", port, "master", "bridge")
        inside(switch, "link", "set", port, "up")
        inside(name, "addr", "add", f"{_host(index)}/24", "dev", "eth0")
        inside(name, "link", "set", "eth0", "up")


def _remove(is_chosen):
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        pid = name.removeprefix(NAMES).split("-")[0]
        if name.startswith(NAMES) and pid.isdigit() and is_chosen(pid):
            _run("ip", "netns", "del", name)


def _host(index):
    return f"10.77.0.{index + 1}"


def _run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout

"""Machines on one network: network namespaces, each plugged into a bridge.

It takes root on Linux, with `ip` and, for links of limited speed, `tc`.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence

NAMES = "towers-"  # and the number of the process that made them


class Network:
    """Some machines.

    Args:
        names: of their namespaces.
        switch: the namespace of the bridge.
    """

    def __init__(self, names: Sequence[str], switch: str):
        self.names, self.switch = names, switch
        self.hosts = [_host(index) for index in range(len(names))]

    def prefix(self, index: int) -> list[str]:
        """The beginning of a command that runs on a machine."""
        return ["ip", "netns", "exec", self.names[index]]

    def plug(self, index: int, state: str) -> None:
        """Cuts a machine off the network ("down"), or connects it again ("up")."""
        _run("ip", "-n", self.switch, "link", "set", f"port{index}", state)

    def limit(self, mbits: float) -> None:
        """Limits what each machine sends, and what it is sent, to 10^6 bits a second,
        headers included; 0 for no limit."""
        for index, name in enumerate(self.names):
            for place, device in ((name, "eth0"), (self.switch, f"port{index}")):
                qdisc = ["tc", "-n", place, "qdisc"]
                # Without one the kernel says that there is none.
                subprocess.run([*qdisc, "del", "dev", device, "root"], **_QUIET)
                if mbits:
                    # What an idle link may send at once: of a millisecond.
                    burst = max(16_000, int(mbits * 125))
                    shape = ["rate", f"{mbits:g}mbit", "burst", str(burst)]
                    shape += ["latency", "50ms"]
                    _run(*qdisc, "add", "dev", device, "root", "tbf", *shape)

    def sent_bytes(self, index: int) -> int:
        """The bytes that a machine has sent, headers included."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(_run(*self.prefix(index), "cat", path))


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[Network]:
    """Machines that are removed at the end; those of a process that was killed before
    it could do so are removed first.

    Raises:
        OSError, subprocess.CalledProcessError: they cannot be made.
    """
    if not shutil.which("ip"):
        raise FileNotFoundError("ip")
    _remove(lambda pid: not pathlib.Path(f"/proc/{pid}").exists())
    switch = f"{NAMES}{os.getpid()}"
    names = [f"{switch}-{index}" for index in range(count)]
    try:
        _connect(switch, names)
        yield Network(names, switch)
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
            subprocess.run(["ip", "netns", "del", name], **_QUIET)


def _host(index):
    return f"10.77.0.{index + 1}"


_QUIET = {"check": False, "capture_output": True}


def _run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout

"""Machines on one network: network namespaces, each plugged into a bridge.

It takes root on Linux, with `ip` and, for links of limited speed, `tc`.
"""

import collections
import contextlib
import fcntl
import os
import pathlib
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence

NAMES = "towers-"  # and the number of the process that made them

# Of linux/if_tun.h: ioctl requests; a device of Ethernet frames, each with a header for
# offloading; checksums and segments of TCP are left to the other end.
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 0x01, 0x02, 0x04


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


class Relay(threading.Thread):
    """Links that take time. Each is a pair of TAP devices, and this thread carries the
    frames from one to the other. The kernel's own `netem` is not always there.

    Args:
        secs: from one end of a link to the other.
    """

    def __init__(self, secs: float):
        super().__init__(daemon=True)
        self._secs = secs
        self._other_end: dict[int, int] = {}
        self._is_done = False

    def connect(self, ends: Sequence[tuple[str, str]]) -> None:
        """Makes a link. `ends`: the namespace and the name of each device."""
        taps = [_create_tap(*end) for end in ends]
        self._other_end |= dict(zip(taps, reversed(taps), strict=True))

    def run(self) -> None:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -20)
        under_way = collections.deque()
        while not self._is_done:
            wait = max(0, under_way[0][0] - time.monotonic()) if under_way else 0.1
            for tap in select.select(list(self._other_end), [], [], wait)[0]:
                due = time.monotonic() + self._secs
                with contextlib.suppress(BlockingIOError):
                    while True:
                        frame = os.read(tap, 70_000)
                        under_way.append((due, self._other_end[tap], frame))
            while under_way and under_way[0][0] <= time.monotonic():
                _, tap, frame = under_way.popleft()
                with contextlib.suppress(OSError):  # a link that is down
                    os.write(tap, frame)

    def close(self) -> None:
        self._is_done = True
        if self.is_alive():
            self.join()
        for tap in self._other_end:
            os.close(tap)


@contextlib.contextmanager
def namespaces(count: int, delay: float = 0.0) -> Iterator[Network]:
    """Machines that are removed at the end; those of a process that was killed before
    it could do so are removed first.

    Args:
        count: of the machines.
        delay: seconds from one machine to another, of whatever is sent.

    Raises:
        OSError, subprocess.CalledProcessError: they cannot be made.
    """
    if not shutil.which("ip"):
        raise FileNotFoundError("ip")
    _remove(lambda pid: not pathlib.Path(f"/proc/{pid}").exists())
    switch = f"{NAMES}{os.getpid()}"
    names = [f"{switch}-{index}" for index in range(count)]
    relay = Relay(delay / 2) if delay else None  # two links from machine to machine
    try:
        _connect(switch, names, relay)
        if relay:
            relay.start()
        yield Network(names, switch)
    finally:
        if relay:
            relay.close()
        _remove(lambda pid: pid == str(os.getpid()))


def _create_tap(namespace, name):
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    temporary = f"tap{os.getpid()}"
    flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", temporary.encode(), flags))
    fcntl.ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
    _run("ip", "link", "set", temporary, "netns", namespace, "name", name)
    return tap


def _connect(switch, names, relay):
    def inside(name, *arguments):
        _run("ip", "-n", name, *arguments)

    _run("ip", "netns", "add", switch)
    inside(switch, "link", "add", "bridge", "type", "bridge")
    inside(switch, "link", "set", "bridge", "up")
    for index, name in enumerate(names):
        port = f"port{index}"
        _run("ip", "netns", "add", name)
        inside(name, "link", "set", "lo", "up")
        if relay:
            relay.connect([(name, "eth0"), (switch, port)])
        else:
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

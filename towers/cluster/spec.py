"""The cluster of a run: the addresses of its workers, and the index of this one.

It comes from --cluster and --task_index, from TF_CONFIG, or from the variables of
Slurm. Nothing listens or connects here.
"""

import collections
import contextlib
import dataclasses
import ipaddress
import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from towers.errors import ConfigError
from towers.messages import program

# Jobs in TF_CONFIG, in the order of their tasks: the first task is the chief.
_JOBS = ("chief", "master", "worker")

# A name, an address of IPv4, or one of IPv6 in brackets; then the port.
_ADDRESS = re.compile(
    r"(?:[\w.-]+|\[[0-9A-F:.]+(?:%[\w.-]+)?\]):([0-9]{1,5})", re.ASCII | re.IGNORECASE
)

# Addresses of this machine (Linux); each line begins with 32 hexadecimal digits.
_IPV6_TABLE = "/proc/net/if_inet6"

_PRIVATE_HINT = (
    "the server of TensorFlow knows no passwords: use a private network, or "
    "--allow_public_address if a firewall protects it"
)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The workers of a run."""

    addresses: tuple[str, ...]  # host:port of each worker
    index: int  # of this worker
    origin: str  # what described them, such as "--cluster"

    @property
    def size(self) -> int:
        """Return the number of workers."""
        return len(self.addresses)

    @property
    def address(self) -> str:
        """Return the address of this worker."""
        return self.addresses[self.index]


def find_cluster(
    addresses: str = "",
    index: int | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    reads_slurm: bool = True,
) -> Cluster | None:
    """Return the cluster of --cluster and --task_index or the environment, if any.

    Slurm is read last, and for a strategy with workers only: its variables are there in
    every job, such as a sweep of single processes. ConfigError if a description is
    wrong, or two contradict each other.
    """
    by_flags = _read_flags(addresses, index)
    by_tf_config = _read_tf_config(environ.get("TF_CONFIG", ""))
    if by_flags and by_tf_config:
        same = dataclasses.replace(by_tf_config, origin=by_flags.origin)
        if by_flags != same:
            why = f"{_described(by_flags)}, but {_described(by_tf_config)}"
            raise ConfigError(f"{why}; unset TF_CONFIG or drop --cluster")
    spec = by_flags or by_tf_config
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS", "1") if reads_slurm else "1"
    if spec is None and num_tasks != "1":
        spec = _read_slurm(environ)
    return spec


def validate_addresses(cluster: Cluster, allow_public: bool = False) -> None:
    """Raise ConfigError if anybody can reach an address of a cluster."""
    if allow_public:
        return
    for address in cluster.addresses:
        host = address.rpartition(":")[0].strip("[]")
        for ip in _ips_of(host):
            if ip.is_global:
                name = host if host == str(ip) else f"{host} ({ip})"
                why = f"{name} is a public address; {_PRIVATE_HINT}"
                raise ConfigError(f"{cluster.origin}: {why}")
    for ip in _own_ips():
        if ip.is_global:
            why = f"this machine has the public address {ip}; {_PRIVATE_HINT}"
            raise ConfigError(f"{cluster.origin}: {why}")


def _read_flags(addresses, index):
    if not addresses and index is None:
        return None
    if not addresses or index is None:
        given = f"--cluster={addresses}" if addresses else f"--task_index={index}"
        missing = "--task_index" if addresses else "--cluster"
        raise ConfigError(f"{given} needs {missing}; give both or none of them")
    return _checked([x.strip() for x in addresses.split(",")], index, "--cluster")


def _read_tf_config(text):
    if not text.strip():
        return None
    try:
        described = json.loads(text)
        jobs = described.get("cluster") or {}
        task = described.get("task") or {}
        kind, index = task.get("type"), task.get("index", 0)
        lists = {job: list(addresses) for job, addresses in jobs.items()}
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        way = 'should be {"cluster": {"worker": ["a:1", "b:1"]}, "task": '
        way += '{"type": "worker", "index": 0}}, with other addresses and index'
        raise ConfigError(f"TF_CONFIG is invalid: {error}; it {way}") from None
    if not lists:
        return None  # a single process
    others = sorted(set(lists) - set(_JOBS) - {"evaluator"})
    if others or kind not in _JOBS:
        why = f"TF_CONFIG has the task type {others[0] if others else kind!r}"
        way = f"workers train, the first one is the chief; {program('eval')} evaluates"
        raise ConfigError(f"{why}: {way}")
    tasks = {(job, i): x for job in _JOBS for i, x in enumerate(lists.get(job, ()))}
    if type(index) is not int or (kind, index) not in tasks:
        raise ConfigError(f"TF_CONFIG has no task {index!r} of the type {kind!r}")
    number = list(tasks).index((kind, index))
    return _checked(list(tasks.values()), number, "TF_CONFIG")


def _read_slurm(environ):
    """Read the step of Slurm, one task per worker, by TensorFlow's resolver."""
    needed = ("SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
    missing = [name for name in needed if name not in environ]
    if missing:
        why = f"SLURM_STEP_NUM_TASKS without {', '.join(missing)}"
        raise ConfigError(f"{why}; start the workers with srun")
    import tensorflow as tf

    try:
        num_tasks = int(environ["SLURM_STEP_NUM_TASKS"])
        # Slurm shows each task its own GPUs.
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            gpus_per_node=num_tasks, gpus_per_task=1, auto_set_gpu=False
        )
        tasks = resolver.cluster_spec().as_dict()["worker"]
        _, index = resolver.get_task_info()
    except (ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"the variables of Slurm: {error}") from None
    if index is None:
        why = f"the step has {len(tasks)} tasks, counted from 0"
        raise ConfigError(f"SLURM_PROCID={environ['SLURM_PROCID']}: {why}")
    cluster = _checked(tasks, index, "Slurm")
    node = environ.get("SLURMD_NODENAME", cluster.address.rpartition(":")[0])
    if not cluster.address.startswith(f"{node}:"):
        # The resolver sorts names as texts.
        why = f"Slurm runs task {index} on {node}, not on {cluster.address}"
        way = "take nodes of equally long names, or set --cluster and --task_index"
        raise ConfigError(f"{why}; {way}")
    return cluster


def _checked(addresses: Sequence[Any], index: int, origin: str) -> Cluster:
    for address in addresses:
        named = isinstance(address, str) and _ADDRESS.fullmatch(address)
        if not named or not 0 < int(named[1]) < 65536:
            why = f"{address!r} is not the address of a worker, such as 10.0.0.1:2222"
            raise ConfigError(f"{origin}: {why}")
    for address, count in collections.Counter(addresses).items():
        if count > 1:
            raise ConfigError(f"{origin} names {address} twice")
    if not 0 <= index < len(addresses):
        why = f"{origin} names {len(addresses)} workers, and this is number {index}"
        raise ConfigError(f"{why}, counted from 0")
    return Cluster(tuple(addresses), index, origin)


def _described(cluster):
    place = f"worker {cluster.index} of {cluster.size} at {cluster.address}"
    return f"{cluster.origin} makes this {place}"


def _ips_of(host):
    """Return the addresses of a host; none if its name is not known yet."""
    try:
        entries = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return []
    ips = {ipaddress.ip_address(x[4][0].partition("%")[0]) for x in entries}
    return sorted(ips, key=str)


def _own_ips():
    """Yield the addresses of this machine that the system reports."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                request = name.encode()[:15].ljust(256, b"\0")
                try:
                    answer = fcntl.ioctl(probe, 0x8915, request)  # SIOCGIFADDR
                except OSError:
                    continue  # it has no address
                yield ipaddress.IPv4Address(answer[20:24])
    except (ImportError, OSError):
        pass
    with contextlib.suppress(OSError), open(_IPV6_TABLE) as table:
        for line in table:
            yield ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))

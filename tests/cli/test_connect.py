"""The wait for other workers, among strangers; TensorFlow's server is not started."""

import concurrent.futures
import contextlib
import socket
import threading

import pytest
from processes import free_ports, on_linux

from towers.cluster.agreement import wait_for_all
from towers.errors import ConfigError, WorkerLostError

# The first frame of a server of gRPC: length 6, type 4. RFC 9113, 6.5.
SETTINGS = bytes([0, 0, 6, 4, 0, 0, 0, 0, 0]) + bytes(6)


def addresses_of(count, host="127.0.0.1"):
    return [f"{host}:{port}" for port in free_ports(count)]


@contextlib.contextmanager
def server_of(greeting, address):
    """What listens at the port of an address, and greets everybody."""
    stop, port = threading.Event(), int(address.rpartition(":")[2])
    with socket.create_server(
        ("", port), family=socket.AF_INET6, dualstack_ipv6=True
    ) as server:
        server.settimeout(0.1)

        def serve():
            while not stop.is_set():
                with contextlib.suppress(OSError), server.accept()[0] as other:
                    other.sendall(greeting)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        stop.set()
        thread.join()


@contextlib.contextmanager
def started(addresses, index, secs=20):
    """A worker that waits for the others, then has a server; its future."""
    end, found = threading.Event(), concurrent.futures.Future()

    def work():
        try:
            wait_for_all(addresses, index, secs)
        except Exception as error:
            found.set_exception(error)
            return
        with server_of(SETTINGS, addresses[index]):
            found.set_result(None)
            end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield found
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_workers_find_each_other_in_any_order(host):
    addresses = addresses_of(3, host)
    with contextlib.ExitStack() as stack:
        for found in [stack.enter_context(started(addresses, i)) for i in (2, 0, 1)]:
            found.result(20)


def test_a_worker_that_does_not_come_is_named():
    addresses = addresses_of(2)
    with pytest.raises(WorkerLostError) as caught:
        wait_for_all(addresses, 0, 0.1)
    assert f"worker 1 ({addresses[1]}) did not come within 0.1 s" in str(caught.value)


def test_a_host_name_that_does_not_resolve_is_said_at_once(capsys, monkeypatch):
    monkeypatch.setattr("towers.cluster.agreement.NAME_SECS", 0.2)
    addresses = [*addresses_of(2), "no-such-host.invalid:2222"]
    with started(addresses, 1), pytest.raises(WorkerLostError) as caught:
        wait_for_all(addresses, 0, 20)
    assert "within 0.2 s" in str(caught.value)
    for text in str(caught.value), capsys.readouterr().out:
        assert "worker 2 (no-such-host.invalid:2222)" in text
        assert "does not resolve" in text


def test_a_host_name_may_resolve_late(monkeypatch):
    addresses, connect = addresses_of(2), socket.create_connection
    refusals = iter([socket.gaierror(-2, "Name or service not known")] * 3)

    def resolve(*args):
        if error := next(refusals, None):
            raise error
        return connect(*args)

    monkeypatch.setattr("towers.cluster.agreement.socket.create_connection", resolve)
    with started(addresses, 1):
        wait_for_all(addresses, 0, 20)
    assert next(refusals, None) is None


def test_what_is_no_worker_is_refused_and_a_server_of_grpc_is_taken():
    addresses = addresses_of(2)
    greeting, message = b"SSH-2.0-OpenSSH_9.2\r\n", "says that it is 'SSH-2"
    with (
        server_of(greeting, addresses[1]),
        pytest.raises(ConfigError, match=message) as caught,
    ):
        wait_for_all(addresses, 0, 20)
    assert f"worker 1 ({addresses[1]})" in str(caught.value)
    with server_of(SETTINGS, addresses[1]):
        wait_for_all(addresses, 0, 20)


@on_linux
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.row(29)
def test_row_29_a_machine_that_finds_itself_as_another_worker_is_refused(index):
    """With the same port everywhere, as --task_index was given to the other machine."""
    port = addresses_of(1)[0].rpartition(":")[2]
    addresses = [f"127.0.0.{i}:{port}" for i in (1, 2)]
    with pytest.raises(ConfigError) as caught:
        wait_for_all(addresses, index, 20)
    other = 1 - index
    who = f"worker {other} ({addresses[other]}) says that it is 'worker {index} of "
    assert str(caught.value).startswith(who)

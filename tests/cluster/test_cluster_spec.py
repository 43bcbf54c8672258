"""Descriptions of a cluster: what is read, and what is refused, before it starts."""

import contextlib
import ipaddress
import json

import pytest

from towers.cluster import spec
from towers.cluster.spec import Cluster, find_cluster, validate_addresses
from towers.errors import ConfigError


@contextlib.contextmanager
def refused(*words):
    with pytest.raises(ConfigError) as caught:
        yield
    assert all(word in str(caught.value) for word in words)


def tf_config(jobs, kind="worker", index=0):
    return json.dumps({"cluster": jobs, "task": {"type": kind, "index": index}})


def found(addresses="", index=None, **environ):
    return find_cluster(addresses, index, environ)


def test_without_a_description_there_is_no_cluster():
    assert found() is None
    assert found(TF_CONFIG="") is None
    assert found(TF_CONFIG='{"cluster": {}}') is None
    assert found(SLURM_JOB_ID="7", SLURM_STEP_NUM_TASKS="1") is None


def test_flags_name_the_workers_and_this_one():
    by_flags = found("10.0.0.1:2222, [fd00::2]:2223,node_1.local-net:80", 1)
    addresses = ("10.0.0.1:2222", "[fd00::2]:2223", "node_1.local-net:80")
    assert by_flags.addresses == addresses
    assert (by_flags.size, by_flags.address) == (3, "[fd00::2]:2223")
    assert found("[fe80::1%eth0]:65535,a:1", 0).size == 2


def test_tf_config_counts_the_chief_first():
    jobs = {"worker": ["b:1", "c:1"], "chief": ["a:1"], "evaluator": ["d:1"]}
    for kind, index, place in (("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)):
        by_variable = found(TF_CONFIG=tf_config(jobs, kind, index))
        assert by_variable.addresses == ("a:1", "b:1", "c:1")
        assert by_variable.index == place


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "1",
}


@pytest.fixture
def slurm(monkeypatch):
    """What is found in a step of Slurm with such variables."""

    def find(addresses="", index=None, **changes):
        step = SLURM | changes
        for name, value in step.items():  # TensorFlow reads those of the process
            monkeypatch.setenv(name, value)
        return found(addresses, index, **step)

    return find


def test_slurm_is_read_by_tensorflows_resolver(slurm):
    by_slurm = slurm()
    assert by_slurm.addresses == ("n01:8888", "n01:8889", "n02:8888")
    assert (by_slurm.index, by_slurm.origin) == (1, "Slurm")
    assert slurm("a:1,b:1", 0).addresses == ("a:1", "b:1")
    assert find_cluster(environ=SLURM, reads_slurm=False) is None  # a sweep
    of_long_numbers = slurm(
        SLURM_STEP_NODELIST="n[000000998-000001000]", SLURM_STEP_TASKS_PER_NODE="1(x3)"
    )
    assert of_long_numbers.addresses == tuple(
        f"n00000{number}:8888" for number in ("0998", "0999", "1000")
    )


TWO = "a:1,b:1"


@pytest.mark.parametrize(
    "addresses,index,text,words",
    [
        (TWO, None, "", "--task_index"),
        (TWO, 2, "", "number 2"),
        ("a:1,a:1", 0, "", "twice"),
        ("a:1,b:65536", 0, "", "'b:65536'"),
        ("a:1,b:٣", 0, "", "'b:٣'"),
        ("a:1,fd00::2:5", 0, "", "'fd00::2:5'"),
        (TWO, 0, tf_config({"worker": ["a:1", "b:1"]}, index=1), "unset"),
        (TWO, 0, tf_config({"worker": ["a:1", "c:1"]}), "unset"),
        ("", None, "{", "TF_CONFIG"),
        ("", None, '{"cluster": {"worker": ["a:1"]}}', "task type None"),
        ("", None, tf_config({"worker": ["a:1"], "ps": ["b:1"]}), "'ps'"),
        ("", None, tf_config({"worker": ["a:1"]}, "evaluator"), "run_eval.py"),
    ],
)
def test_wrong_descriptions_are_refused_by_name(addresses, index, text, words):
    with refused(words):
        found(addresses, index, TF_CONFIG=text)


# Addresses.


def of_two(*addresses):
    return Cluster(addresses, 0, "--cluster")


@pytest.fixture
def private_machine(monkeypatch):
    monkeypatch.setattr(spec, "_own_ips", lambda: [ipaddress.ip_address("10.1.2.3")])


def test_private_addresses_and_unknown_names_are_taken(private_machine):
    validate_addresses(of_two("127.0.0.1:39999", "10.2.3.4:1"))
    validate_addresses(of_two("localhost:39999", "name.invalid:1"))


@pytest.mark.parametrize("address", ["8.8.8.8:1", "[2001:4860:4860::8888]:1"])
@pytest.mark.row(33)
def test_row_33_public_addresses_are_refused_unless_allowed(private_machine, address):
    with refused("public address", "--allow_public_address"):
        validate_addresses(of_two("127.0.0.1:39999", address))
    validate_addresses(of_two("127.0.0.1:39999", address), allow_public=True)


@pytest.mark.row(33)
def test_row_33_a_public_address_of_this_machine_is_refused(monkeypatch):
    monkeypatch.setattr(spec, "_own_ips", lambda: [ipaddress.ip_address("8.8.4.4")])
    with refused("8.8.4.4", "--allow_public_address"):
        validate_addresses(of_two("127.0.0.1:39999", "10.2.3.4:1"))

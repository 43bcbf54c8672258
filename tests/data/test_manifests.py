"""The files of docs/cluster/ and the Dockerfile."""

import os
import pathlib
import re
import subprocess

import pytest
import yaml

from towers import errors
from towers.cluster.spec import find_cluster

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "docs" / "cluster"
BATCH_SCRIPT = CLUSTER / "slurm.sbatch"

# Exit codes after which the same command is not started again.
FINAL = {
    code
    for code, is_retryable in errors.IS_RETRYABLE.items()
    if code and not is_retryable
}


# Kubernetes.


# Kind -> its document.
MANIFEST = (CLUSTER / "kubernetes-job.yaml").read_text()
DOCUMENTS = {d["kind"]: d for d in yaml.safe_load_all(MANIFEST)}
JOB, SERVICE = DOCUMENTS["Job"], DOCUMENTS["Service"]
POD = JOB["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]
[PORT] = CONTAINER["ports"]


def environment(index):
    """The variables of the container as the kubelet sets them in a Job."""
    job_sets = {"metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    found = {}
    for variable in CONTAINER["env"]:
        if "value" in variable:
            above = re.sub(
                r"\$\((\w+)\)", lambda m: found.get(m[1], m[0]), variable["value"]
            )
            found[variable["name"]] = above
        else:
            assert variable["valueFrom"]["fieldRef"]["fieldPath"] in job_sets
            found[variable["name"]] = str(index)
    return found


def test_tf_config_names_the_pods_of_the_job(monkeypatch):
    import tensorflow as tf

    spec, name = JOB["spec"], JOB["metadata"]["name"]
    port = SERVICE["spec"]["ports"][0]["port"]
    # A pod's host name is that of the job with its index; the headless service of the
    # name in `subdomain` puts it into the cluster's DNS.
    assert spec["completionMode"] == "Indexed"
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    count = spec["completions"]
    assert spec["parallelism"] == count > 1
    hosts = [f"{name}-{i}.{POD['subdomain']}:{port}" for i in range(count)]
    for index in range(count):
        variables = environment(index)
        monkeypatch.setenv("TF_CONFIG", variables["TF_CONFIG"])
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        assert resolver.cluster_spec().as_dict() == {"worker": hosts}
        assert (resolver.task_type, resolver.task_id) == ("worker", index)
        place = find_cluster(environ=variables)
        assert (place.addresses, place.index) == (tuple(hosts), index)
    assert PORT["containerPort"] == port


def test_the_job_ends_or_starts_again_by_the_exit_code():
    rules = JOB["spec"]["podFailurePolicy"]["rules"]
    actions = {}
    for rule in rules:
        if codes := rule.get("onExitCodes"):
            assert codes["operator"] == "In"
            assert codes["containerName"] == CONTAINER["name"]
            actions |= dict.fromkeys(codes["values"], rule["action"])
    again = {errors.Preempted.exit_code}
    assert actions == dict.fromkeys(FINAL, "FailJob") | dict.fromkeys(again, "Ignore")
    # What the API server asks for where there is a podFailurePolicy.
    assert POD["restartPolicy"] == "Never"
    assert JOB["spec"]["podReplacementPolicy"] == "Failed"


# Slurm.

PYTHON_STUB = """#!/bin/bash
echo "$SLURM_PROCID $*" >>called
code=$(sed -n "$((SLURM_PROCID + 1))p" codes)
[ "$code" = killed ] && kill -KILL $$
exit "$code"
"""

# Runs as many tasks as there are lines in `codes`, and ends as the manual page says:
# with the highest exit code of all, 128 + signal for a task that a signal ended.
SRUN_STUB = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
[ -e cancelled ] && kill -TERM $PPID
highest=0
for ((i = 0; i < $(wc -l <codes); i++)); do
    SLURM_PROCID=$i "$@"
    code=$?
    ((code > highest)) && highest=$code
done
exit $highest
"""


def run_batch_script(folder, codes, **variables):
    """The exit code of the batch script, and whether it asked to be requeued.

    Each of the `codes` is that of a worker, or "killed".
    """
    programs = {
        "bin/srun": SRUN_STUB,
        "bin/scontrol": '#!/bin/bash\necho "$@" >requeued\n',
        ".venv/bin/python": PYTHON_STUB,
    }
    for name, text in programs.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (folder / "codes").write_text("".join(f"{code}\n" for code in codes))
    paths = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", BATCH_SCRIPT, "--config=quickstart", "--workdir=/a b"],
        cwd=folder,
        env={"PATH": paths, "SLURM_JOB_ID": "17"} | variables,
        timeout=60,
        check=False,
    )
    requeued = folder / "requeued"
    assert not requeued.exists() or requeued.read_text() == "requeue 17\n"
    return done.returncode, requeued.exists()


@pytest.mark.parametrize(
    "codes,expected",
    [
        ([0, 0, 0], (0, False)),
        ([75, 75, 75], (75, True)),
        ([75, "killed", 75], (137, True)),
        (["killed", 75, 75], (137, True)),
        ([75, 70, 75], (75, True)),
        *[([75, code, "killed"], (200, False)) for code in (*sorted(FINAL), 127)],
    ],
    ids=str,
)
def test_slurm_starts_again_what_a_restart_mends(tmp_path, codes, expected):
    assert run_batch_script(tmp_path, codes) == expected
    arguments = (
        "run_train.py --strategy=multi_worker --config=quickstart --workdir=/a b"
    )
    called = (tmp_path / "called").read_text().splitlines()
    assert called == [f"{i} {arguments}" for i in range(len(codes))]

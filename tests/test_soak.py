"""A run of 20,000 steps holds as much at its end as at its beginning."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import soak

NUM_STEPS, EVERY_STEPS = 20_000, 1000
WARM_UP_STEPS = 4000
SCRIPT = pathlib.Path(__file__).with_name("soak.py")


@pytest.mark.slow
def test_a_long_run_grows_neither_in_memory_nor_in_what_it_holds(tmp_path, count):
    workdir = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, SCRIPT, workdir, str(NUM_STEPS), str(EVERY_STEPS)],
        # glibc then gives back what was freed; else it keeps 8 MB more now and then.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("{")]
    samples = [json.loads(line) for line in said]
    assert [s["step"] for s in samples] == [
        *range(EVERY_STEPS, NUM_STEPS + 1, EVERY_STEPS)
    ]
    steady = [sample for sample in samples if sample["step"] >= WARM_UP_STEPS]
    first = steady[0]

    rss_mb = [sample["rss_mb"] for sample in steady]
    assert max(rss_mb) - min(rss_mb) < 5, rss_mb
    # A checkpoint that is being written has a thread, and up to three open files.
    assert {s["threads"] - first["threads"] for s in steady} <= {-1, 0, 1}
    assert {s["files"] - first["files"] for s in steady} <= {*range(-3, 4)}
    assert steady[-1]["objects"] - first["objects"] < 500

    # What is due by the periods, and no more: the first step is logged too.
    num_logs, num_evaluations = (
        NUM_STEPS // soak.LOG_EVERY + 1,
        NUM_STEPS // soak.EVAL_EVERY,
    )
    lines = done.stdout.splitlines()
    assert 0 <= len(lines) - num_logs - num_evaluations < 30
    records = (workdir / "metrics.jsonl").read_bytes()
    assert records.count(b"\n") == num_logs
    assert len(records) < 500 * num_logs
    [events] = (workdir / "tensorboard" / "train").iterdir()
    num_summaries = NUM_STEPS // soak.SUMMARY_EVERY
    assert events.stat().st_size < 15_000 * num_summaries  # with all scalars
    assert len(list((workdir / "checkpoints").iterdir())) == 2
    count("steps soaked", NUM_STEPS)

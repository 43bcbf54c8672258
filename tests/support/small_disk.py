"""A small disk of a test's own; conftest.py imports the fixture."""

import subprocess

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 1 MiB; the test is skipped where none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a small disk can be mounted only by root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)

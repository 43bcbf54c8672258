"""The folder of a run: its files, and the lock of the process that trains there.

config.json        the configuration of the run
dataset_info.json  class names and preprocessing of its data set
checkpoints/       one folder per save
network.json       the network, if a Python program gave it
metrics.jsonl      one line per logged step
tensorboard/       event files
result.json        the last evaluation by run_eval.py
best               name of the checkpoint of the best evaluation on held-out images
mistakes.csv       test images that the network predicts wrongly
calibration.json   the temperature of its probabilities
rejection.json     the probability below which an image is of no class
suspects.csv       images whose label is probably wrong
thresholds.json    probability per class from which it is predicted, for label sets
report/            index.html and report.json; a comparison with other runs
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import re
import socket
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from towers import console, store
from towers.config import parse_json
from towers.config.options import check_path
from towers.data.files.paths import data_folder
from towers.data.files.reading import is_url
from towers.errors import JOB, ConfigError, RunFolderError, WorkerLostError
from towers.messages import one_line

# Names of what a run writes in its folders; other files belong to the user.
_CHECKPOINT = re.compile(r"step-[0-9]{8,}|\.tmp-.*")
# Event files of other programs end with one more number or a version.
_EVENTS = re.compile(r"events\.out\.tfevents\.\d+\.(?!.*\.\d+\.\d+$).+\.\d+")
_TRACE = re.compile(r".*\.(xplane\.pb|trace(\.json)?(\.gz)?)")
_REPORT = re.compile(r"(index|compare)\.html|report\.json")

# The names of runs in trackers, see `callbacks`.
_TRACKED = ".mlflow-run", ".wandb-run"

# Environment variables that name a job and survive its restarts. Several commands of a
# Slurm allocation share the second one.
_JOBS = JOB, "SLURM_JOB_ID"

_LOCK = ".lock"
_MAX_BYTES = 4096  # of the text in the lock file
HINT = "wait for it, stop it, or choose another --workdir"
_GONE = errno.ENOENT, errno.ENOTDIR, errno.ESTALE


class RunFolder:
    """The paths of a run; ConfigError for a text that cannot be a folder."""

    def __init__(self, workdir: str | os.PathLike):
        check_path("workdir", workdir)
        if not os.fspath(workdir):
            raise ConfigError("workdir is empty; give the folder of a run")
        self.path = pathlib.Path(os.path.expanduser(workdir))
        if os.path.realpath(self.path) == os.sep:
            raise ConfigError(f"workdir={workdir} is the root; choose another folder")
        self.config = self.path / "config.json"
        self.dataset_info = self.path / "dataset_info.json"
        self.network = self.path / "network.json"
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        evaluated = "test", "validation", "eval"
        names = "train", *evaluated, *(f"{name}_ema" for name in evaluated)
        self.boards = tuple(self.tensorboard / name for name in names)
        self.best = self.path / "best"
        self.result = self.path / "result.json"
        self.mistakes = self.path / "mistakes.csv"
        self.thresholds = self.path / "thresholds.json"
        self.calibration = self.path / "calibration.json"
        self.rejection = self.path / "rejection.json"
        self.suspects = self.path / "suspects.csv"
        self.report = self.path / "report"
        self._job = self.path / ".overwritten-by"
        self._is_new = False

    def create(self) -> None:
        """Create the folder; raise ConfigError if it cannot be written."""
        self._validate_name()
        self._is_new = not os.path.exists(self.path)
        try:
            store.make_folders(self.path)
            for folder in (self.path, self.checkpoints):
                if folder.exists():
                    tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise self._not_writable(error.strerror) from None

    def validate(self) -> None:
        """Raise the ConfigError of `create` or `lock` without writing anything."""
        self._validate_name()
        nearest, code = nearest_existing(self.checkpoints), 0
        if not os.path.isdir(nearest):
            code = errno.ENOTDIR
        elif os.statvfs(nearest).f_flag & os.ST_RDONLY:
            code = errno.EROFS
        elif not os.access(nearest, os.W_OK | os.X_OK):
            code = errno.EACCES
        if code:
            raise self._not_writable(os.strerror(code))
        if (about := self.holder()) is not None:
            raise ConfigError(f"{busy(self.path, about)}; {HINT}")

    def _validate_name(self):
        if re.search(r"[\[\\]", str(self.path)):
            raise ConfigError(
                f"workdir={self.path}: TensorFlow cannot read checkpoints in a path "
                "with a bracket or a backslash; choose another --workdir"
            )
        if os.fsencode(self.path) != str(self.path).encode(errors="surrogatepass"):
            raise ConfigError(
                f"the run folder {self.path} cannot be written: its name is not UTF-8, "
                "or Python does not use UTF-8 (PYTHONUTF8=1); choose another --workdir"
            )

    def _not_writable(self, reason):
        return ConfigError(
            f"the run folder {self.path} cannot be written: {reason}; choose another "
            "--workdir"
        )

    def validate_not_inside_data(
        self, teacher: str, dataset: str, data_dir: str
    ) -> None:
        """Raise ConfigError if the folder is the teacher's or among the images."""
        path = pathlib.Path(os.path.realpath(self.path))
        if teacher and os.path.realpath(os.path.expanduser(teacher)) == str(path):
            raise ConfigError(
                f"teacher={teacher} is the run itself; choose another --workdir"
            )
        if dataset == "image_folder" and not is_url(data_dir):
            data_dir = data_folder(data_dir)
            if path.is_relative_to(os.path.realpath(data_dir)):
                raise ConfigError(
                    f"workdir={self.path} is in data_dir={data_dir}, where folders are "
                    "classes; choose another one"
                )

    def files(self) -> tuple[pathlib.Path, ...]:
        """Return the paths of the small files of a run."""
        stored = self.config, self.dataset_info, self.network, self.metrics, self.best
        results = self.result, self.mistakes, self.thresholds, self.calibration
        return *stored, *results, self.rejection, self.suspects

    def write_network(self, architecture: str) -> None:
        """Write network.json, or raise ConfigError: a run needs this file."""
        try:
            store.write_aside(self.network, architecture)
        except OSError as error:
            reason = f"cannot be written: {error.strerror}"
            raise ConfigError(f"{self.network} {reason}") from None

    def clear(self) -> list[pathlib.Path]:
        """Remove the files of earlier runs; return what else is in their folders."""
        profiles = self.tensorboard / "plugins" / "profile"
        written: dict[pathlib.Path, re.Pattern | None] = {
            self.checkpoints: _CHECKPOINT,
            self.report: _REPORT,
            **dict.fromkeys(self.boards, _EVENTS),
            **dict.fromkeys(profiles.glob("*"), _TRACE),
            # These contain only the folders above.
            **dict.fromkeys([profiles, profiles.parent, self.tensorboard]),
        }
        try:
            kept = [path for x in written.items() for path in _clear(*x)]
            for path in (*self.files(), *map(self.path.joinpath, _TRACKED)):
                if _is_folder(path):
                    kept.append(path)
                else:
                    store.remove(path)
        except OSError as error:
            reason = f"cannot be removed: {error.strerror}; choose another --workdir"
            raise ConfigError(f"{error.filename} {reason}") from None
        return [path for path in kept if path not in written or not path.is_dir()]

    def is_restarted(self) -> bool:
        """Return whether this process restarts the job that began the run."""
        try:
            begun_by = self._job.read_text().splitlines()
        except (OSError, ValueError):
            return False
        restarted = int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0
        jobs = [os.environ.get(name) for name in _JOBS[: 1 + restarted]]
        return any(job in begun_by for job in jobs if job)

    def record_job(self) -> None:
        """Record the job that begins a run with --overwrite, see `is_restarted`."""
        jobs = filter(None, map(os.environ.get, _JOBS))
        store.write_aside(self._job, "\n".join(jobs))

    def remove_leftovers(self) -> None:
        """Remove temporary files of killed processes; needs the lock."""
        for path in (*self.files(), self._job):
            for leftover in store.leftovers(path):
                with contextlib.suppress(OSError):
                    leftover.unlink()

    def lock(self, wait_secs: float = 0.0) -> "Lock":
        """Lock the folder for this process, see `Lock`."""
        return Lock(self.path, wait_secs, self._is_new)

    def holder(self) -> dict | None:
        """Return the description of the process that holds the lock, or None."""
        with contextlib.suppress(OSError), open(self.path / _LOCK, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _parsed(file.read(_MAX_BYTES))
        return None


def nearest_existing(path: pathlib.Path) -> pathlib.Path:
    """Return the path or its nearest parent that exists."""
    path = path.absolute()
    return next(p for p in (path, *path.parents) if os.path.lexists(p))


def _clear(folder, pattern):
    """Remove matching entries and the empty folder; return the other entries."""
    if not folder.is_dir():
        return []
    kept = []
    for path in sorted(folder.iterdir()):
        is_written = pattern and pattern.fullmatch(path.name)
        if is_written and (pattern == _CHECKPOINT or not _is_folder(path)):
            store.remove(path)
        else:
            kept.append(path)
    if not kept and not folder.is_symlink():
        folder.rmdir()
    return kept


def _is_folder(path):
    return path.is_dir() and not path.is_symlink()


class Lock:
    """A context manager that holds the lock of a folder until the process ends."""

    def __init__(self, folder: pathlib.Path, wait_secs: float, is_new: bool):
        self._path, self._is_new = folder / _LOCK, is_new
        self._about = {"pid": os.getpid(), "host": socket.gethostname()}
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o666)
        except OSError as error:
            raise ConfigError(
                f"the lock {self._path} cannot be created: {error.strerror}; remove it "
                "or choose another --workdir"
            ) from None
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            self._take(wait_secs)
            self.describe()
            self.assert_same_folder()
        except BaseException:
            self._file.close()
            raise

    def _take(self, wait_secs):
        begun, is_announced = time.monotonic(), False
        while not self._try_to_take():
            about = _parsed(os.pread(self._file.fileno(), _MAX_BYTES, 0))
            line = busy(self._path.parent, about)
            if not wait_secs:
                raise ConfigError(f"{line}; {HINT}")
            # A file system may keep the lock of a lost machine.
            if time.monotonic() - begun >= wait_secs:
                raise WorkerLostError(
                    f"{line}, and has not ended within {wait_secs:g} s; {HINT}"
                )
            if not is_announced:
                console.line(
                    one_line(f"{line}; waiting for its lock, up to {wait_secs:g} s")
                )
                is_announced = True

    def _try_to_take(self):
        for delay_secs in (0.1, 0.0):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(delay_secs)  # `holder` of another process holds it briefly
            except OSError as error:  # such as a network file system without locks
                raise ConfigError(
                    f"the lock {self._path} cannot be taken: {error.strerror}; choose "
                    "a --workdir on another file system"
                ) from None
        return False

    def describe(self, **more: str) -> None:
        """Add to the description of this process; errors of the disk are ignored."""
        self._about |= more
        with contextlib.suppress(OSError):
            self._file.seek(0)
            self._file.truncate()
            self._file.write(json.dumps(self._about).encode())

    def assert_same_folder(self) -> None:
        """Raise RunFolderError if the locked folder was removed, moved or replaced."""
        try:
            own = os.fstat(self._file.fileno())
            is_in_place = os.path.samestat(os.stat(self._path), own)
        except OSError as error:
            is_in_place = error.errno not in _GONE
        if not is_in_place:
            raise RunFolderError(
                f"{self._path.parent} is not the folder that this run locked any more; "
                "put it back, and the same command continues"
            )

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_) -> None:
        folder = self._path.parent
        with contextlib.suppress(OSError):
            if self._is_new and os.listdir(folder) == [_LOCK]:  # a failed start
                self._path.unlink()
                folder.rmdir()
        self._file.close()


def busy(folder: pathlib.Path, about: Mapping[str, Any]) -> str:
    """Return a line about the process that holds the lock of a folder."""
    return (
        f"another process trains in {folder}: process {about.get('pid', '?')} on "
        f"{about.get('host', '?')}"
    )


def _parsed(content):
    try:
        about = parse_json(content)
    except ValueError:
        about = None
    return about if isinstance(about, dict) else {}

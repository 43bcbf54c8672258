"""The folder of a run: its files, and the lock of the process that trains there.

config.json        the configuration of the run
dataset_info.json  class names and preprocessing of its data set
checkpoints/       one folder per save
network.json       the network, where Python gave it
metrics.jsonl      a line per step that was logged
tensorboard/       event files
result.json        the last evaluation by run_eval.py
best               name of the checkpoint of the best evaluation on held-out images
mistakes.csv       the test images that it predicts wrongly
calibration.json   the temperature of its probabilities
suspects.csv       images whose label is probably wrong
thresholds.json    of label sets, per class the probability from which it is predicted
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

# What a run writes in its folders; anything else there is its user's own.
_CHECKPOINT = re.compile(r"step-[0-9]{8,}|\.tmp-.*")
# Event files of other writers end with one more number, or with a version.
_EVENTS = re.compile(r"events\.out\.tfevents\.\d+\.(?!.*\.\d+\.\d+$).+\.\d+")
_TRACE = re.compile(r".*\.(xplane\.pb|trace(\.json)?(\.gz)?)")
_REPORT = re.compile(r"(index|compare)\.html|report\.json")

# The names of runs in trackers, see `callbacks`.
_TRACKED = ".mlflow-run", ".wandb-run"

# Environment variables with the name of a job whose restarts keep it: what our
# launchers set, and Slurm's, which several commands of one allocation share.
_JOBS = JOB, "SLURM_JOB_ID"

_LOCK = ".lock"
_MAX_BYTES = 4096  # of the description of a process
HINT = "wait for it, stop it, or choose another --workdir"
_GONE = errno.ENOENT, errno.ENOTDIR, errno.ESTALE


class RunFolder:
    """The paths of a run; ConfigError where the text of the folder can be none."""

    def __init__(self, workdir: str | os.PathLike):
        check_path("workdir", workdir)
        if not os.fspath(workdir):
            raise ConfigError("workdir is empty; give the folder of a run")
        self.path = pathlib.Path(os.path.expanduser(workdir))
        if os.path.realpath(self.path) == os.sep:
            raise ConfigError(f"workdir={workdir}: is the root; choose another folder")
        self.config = self.path / "config.json"
        self.dataset_info = self.path / "dataset_info.json"
        self.network = self.path / "network.json"
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        names = "train", "test", "validation", "eval"
        names += tuple(f"{name}_ema" for name in names[1:])
        self.boards = tuple(self.tensorboard / name for name in names)
        self.best = self.path / "best"
        self.result = self.path / "result.json"
        self.mistakes = self.path / "mistakes.csv"
        self.thresholds = self.path / "thresholds.json"
        self.calibration = self.path / "calibration.json"
        self.suspects = self.path / "suspects.csv"
        self.report = self.path / "report"
        self._job = self.path / ".overwritten-by"
        self._is_new = False

    def create(self) -> None:
        """Makes the folder. ConfigError where it cannot be written."""
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
        """Raise the ConfigError of `create` or `lock`; write nothing."""
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
                f"workdir={self.path}: TensorFlow reads no checkpoint where a name has "
                "a bracket or a backslash; choose another --workdir"
            )
        if os.fsencode(self.path) != str(self.path).encode(errors="surrogatepass"):
            raise ConfigError(
                f"the run folder {self.path} cannot be written: its name is not UTF-8, "
                "or Python does not take it so (PYTHONUTF8=1); choose another --workdir"
            )

    def _not_writable(self, reason):
        return ConfigError(
            f"the run folder {self.path} cannot be written: {reason}; choose another "
            "--workdir"
        )

    def validate_apart(self, teacher: str, dataset: str, data_dir: str) -> None:
        """Raise ConfigError if the run is its teacher, or is among the images."""
        path = pathlib.Path(os.path.realpath(self.path))
        if teacher and os.path.realpath(os.path.expanduser(teacher)) == str(path):
            why = "is the run itself; choose another --workdir"
            raise ConfigError(f"teacher={teacher} {why}")
        if dataset == "image_folder" and not is_url(data_dir):
            data_dir = data_folder(data_dir)
            if path.is_relative_to(os.path.realpath(data_dir)):
                why = f"in data_dir={data_dir}, where folders are classes"
                raise ConfigError(f"workdir={self.path} is {why}; choose another one")

    def files(self) -> tuple[pathlib.Path, ...]:
        """The small files of a run."""
        reports = self.metrics, self.best, self.result, self.mistakes, self.thresholds
        reports += self.calibration, self.suspects
        return self.config, self.dataset_info, self.network, *reports

    def write_network(self, architecture: str) -> None:
        """Writes network.json, without which the run is of no use."""
        try:
            store.write_aside(self.network, architecture)
        except OSError as error:
            why = f"cannot be written: {error.strerror}"
            raise ConfigError(f"{self.network} {why}") from None

    def clear(self) -> list[pathlib.Path]:
        """Remove what earlier runs wrote; return what else is in their folders."""
        profiles = self.tensorboard / "plugins" / "profile"
        written = {self.checkpoints: _CHECKPOINT, self.report: _REPORT}
        written |= dict.fromkeys(self.boards, _EVENTS)
        written |= dict.fromkeys(profiles.glob("*"), _TRACE)
        # These hold such folders alone.
        written |= dict.fromkeys([profiles, profiles.parent, self.tensorboard])
        try:
            kept = [path for x in written.items() for path in _clear(*x)]
            for path in (*self.files(), *map(self.path.joinpath, _TRACKED)):
                if _is_folder(path):
                    kept.append(path)
                else:
                    store.remove(path)
        except OSError as error:
            why = f"cannot be removed: {error.strerror}; choose another --workdir"
            raise ConfigError(f"{error.filename} {why}") from None
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

    def note_job(self) -> None:
        """Notes the job that begins a run with --overwrite, see `is_restarted`."""
        jobs = filter(None, map(os.environ.get, _JOBS))
        store.write_aside(self._job, "\n".join(jobs))

    def remove_leftovers(self) -> None:
        """Removes temporary files that killed processes left, under the lock."""
        for path in (*self.files(), self._job):
            for leftover in store.leftovers(path):
                with contextlib.suppress(OSError):
                    leftover.unlink()

    def lock(self, wait_secs: float = 0.0) -> "Lock":
        """Locks the folder for this process, see `Lock`."""
        return Lock(self.path, wait_secs, self._is_new)

    def holder(self) -> dict | None:
        """The description of the process that holds the lock; None if none does."""
        try:
            with open(self.path / _LOCK, "rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return _parsed(file.read(_MAX_BYTES))
        except OSError:
            pass
        return None


def nearest_existing(path: pathlib.Path) -> pathlib.Path:
    """The path, or the nearest of its parents that exists."""
    path = path.absolute()
    return next(p for p in (path, *path.parents) if os.path.lexists(p))


def _clear(folder, pattern):
    """Remove what matches in a folder, and the empty folder; return the rest."""
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
    """Holds the lock of a folder until it is closed, or the process ends; a context
    manager. ConfigError if another process holds it, WorkerLostError after a wait: a
    file system may keep a lost machine's. It removes a new folder to which nothing is
    written.
    """

    def __init__(self, folder: pathlib.Path, wait_secs: float, is_new: bool):
        self._path, self._is_new = folder / _LOCK, is_new
        self._about = {"pid": os.getpid(), "host": socket.gethostname()}
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o666)
        except OSError as error:
            why = f"{error.strerror}; remove it or choose another --workdir"
            raise ConfigError(f"the lock {self._path} cannot be made: {why}") from None
        self._file = open(descriptor, "r+b", buffering=0)
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
        """Tries for 0.1 s to take the lock; True on success."""
        for delay_secs in (0.1, 0.0):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                # `holder`, in another process, holds it for a moment.
                time.sleep(delay_secs)
            except OSError as error:  # such as a network file system without locks
                raise ConfigError(
                    f"the lock {self._path} cannot be taken: {error.strerror}; choose "
                    "a --workdir on another file system"
                ) from None
        return False

    def describe(self, **more: str) -> None:
        """Add to the description of this process, if the disk takes it."""
        self._about |= more
        try:
            self._file.seek(0)
            self._file.truncate()
            self._file.write(json.dumps(self._about).encode())
        except OSError:
            pass

    def assert_same_folder(self) -> None:
        """Raise RunFolderError if the folder that was locked was removed, moved or
        replaced. Other errors of the disk are ignored: a save has its own.
        """
        try:
            own = os.fstat(self._file.fileno())
            is_in_place = os.path.samestat(os.stat(self._path), own)
        except OSError as error:
            is_in_place = error.errno not in _GONE
        if not is_in_place:
            raise RunFolderError(
                f"{self._path.parent} is no longer the folder that this run locked; "
                "put it back, and the same command continues"
            )

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_) -> None:
        folder = self._path.parent
        try:
            if self._is_new and os.listdir(folder) == [_LOCK]:  # a failed start
                self._path.unlink()
                folder.rmdir()
        except OSError:
            pass
        self._file.close()


def busy(folder: pathlib.Path, about: Mapping[str, Any]) -> str:
    """Names the process that holds the lock of a folder, by its description."""
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

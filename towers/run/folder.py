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
import os
import pathlib
import re
import tempfile

from towers import store
from towers.config import Config
from towers.config.options import check_path
from towers.data.files.paths import data_folder
from towers.data.files.reading import is_url
from towers.errors import JOB, ConfigError
from towers.run.lock import HINT, Lock, busy, holder

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


class RunFolder:
    """The paths of a run.

    Raises:
        ConfigError: the text of the folder can be no path.
    """

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
        """Raises the ConfigError of `create`, as far as permissions tell, or of `lock`;
        writes nothing."""
        self._validate_name()
        nearest = nearest_existing(self.checkpoints)
        if not os.path.isdir(nearest):
            raise self._not_writable(os.strerror(errno.ENOTDIR))
        if os.statvfs(nearest).f_flag & os.ST_RDONLY:
            raise self._not_writable(os.strerror(errno.EROFS))
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise self._not_writable(os.strerror(errno.EACCES))
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

    def validate_apart(self, config: Config) -> None:
        """Raises ConfigError where the run would be its own teacher, or the folder is,
        or is in, a folder of classes: it would be a class."""
        path = pathlib.Path(os.path.realpath(self.path))
        teacher = os.path.expanduser(config.teacher)
        if teacher and os.path.realpath(teacher) == str(path):
            raise ConfigError(
                f"teacher={config.teacher} is the run itself; choose another --workdir"
            )
        if config.dataset == "image_folder" and not is_url(config.data_dir):
            data_dir = data_folder(config.data_dir)
            if path.is_relative_to(os.path.realpath(data_dir)):
                raise ConfigError(
                    f"workdir={self.path} is in data_dir={data_dir}, where folders are "
                    "classes; choose another --workdir"
                )

    def files(self) -> tuple[pathlib.Path, ...]:
        """The small files of a run."""
        reports = self.metrics, self.best, self.result, self.mistakes, self.thresholds
        reports += self.calibration, self.suspects
        return self.config, self.dataset_info, self.network, *reports

    def write_network(self, architecture: str) -> None:
        """Writes network.json, without which the run is of no use; ConfigError where it
        cannot be written."""
        try:
            store.write_aside(self.network, architecture)
        except OSError as error:
            raise ConfigError(
                f"{self.network} cannot be written: {error.strerror}"
            ) from None

    def clear(self) -> list[pathlib.Path]:
        """Removes what earlier runs wrote, and nothing else that is in the folder.

        Returns:
            What was left in the folders of a run, as no run wrote it.

        Raises:
            ConfigError: something cannot be removed.
        """
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
            raise ConfigError(
                f"{error.filename} cannot be removed: {error.strerror}; remove it "
                "yourself or choose another --workdir"
            ) from None
        return [path for path in kept if path not in written or not path.is_dir()]

    def is_restarted(self) -> bool:
        """True if this process is a restart of the job that began the run with
        --overwrite: its launcher repeats the arguments."""
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
        """Removes temporary files that killed processes left; to be called under the
        lock. An evaluation, which takes no lock, may be writing its own."""
        for path in (
            *(self.config, self.dataset_info, self.network),
            *(self.metrics, self.best, self._job),
        ):
            for leftover in self.path.glob(f".tmp-*-{path.name}"):
                with contextlib.suppress(OSError):
                    leftover.unlink()

    def lock(self, wait_secs: float = 0.0) -> Lock:
        """Locks the folder for this process, see `Lock`."""
        return Lock(self.path, wait_secs, self._is_new)

    def holder(self) -> dict | None:
        """The description of the process that holds the lock; None if none does."""
        return holder(self.path)


def nearest_existing(path: pathlib.Path) -> pathlib.Path:
    """The path, or the nearest of its parents that exists."""
    path = path.absolute()
    return next(p for p in (path, *path.parents) if os.path.lexists(p))


def _clear(folder, written):
    """Removes what a pattern names in a folder, and the folder where it is empty then;
    returns the rest."""
    if not folder.is_dir():
        return []
    kept = []
    for path in sorted(folder.iterdir()):
        is_written = written and written.fullmatch(path.name)
        if is_written and (written == _CHECKPOINT or not _is_folder(path)):
            store.remove(path)
        else:
            kept.append(path)
    if not kept and not folder.is_symlink():
        folder.rmdir()
    return kept


def _is_folder(path):
    return path.is_dir() and not path.is_symlink()

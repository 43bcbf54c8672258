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
thresholds.json    of label sets, per class the probability from which it is predicted
report/            index.html and report.json; a comparison with other runs
"""

import contextlib
import dataclasses
import errno
import os
import pathlib
import re
import tempfile
from typing import TYPE_CHECKING

from towers import quiet_imports, store
from towers.config import Config, changed_mathematics, from_json, from_values
from towers.config.options import check_path
from towers.errors import JOB, ConfigError, RunFolderError
from towers.run.lock import WAY_OUT, Lock, busy, holder

if TYPE_CHECKING:
    from towers.run.dataset_info import DatasetInfo

# Images of a batch in an evaluation.
EVALUATION_BATCH_SIZE = 500

# What a run writes in its folders; anything else there is its user's own.
_CHECKPOINT = re.compile(r"step-[0-9]{8,}|\.tmp-.*")
# Those of other writers end with one more number, or with a version.
_EVENTS = re.compile(r"events\.out\.tfevents\.\d+\.(?!.*\.\d+\.\d+$).+\.\d+")
_TRACE = re.compile(r".*\.(xplane\.pb|trace(\.json)?(\.gz)?)")
_REPORT = re.compile(r"(index|compare)\.html|report\.json")

# The names of runs in trackers, see `callbacks`.
_TRACKED = ".mlflow-run", ".wandb-run"

# Environment variables with the name of a job whose restarts keep it: what our
# launchers set, and Slurm's, which several commands of one allocation share.
_JOBS = JOB, "SLURM_JOB_ID"


class RunFolder:
    """Paths of a run, and its small JSON files.

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
            raise ConfigError(f"{busy(self.path, about)}; {WAY_OUT}")

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

    def validate_teacher(self, teacher: str) -> None:
        """Raises ConfigError where the run would be its own teacher."""
        if teacher and os.path.realpath(
            os.path.expanduser(teacher)
        ) == os.path.realpath(self.path):
            raise ConfigError(
                f"teacher={teacher} is the run itself; choose another --workdir"
            )

    def validate_outside_of(self, data_dir: str | os.PathLike) -> None:
        """Raises ConfigError where the folder is, or is in, one of class folders: it
        would be a class."""
        path = pathlib.Path(os.path.realpath(self.path))
        if path.is_relative_to(os.path.realpath(data_dir)):
            raise ConfigError(
                f"workdir={self.path} is in data_dir={data_dir}, where folders are "
                "classes; choose another --workdir"
            )

    def files(self) -> tuple[pathlib.Path, ...]:
        """The small files of a run."""
        reports = self.metrics, self.best, self.result, self.mistakes, self.thresholds
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
        """Whether this process is a restart of the job that began the run with
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

    def holds_config(self) -> bool:
        """True where there is a config.json, or a checkpoint with a Config."""
        is_stored = self._stored("config", from_values) is not None
        return is_stored or os.path.exists(self.config)

    def stored_config(self, step: int | str = "last") -> Config:
        """The Config of the run in this folder.

        The checkpoint decides about all options that change the mathematics;
        config.json, where there is one, about the others.

        Args:
            step: of the checkpoint, as options may have been allowed to change since;
                "last", or where it is none, for the newest one; or "best".

        Raises:
            ConfigError: there is no run, or no Config can be read.
            RunFolderError: the folder cannot be looked into.
        """
        trained = self._stored("config", from_values, step)
        config = trained or self._config_of_file()
        if trained is not None:
            # Missing, damaged, or it contradicts the checkpoint.
            with contextlib.suppress(ConfigError):
                stored = self._config_of_file()
                changed = changed_mathematics(stored, trained)
                config = dataclasses.replace(
                    stored, **{k: value for k, (_, value) in changed.items()}
                )
        if config.choice_of("model").is_given:
            with quiet_imports():  # of Keras
                from towers.models.keras import given
            given.give_stored(config.model, self.network)
        return config

    def stored_dataset_info(self, step: int | str = "last") -> "DatasetInfo | None":
        """Classes and preprocessing of the run's data set, from the newest checkpoint
        that has them, or that of a step, else from dataset_info.json; None where
        neither does.

        Raises:
            ConfigError: the file is damaged.
            RunFolderError: the folder cannot be looked into.
        """
        with quiet_imports():  # of TensorFlow
            from towers.run.dataset_info import DatasetInfo
        trained = self._stored("dataset_info", DatasetInfo.from_values, step)
        if trained is not None:
            return trained
        try:
            return DatasetInfo.from_json(self.dataset_info.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ConfigError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{self.dataset_info}: {reason}; remove it") from None

    def _stored(self, key, parse, step="last"):
        """`Checkpointer.stored`; without TensorFlow where there are no checkpoints."""
        if not os.path.isdir(self.checkpoints):
            return None
        with quiet_imports():  # of TensorFlow
            from towers.run.checkpointer import Checkpointer

        return Checkpointer(self.checkpoints).stored(key, parse, step)

    def _config_of_file(self):
        try:
            return from_json(self.config.read_bytes())
        except ValueError as error:
            raise ConfigError(f"{self.config}: {error}") from None
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(
                f"{self.path} holds no run: there is no {self.config.name} in it; give "
                "the folder of a run as --workdir"
            ) from None
        except OSError as error:
            raise ConfigError(f"{self.config}: {error.strerror or error}") from None

    def evaluation_config(self, step: int | str = "last", **changes) -> Config:
        """The stored Config, with the device, the towers and the batch of an
        evaluation in place of those of the training.

        Args:
            step: of the checkpoint, as in `stored_config`.
            **changes: options that the evaluation sets otherwise.

        Raises:
            ConfigError: as `stored_config`, or the options do not fit.
        """
        settings = {
            "device": "auto",
            "device_order": "",
            "parameter_device": "cpu",
            "batch_size": EVALUATION_BATCH_SIZE,
            "num_towers": 0,
            "repeats": 1,
        }
        config = dataclasses.replace(self.stored_config(step), **settings | changes)
        if "num_towers" in changes or config.devices_per_network == 1:
            return config
        # One group.
        return dataclasses.replace(config, num_towers=config.devices_per_network)

    def prediction_config(self, step: int | str = "last", **changes) -> Config:
        """As `evaluation_config`, for predictions: every device has the whole network,
        whatever the strategy of the training."""
        return self.evaluation_config(step, **{"group_size": 1} | changes)


def nearest_existing(path: pathlib.Path) -> pathlib.Path:
    """The path, or the nearest of its parents that exists."""
    path = path.absolute()
    return next(p for p in (path, *path.parents) if os.path.lexists(p))


def config_to_continue(
    workdir: str | os.PathLike, overwrite: bool = False
) -> Config | None:
    """The stored Config of the run in a folder, on which a command without --config
    stands; None where the folder holds no run.

    Args:
        workdir: the run's folder.
        overwrite: whether the run is to start again: one that is unreadable then counts
            as none.

    Raises:
        ConfigError, RunFolderError: as `RunFolder.stored_config`.
    """
    folder = RunFolder(workdir)
    try:
        return folder.stored_config() if folder.holds_config() else None
    except (ConfigError, RunFolderError):
        if overwrite:
            return None
        raise


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

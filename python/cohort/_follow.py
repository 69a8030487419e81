"""`Follow` logs the metrics of a run through Weights & Biases or trackio."""
from __future__ import annotations

import fcntl
import importlib.util
import json
import logging
import math
import os
import re
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from . import _cohort
from .training import Callback, metrics_files


class Follow(Callback):
    """Logs every number of a run's metrics.jsonl, and its configuration, through the client `to`: "wandb" or "trackio". It is a
    callback of train(); until_end(folder) follows a run of another process.

    With several stages, names begin with the stage's folder ("2-grpo/loss"), and each stage has an axis of steps ("2-grpo/step").
    project: of the client. offline: wandb writes a folder for `wandb sync`, in WANDB_DIR or the run's directory; trackio is always
    local.
    """
    # The client's run has each number once, wherever a follower was killed:
    # * A local copy (an offline folder of wandb, which its client cannot read back; a run of trackio) is written by one process. A
    #   follower that starts removes the copies of earlier ones, in the same WANDB_DIR or project, before it logs its first line,
    #   and logs all lines. Copies have the id in RUN/.follow-*, which is on disk before them, and locked while a follower runs.
    # * A run on a server of wandb is continued by that id. Line i of the files is the client's step i; the lines below run.step,
    #   which the server has, are not sent. (A killed client may still upload for a moment; the same steps have the same numbers.)
    # * A resume that removes lines replaces metrics.jsonl. The client's run is then begun again in the same way. So local copies
    #   have the numbers of the present file. A server keeps the first ones of steps that are trained again: they are equal to the
    #   bit, except for times, unless the resume has changed the configuration.

    def __init__(self, to: str, *, project: str = "cohort", offline: bool = False) -> None:
        if to not in ("wandb", "trackio"):
            raise _cohort.InputError(f"follow: expected wandb or trackio, got {to!r}; hint: TensorBoard reads the run's own files")
        spec = importlib.util.find_spec(to)
        if spec is None or spec.origin is None:  # or a folder "wandb" with the client's files
            raise _cohort.InputError(f"follow: the package {to} is not installed; hint: pip install {to}")
        self._client: Any = importlib.import_module(to)
        if to == "trackio" and (os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")):
            raise _cohort.InputError("follow: trackio: only local projects are written; hint: unset TRACKIO_SPACE_ID and "
                                     "TRACKIO_SERVER_URL, and upload with `trackio sync`")
        self._to, self._project, self._offline = to, project, offline
        self._folder = Path()
        self._lock: TextIO | None = None  # from _open() to _close()
        self._files: dict[Path, BinaryIO] = {}
        self._axes: set[str] = set()  # prefixes of the client's axes
        self._run: Any = None  # of the client, from the first line on
        self._line = self._first = 0  # lines that were read, and that the client had before

    def on_message(self, text: str) -> None:
        if self._lock is None and text.startswith("run directory: "):  # the first message of a run
            self._open(text[len("run directory: "):])

    def on_step(self, metrics: dict[str, Any]) -> None:
        self._log_lines()

    def on_end(self) -> None:
        self._log_lines()
        self._close()

    def until_end(self, folder: str | os.PathLike[str]) -> None:
        """Follows the run in `folder` until no process trains it any more."""
        self._open(folder)
        try:
            ended = False
            while not ended:
                ended = not _is_locked(self._folder / ".lock")  # before the last lines are read
                self._log_lines()
                time.sleep(0 if ended else 1)
        finally:
            self._close()

    def _open(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).resolve()
        if not (self._folder / "config.yaml").is_file():
            raise _cohort.InputError(f"follow: {folder} is no run, as it has no config.yaml; hint: give the run directory that "
                                     "`cohort train` printed")
        self._config()  # raises for a file of something else
        file = (self._folder / f".follow-{self._to}").open("a+", errors="replace")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise _cohort.InputError(f"follow: another process logs {folder} to {self._to}; hint: wait for it to end") from None
        file.seek(0)
        self._id, self._lock = file.read(), file
        if not re.fullmatch("[0-9a-f]{8}", self._id):  # or damaged: it is a part of the names that _begin() removes
            self._id = uuid.uuid4().hex[:8]
            file.truncate(0)
            file.write(self._id)
            file.flush()
            os.fsync(file.fileno())

    def _config(self) -> dict[str, Any]:
        return {key: _value(text) for key, text in _cohort.config_fields(str(self._folder / "config.yaml")).items()}

    def _begin(self) -> Any:
        """The client's run, without lines, or with those that its server has."""
        name, options = self._folder.name, {"project": self._project, "config": self._config()}
        if self._to == "trackio":
            with suppress(ValueError):  # there is no such project yet
                for run in self._client.Api().runs(self._project):
                    if run.name == f"{name}-{self._id}":
                        run.delete()
            return self._client.init(name=f"{name}-{self._id}", embed=False, **options)
        root = Path(os.environ.get("WANDB_DIR") or self._folder)
        for copy in root.glob(f"*wandb/offline-run-*-{self._id}"):
            shutil.rmtree(copy, ignore_errors=True)
        run = self._client.init(name=name, id=self._id, resume="allow", mode="offline" if self._offline else None, dir=str(root),
                                allow_val_change=True, reinit="create_new", **options)  # a resume may change the configuration
        self._first = 0 if run.offline else run.step
        return run

    def _log_lines(self) -> None:
        if self._lock is None:
            return
        try:
            if any(path.exists() and not os.path.samestat(path.stat(), os.fstat(file.fileno()))
                   for path, file in self._files.items()):
                self._finish()  # replaced by a resume
            for path in metrics_files(self._folder):
                file = self._files.get(path) or self._files.setdefault(path, path.open("rb"))
                while (line := file.readline()).endswith(b"\n"):
                    self._log("" if path.parent == self._folder else path.parent.name + "/", line)
                file.seek(-len(line), os.SEEK_CUR)  # an incomplete line waits for its end
        except BaseException:  # an interrupt: whether the line has been logged is unknown, so nothing may follow it
            self._close()
            raise

    def _log(self, prefix: str, line: bytes) -> None:
        try:
            numbers = {prefix + name: value for name, value in json.loads(line).items()
                       if type(value) in (int, float) and math.isfinite(value)}
            step = int(numbers[prefix + "step"])
        except (ValueError, AttributeError, KeyError, OverflowError, RecursionError):
            return logging.getLogger("cohort").warning("follow: a damaged line is not logged: %.80r", line)
        if self._run is None:
            self._run = self._begin()
        if self._line >= self._first and self._to == "trackio":
            numbers.pop("step", None)  # the client's own name
            self._run.log(numbers, step=step)
        elif self._line >= self._first:
            if prefix not in self._axes:
                self._run.define_metric(f"{prefix}*", step_metric=f"{prefix}step")
                self._axes.add(prefix)
            self._run.log(numbers, step=self._line, commit=True)
        self._line += 1

    def _finish(self) -> None:
        """Ends the client's run. The next line begins it again, with all lines."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._axes.clear()
        run, self._run, self._line, self._first = self._run, None, 0, 0
        if run is not None:
            run.finish()

    def _close(self) -> None:
        lock, self._lock = self._lock, None
        with lock or suppress():  # is closed also if the client raises
            self._finish()


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _value(text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    return text

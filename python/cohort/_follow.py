"""`Follow` logs the metrics of a run through Weights & Biases or trackio."""
from __future__ import annotations

import fcntl
import importlib
import json
import logging
import math
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from . import _cohort
from .training import Callback, metrics_files

__all__ = ["Follow"]

_POLL_SECONDS = 1.0


class Follow(Callback):
    """Logs every number of a run's metrics.jsonl, and its configuration, through the client `to`: "wandb" or "trackio". It is a
    callback of train(); until_end(folder) follows a run of another process.

    The names are those of metrics.jsonl. With several stages they begin with the stage's folder ("2-grpo/loss"), and each stage
    has an axis of its own ("2-grpo/step"). project: of the client. offline: wandb writes a folder for `wandb sync`; trackio is
    always local, and `trackio sync` uploads.
    """
    # Each number is in the client's run once, wherever a follower was killed:
    # * A local copy (an offline folder of wandb, which its client cannot read back; a run of trackio) has one writer. A follower
    #   that starts removes the copy of an earlier one, and logs metrics.jsonl from its first line. RUN/follow-wandb.json, which
    #   is replaced atomically before the first line is logged, says what to remove.
    # * A run on a server of wandb is continued by its id. Line i of the files, in their order, is step i of the client, and
    #   lines below run.step, which the server reports, are not sent. The server also refuses steps that it has.
    # * A resume replaces metrics.jsonl if it removes lines. The run of the client is then ended, and begun again as above. So a
    #   local copy has the values of the present file. A server keeps those it had of steps that are trained again, which are
    #   equal to the bit, times aside, unless the resume has changed the configuration.

    def __init__(self, to: str, *, project: str = "cohort", offline: bool = False) -> None:
        if to not in ("wandb", "trackio"):
            raise _cohort.InputError(f"follow: to: expected wandb or trackio, got {to!r}; hint: TensorBoard reads the run itself")
        try:
            self._client: Any = importlib.import_module(to)
        except ModuleNotFoundError as error:
            if error.name != to:
                raise
            raise _cohort.InputError(f"follow: the package {to} is not installed; hint: pip install {to}") from None
        if variable := next((name for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL") if os.environ.get(name)), None):
            if to == "trackio":
                raise _cohort.InputError(f"follow: {variable} is set, but runs are followed into local projects; hint: unset it, and "
                                         "upload by trackio sync")
        self._to, self._project, self._offline = to, project, offline
        self._folder: Path | None = None
        self._lock: BinaryIO | None = None
        self._files: dict[Path, BinaryIO] = {}
        self._axes: set[str] = set()
        self._run: Any = None  # of the client, from the first line on
        self._line = self._first = 0  # lines that were read, and that the client had before

    def on_message(self, text: str) -> None:
        if self._folder is None and text.startswith("run directory: "):  # the first message of a run
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
                ended = not _is_locked(Path(folder, ".lock"))  # before the last lines are read
                self._log_lines()
                time.sleep(0 if ended else _POLL_SECONDS)
        finally:
            self._close()

    def _open(self, folder: str | os.PathLike[str]) -> None:
        path = Path(folder).absolute()
        if not (path / "config.yaml").is_file():
            raise _cohort.InputError(f"follow: {folder} is no run, as it has no config.yaml; hint: give the run directory that `cohort "
                                     "train` printed")
        self._lock = (path / f".follow-{self._to}.lock").open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _cohort.InputError(f"follow: another process logs {folder} to {self._to}; hint: wait for it to end") from None
        self._folder = path
        self._config()  # raises for a file of something else

    def _log_lines(self) -> None:
        if self._folder is None:
            return
        try:
            if any(path.exists() and not os.path.samestat(path.stat(), os.fstat(file.fileno()))
                   for path, file in self._files.items()):
                self._finish()  # replaced by a resume
            for path, line in self._new_lines(self._folder):
                self._log_line("" if path.parent == self._folder else path.parent.name + "/", line)
        except BaseException:  # an interrupt: a line may have been logged or not, so nothing may follow it
            self._close()
            raise

    def _log_line(self, prefix: str, line: bytes) -> None:
        try:
            values = {name: value for name, value in json.loads(line).items()
                      if type(value) in (int, float) and math.isfinite(value)}
            step = int(values["step"])
        except (ValueError, AttributeError, KeyError):
            return logging.getLogger("cohort").warning("follow: a damaged line is not logged: %.80r", line)
        if self._run is None:
            self._run = self._begin_trackio() if self._to == "trackio" else self._begin_wandb()
        if self._line >= self._first:
            numbers = {prefix + name: value for name, value in values.items()}
            if self._to == "trackio":  # has no other axes, and writes "step" itself
                self._run.log({name: value for name, value in numbers.items() if name != "step"}, step=step)
            else:
                if prefix not in self._axes:
                    self._run.define_metric(f"{prefix}*", step_metric=f"{prefix}step")
                    self._axes.add(prefix)
                self._run.log(numbers, step=self._line, commit=True)
        self._line += 1

    def _new_lines(self, folder: Path) -> Iterator[tuple[Path, bytes]]:
        for path in metrics_files(folder):
            file = self._files.get(path) or self._files.setdefault(path, path.open("rb"))
            while (line := file.readline()).endswith(b"\n"):
                yield path, line
            file.seek(-len(line), os.SEEK_CUR)  # an incomplete line waits for its end

    def _begin_wandb(self) -> Any:
        """The client's run, without lines, or with those that its server has."""
        state, config = self._state(), self._config()
        copy = Path(state.get("copy", ""))
        if re.fullmatch(rf"offline-run-\w+-{state['id']}", copy.name):
            shutil.rmtree(copy, ignore_errors=True)
        run = self._client.init(project=self._project, name=self._folder.name, id=state["id"], resume="allow", config=config,
                                mode="offline" if self._offline else None)
        self._write_state(state | {"copy": str(Path(run.dir).parent) if run.offline else ""})
        self._first = 0 if run.offline else run.step
        return run

    def _begin_trackio(self) -> Any:
        """The client's run, without lines."""
        state, config = self._state(), self._config()
        name = f"{self._folder.name}-{state['id']}"
        try:
            copies = [run for run in self._client.Api().runs(self._project) if run.name == name]
        except ValueError:  # a new project
            copies = []
        for copy in copies:
            copy.delete()
        return self._client.init(project=self._project, name=name, config=config, embed=False)

    def _config(self) -> dict[str, Any]:
        def value(text: str) -> Any:
            try:
                return json.loads(text)
            except ValueError:
                return text
        return {key: value(text) for key, text in _cohort.config_fields(str(self._folder / "config.yaml")).items()}

    def _state(self) -> dict[str, str]:
        path = self._folder / f"follow-{self._to}.json"
        state = json.loads(path.read_text()) if path.exists() else {}
        if state.get("project") == self._project:
            return state
        state = {"project": self._project, "id": uuid.uuid4().hex[:8]}
        self._write_state(state)
        return state

    def _write_state(self, state: dict[str, str]) -> None:
        path = self._folder / f"follow-{self._to}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(state))
        os.replace(temporary, path)

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
        try:
            self._finish()
        finally:
            self._folder = None
            if self._lock is not None:
                self._lock.close()


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False

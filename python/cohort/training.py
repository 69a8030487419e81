"""`train()` runs a configuration, with Python functions as rewards and environments; `train_steps()` is its iterator."""
from __future__ import annotations

import html
import importlib
import json
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Union

from . import _cohort, _ranks
from ._background import Background
from ._json import dumps
from .cohort_reward import arguments_of

__all__ = ["Callback", "Progress", "TrainResult", "train", "train_steps"]

Config = Union[str, "os.PathLike[str]", Mapping[str, Any]]


class Callback:
    """What train() calls while it runs, on the thread that trains, which waits for it. An exception ends the run."""

    def on_stage(self, name: str, step: int, steps: int) -> None:
        """A stage begins at `step` of `steps`."""

    def on_step(self, metrics: dict[str, Any]) -> bool | None:
        """The metrics of a step, and its number "step". True stops the run, with a checkpoint."""

    def on_completion(self, record: dict[str, Any]) -> None:
        """A line of completions.jsonl: of a step, before on_step(), or of an evaluation ("eval")."""

    def on_message(self, text: str) -> None:
        """An evaluation, a checkpoint, or the report at the end."""

    def on_end(self) -> None:
        """The run has ended, perhaps by an error, and its logs are complete."""


class Progress(Callback):
    """A bar of tqdm where it is installed, else a line every five seconds; in a notebook also a table of the latest
    completions."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._next = 0.0
        self._completions: deque[dict[str, Any]] = deque(maxlen=8)
        self._table: Any = None
        self._in_notebook = type(getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()).__name__ == \
            "ZMQInteractiveShell"

    def on_stage(self, name: str, step: int, steps: int) -> None:
        self._stage, self._steps = name, steps
        try:
            from tqdm.auto import tqdm
        except ImportError:
            return
        if self._bar is not None:
            self._bar.close()
        self._bar = tqdm(desc=name, initial=step, total=steps, unit="step")

    def on_step(self, metrics: dict[str, Any]) -> None:
        shown = {name: f"{metrics[name]:.4g}" for name in ("loss", "reward", "tokens_per_second") if name in metrics}
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(metrics["step"] - self._bar.n)
        if time.monotonic() < self._next and metrics["step"] < self._steps:
            return
        self._next = time.monotonic() + 5
        if self._bar is None:
            print(f"{self._stage} {metrics['step']}/{self._steps}", *(f"{k} {v}" for k, v in shown.items()), flush=True)
        if self._in_notebook and self._completions:
            self._show_table()

    def on_completion(self, record: dict[str, Any]) -> None:
        self._completions.append(record)

    def on_message(self, text: str) -> None:
        (print if self._bar is None else self._bar.write)(text)

    def _show_table(self) -> None:
        from IPython.display import HTML, display
        columns = [name for name in ("step", "prompt", "completion", "reward", "correct")
                   if any(name in record for record in self._completions)]
        rows = "".join("<tr>" + "".join(f"<td><pre>{html.escape(str(record.get(name, '')))}</pre></td>" for name in columns) +
                       "</tr>" for record in self._completions)
        table = HTML(f"<table><tr>{''.join(f'<th>{name}</th>' for name in columns)}</tr>{rows}</table>")
        if self._table is None:
            self._table = display(table, display_id=True)
        else:
            self._table.update(table)


class _Callbacks(Callback):
    """`callbacks`, called one after the other, and put(metrics) for train_steps()."""
    put: Callable[[dict[str, Any]], None]

    def __init__(self, callbacks: Iterable[Callback], steps: Background, stop: Callable[[], None]) -> None:
        self._stage, self._step, self._completion, self._message, self._end = ([], [], [], [], [])  # type: ignore[var-annotated]
        self._stop = stop
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(f"callbacks: expected objects of classes derived from cohort.Callback, got {callback!r}")
            self._stage.append(steps.called(callback.on_stage))
            self._step.append(steps.called(callback.on_step))
            self._message.append(steps.called(callback.on_message))
            self._end.append(steps.called(callback.on_end))
            if type(callback).on_completion is not Callback.on_completion:
                self._completion.append(steps.called(callback.on_completion))

    def on_stage(self, name: str, step: int, steps: int) -> None:
        for call in self._stage:
            call(name, step, steps)

    def on_step(self, metrics: dict[str, Any]) -> None:
        if any([call(metrics) for call in self._step]):
            self._stop()
        self.put(metrics)

    def on_completion(self, record: Any) -> None:
        if self._completion:
            record = json.loads(record)
        for call in self._completion:
            call(record)

    def on_message(self, text: str) -> None:
        for call in self._message:
            call(text)

    def on_end(self) -> None:
        with ExitStack() as stack:  # calls all of them, in their order, and raises what one has raised
            for call in reversed(self._end):
                stack.callback(call)


@dataclass(frozen=True)
class TrainResult:
    """The end of a run."""
    dir: str  # of the run: Model(dir) loads what it has learned
    finished: bool  # False: stopped before its last step; train(resume=dir) continues
    measure: str  # the held-out score, such as "pass@1 (countdown)"; "": nothing is held out
    before: float  # that score (minus the loss for texts) before the first step of the last stage and after its last; nan: not
    after: float  # measured
    metrics: list[dict[str, Any]] = field(repr=False)  # of all steps of the run that metrics.jsonl has (log_every)


Data = Iterable[Mapping[str, Any]]


def train_steps(config: Config | None = None, *, data: Data | None = None, eval_data: Data | None = None,
                rewards: Mapping[str, Callable[..., Any]] | None = None,
                environments: Mapping[str, Callable[..., Any]] | None = None,
                loss: Callable[..., Any] | None = None, advantage: Callable[..., Any] | None = None,
                callbacks: Iterable[Callback] = (), resume: str | os.PathLike[str] | None = None, continues: bool = False,
                overrides: Mapping[str, Any] | None = None, gpus: int | None = None) -> Generator[dict[str, Any], None, TrainResult]:
    """train() as an iterator: yields the metrics of each step, without a progress bar. The next step starts when it is asked
    for. Closing it, also by leaving the loop, or an interrupt stops the run with a checkpoint of the step that was yielded last;
    a function that the run calls may close it too."""
    steps = Background(waits=True, saves=True)
    return _steps(steps, config, rewards, environments, callbacks, resume, continues, overrides, data, eval_data, loss, advantage, gpus)


def _steps(steps: Background, config: Config | None, rewards: Mapping[str, Callable[..., Any]] | None,
           environments: Mapping[str, Callable[..., Any]] | None, callbacks: Iterable[Callback],
           resume: str | os.PathLike[str] | None, continues: bool, overrides: Mapping[str, Any] | None, data: Data | None,
           eval_data: Data | None, loss: Callable[..., Any] | None, advantage: Callable[..., Any] | None,
           gpus: int | None) -> Background:
    if (config is None) == (resume is None):
        raise _cohort.InputError("train: expected a configuration (a file or a dictionary) or resume=RUN_DIR")
    request = request_of(steps, config, rewards, environments, resume, continues, overrides, loss, advantage)
    training = _cohort.Training(**request)
    tables = _tables(data, eval_data, resume)
    reporter = _Callbacks(callbacks, steps, training.stop)

    def run(put: Callable[[dict[str, Any]], None]) -> Any:  # does not refer to `steps`, which end the run when they are dropped
        reporter.put = put
        with _written(training, tables):
            try:
                with _ranks.started(training, request, gpus) as meeting:
                    result = training.run(reporter, **meeting)
            finally:
                reporter.on_end()
        return TrainResult(**result, metrics=_metrics(result["dir"]))
    return steps.begin(run, training.stop)


def request_of(steps: Background, config: Config | None, rewards: Mapping[str, Callable[..., Any]] | None,
               environments: Mapping[str, Callable[..., Any]] | None, resume: str | os.PathLike[str] | None = None,
               continues: bool = False, overrides: Mapping[str, Any] | None = None, loss: Callable[..., Any] | None = None,
               advantage: Callable[..., Any] | None = None) -> dict[str, Any]:
    """The arguments of _cohort.Training: the configuration with its functions, which are called as a part of `steps`."""
    is_file = isinstance(config, (str, os.PathLike))
    run_function = steps.called(lambda function, /, *arguments, **keywords: function(*arguments, **keywords))
    return dict(
        config=os.fspath(config) if is_file else "" if config is None else "config",  # type: ignore[arg-type]
        yaml="" if is_file or config is None else dumps(_with_json_texts(config)),  # type: ignore[arg-type]
        resume="" if resume is None else os.fspath(resume), continues=bool(continues),
        overrides=[f"{key}={value if isinstance(value, str) else dumps(value)}" for key, value in (overrides or {}).items()],
        rewards={name: _reward(name, function, run_function) for name, function in _named("rewards", rewards)},
        environments={name: steps.called(function) for name, function in _named("environments", environments)},
        losses=_one("loss", loss, _loss, run_function), advantages=_one("advantage", advantage, _advantage, run_function))


def _one(kind: str, function: Callable[..., Any] | None, wrap: Callable[..., Any], run: Callable[..., Any]) -> dict[str, Any]:
    """A function by its own name."""
    if function is None:
        return {}
    if not callable(function):
        raise TypeError(f"{kind}: expected a function, got {function!r}")
    name = getattr(getattr(function, "func", function), "__name__", "") or type(function).__name__
    return {name: wrap(name, function, run)}


def _converter(function: Callable[..., Any]) -> tuple[Any, Callable[[Any], Any]]:
    """torch, or None, and what makes a loss's arrays: of torch if the program has imported it, else of NumPy or, on a GPU, CuPy;
    `function.arrays = "numpy"` chooses."""
    name = getattr(function, "arrays", "torch" if sys.modules.get("torch") else "numpy")
    if name not in ("torch", "numpy", "cupy"):
        raise _cohort.InputError(f"loss: its attribute `arrays` is {name!r}; hint: torch, numpy or cupy")
    library = importlib.import_module(name)
    return library if name == "torch" else None, \
        lambda x: (library if name != "numpy" or x.__dlpack_device__()[0] == 1 else importlib.import_module("cupy")).from_dlpack(x)


def _loss(name: str, function: Callable[..., Any], run: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    """`function` on a micro batch, with the gradients that it gives or that torch finds."""
    torch, convert = _converter(function)
    where = f"loss {name}: {getattr(function, '__qualname__', function)} returned"
    hint = "hint: a scalar of torch that depends on logprob, or (loss, dlogprob) or (loss, dlogprob, dentropy)"

    def call(arrays: dict[str, Any]) -> tuple[float, Any, Any]:
        batch = SimpleNamespace(**{key: convert(value) if hasattr(value, "__dlpack__") else value for key, value in arrays.items()})
        shape = tuple(batch.logprob.shape)
        if torch is not None:
            leaves = batch.logprob, batch.entropy = [x.detach().requires_grad_() for x in (batch.logprob, batch.entropy)]
            with torch.enable_grad():
                result = run(function, batch)
                if isinstance(result, torch.Tensor):
                    if result.ndim != 0 or not result.requires_grad or not result.is_floating_point():
                        raise _cohort.InputError(f"{where} a tensor of {result.dtype} and shape {tuple(result.shape)}"
                                                 f"{'' if result.requires_grad else ' without a gradient'}; {hint}")
                    dlogprob, dentropy = torch.autograd.grad(result, leaves, allow_unused=True)
                    if dlogprob is None and dentropy is None:
                        raise _cohort.InputError(f"{where} a tensor that depends on neither logprob nor entropy; {hint}")
                    return result.item(), torch.zeros_like(batch.logprob) if dlogprob is None else dlogprob, dentropy
        else:
            result = run(function, batch)
        if not isinstance(result, (tuple, list)) or len(result) not in (2, 3):
            raise _cohort.InputError(f"{where} {str(result)[:60]}; {hint}")
        loss, *gradients = [x.detach() if hasattr(x, "detach") else x for x in result]
        if tuple(getattr(loss, "shape", ())) not in ((), shape):
            raise _cohort.InputError(f"{where} a loss of shape {tuple(loss.shape)}; hint: a number, or one for each of the {shape[0]} "
                                     "tokens")
        try:
            loss = float(loss.sum() if hasattr(loss, "sum") else loss)
        except (TypeError, ValueError):
            raise _cohort.InputError(f"{where} {str(loss)[:60]} as the loss; {hint}") from None
        return loss, gradients[0], gradients[1] if len(gradients) == 2 else None
    return call


def _advantage(name: str, function: Callable[..., Any], run: Callable[..., Any]) -> Callable[[list[Any]], list[Any]]:
    """`function` on the completions of a step."""
    def with_nan(value: Any) -> Any:
        """JSON has no nan."""
        if isinstance(value, dict):
            return {key: with_nan(item) for key, item in value.items()}
        return [with_nan(item) for item in value] if isinstance(value, list) else math.nan if value is None else value

    def plain(value: Any) -> Any:
        """In the types of JSON, with None for numbers that are not finite."""
        value = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    def call(requests: list[Any]) -> list[Any]:
        request = {key: value if key == "fields" else with_nan(value) for key, value in requests[0].items()}
        values = run(function, SimpleNamespace(**request))
        values = values.tolist() if hasattr(values, "tolist") else values
        if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
            raise _cohort.InputError(f"advantage {name}: {getattr(function, '__qualname__', function)} returned {str(values)[:60]}; "
                                     "hint: a list of a number for each completion, or of lists of one per sampled token")
        return [plain(value) for value in islice(values, len(requests[0]["rewards"]) + 1)]
    return call


def _tables(data: Data | None, eval_data: Data | None, resume: object) -> dict[str, list[str]]:
    """The lines of data in memory, by the key of their file."""
    out: dict[str, list[str]] = {}
    for key, name, rows in (("data.jsonl.path", "data", data), ("data.jsonl.eval_path", "eval_data", eval_data)):
        if rows is None:
            continue
        if resume is not None:
            raise _cohort.InputError(f"train: {name}: the run that is resumed has its data; hint: omit {name}")
        hint = "hint: an iterable of dictionaries, such as a list, a datasets.Dataset or frame.to_dict('records')"
        if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
            raise _cohort.InputError(f"train: {name}: got {type(rows).__name__}; {hint}, or {key} for a file")
        out[key] = []
        for i, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise _cohort.InputError(f"train: {name}: row {i} is {str(row)[:60]!r}; {hint}")
            try:
                out[key].append(dumps(dict(row)) + "\n")
            except (TypeError, ValueError) as error:
                raise _cohort.InputError(f"train: {name}: row {i}: {error}") from None
    return out


@contextmanager
def _written(training: _cohort.Training, tables: dict[str, list[str]]) -> Iterator[None]:
    """Data in memory are files of the run's directory, which does not stay if the run cannot start."""
    if not tables:
        return (yield)
    names = {key: "data.jsonl" if key == "data.jsonl.path" else "eval.jsonl" for key in tables}
    folder = Path(training.make_directory(names))
    resumes, made = (folder / "config.yaml").exists(), []
    try:
        for key, lines in tables.items():
            path, text = folder / names[key], "".join(lines)
            if not resumes and not path.exists():  # which a killed start may have left
                made.append(path)
                path.write_text(text, encoding="utf-8")
            elif not path.exists() or path.read_text(encoding="utf-8") != text:
                raise _cohort.InputError(f"train: {folder} has other data than {names[key][:-6]}; hint: its own data, or another "
                                         "output_dir")
        yield
    finally:
        if not (folder / "config.yaml").exists():
            for path in made:
                path.unlink(missing_ok=True)
            if made:
                (folder / ".lock").unlink(missing_ok=True)
            with suppress(OSError):  # only an empty one
                folder.rmdir()


def metrics_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Those of a run, in the order of its stages."""
    stages = sorted((path for path in Path(folder).glob("*/metrics.jsonl")
                     if re.fullmatch(r"\d+-(pretrain|sft|grpo|mlm|classify|dpo)", path.parent.name)),
                    key=lambda path: int(path.parent.name.split("-")[0]))
    return [path for path in [Path(folder, "metrics.jsonl"), *stages] if path.exists()]


def _metrics(folder: str) -> list[dict[str, Any]]:
    """What metrics.jsonl of each stage has of its steps."""
    lines = [json.loads(line) for path in metrics_files(folder) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{name: math.nan if value is None else value for name, value in line.items() if name != "time"}
            for line in lines if "step_time" in line]


def _with_json_texts(config: Mapping[str, Any]) -> dict[str, Any]:
    """data.chat_template_kwargs, also of the stages, as the text that the key takes."""
    out = dict(config)
    data = out.get("data")
    if isinstance(data, Mapping) and isinstance(data.get("chat_template_kwargs"), Mapping):
        out["data"] = {**data, "chat_template_kwargs": dumps(data["chat_template_kwargs"])}
    if isinstance(out.get("stages"), list):
        out["stages"] = [_with_json_texts(stage) if isinstance(stage, Mapping) else stage for stage in out["stages"]]
    return out


def _named(kind: str, functions: Mapping[str, Callable[..., Any]] | None) -> Iterable[tuple[str, Callable[..., Any]]]:
    for name, function in dict(functions or {}).items():
        if not isinstance(name, str) or not callable(function):
            raise TypeError(f"{kind}: expected functions by name, got {name!r}: {function!r}")
        yield name, function


def _reward(name: str, function: Callable[..., Any], run: Callable[..., Any]) -> Callable[[list[dict[str, Any]]], Any]:
    """`function` on requests, by run(function, ...)."""
    def call(requests: list[dict[str, Any]]) -> list[float | None]:
        values = run(function, **arguments_of(function, requests))
        where = f"reward {name}: {getattr(function, '__qualname__', function)} returned"
        hint = f"hint: a list of {len(requests)} numbers, one for each completion, None where it does not apply"
        if getattr(values, "ndim", 1) != 1:
            raise _cohort.InputError(f"{where} an array of shape {tuple(values.shape)}; {hint}")
        if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
            raise _cohort.InputError(f"{where} {values!r}; {hint}")
        out = list(islice(values, len(requests) + 1))  # too many, and perhaps without an end, are refused by the run
        for i, value in enumerate(out):
            try:
                out[i] = None if value is None else float(value)
            except (TypeError, ValueError):
                raise _cohort.InputError(f"{where} {value!r} for completion {i}; {hint}") from None
        return out
    return call


def train(config: Config | None = None, *, data: Data | None = None, eval_data: Data | None = None, progress: bool = True,
          rewards: Mapping[str, Callable[..., Any]] | None = None, environments: Mapping[str, Callable[..., Any]] | None = None,
          loss: Callable[..., Any] | None = None, advantage: Callable[..., Any] | None = None,
          callbacks: Iterable[Callback] = (), resume: str | os.PathLike[str] | None = None, continues: bool = False,
          overrides: Mapping[str, Any] | None = None, gpus: int | None = None) -> TrainResult:
    """Trains as `cohort train` does and returns when the run has ended.

    config: a YAML file, or a dictionary with its keys, which may hold paths and numbers of numpy; paths count from the current
    directory. data, eval_data: problems in memory, dictionaries of an iterable such as a list or a datasets.Dataset, in place of
    the files of data.jsonl.path and eval_path; they are written into the run's directory.
    rewards: {name: function}, for rewards of these names in the configuration: function(completions, **fields) gets lists of equal
    length, as a TRL reward does (`prompts`, `answers`, `messages` and every field of the data), and returns as many numbers; None
    where it does not apply. environments: {name: function(requests)}, for `environment: {name: ...}`, in the protocol of
    docs/environments.md. Both are called in batches, on threads of the run.
    loss, advantage: functions in place of GRPO's own, for stages with `trainer: grpo`; docs/python.md says what they get.
    resume: the directory of a run, to continue it, with the same functions. continues: resumes the run in output_dir, if there is
    one. overrides: {"stages.1.steps": 5}. callbacks: see Callback. progress: a bar and the run's messages (Progress).
    gpus: as many processes train as with `cohort train --gpus`, this one among them, in which all functions are called.

    InputError for what is wrong with the configuration, Error for a run that fails, and what a function raises. KeyboardInterrupt
    is raised after a checkpoint has been saved: train(resume=...) continues from there.
    """
    steps = _steps(Background(saves=True), config, rewards, environments, [*callbacks, *([Progress()] if progress else [])], resume,
                   continues, overrides, data, eval_data, loss, advantage, gpus)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        steps.close()

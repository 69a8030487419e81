"""Ranks of a run on several GPUs: this process is rank 0 and calls the functions of all, the others are its children."""
from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import Any

from . import _cohort
from ._json import dumps

Functions = dict[str, dict[str, Callable[[Any], Any]]]  # by kind and name


@contextmanager
def started(training: _cohort.Training, request: dict[str, Any], gpus: int | None) -> Iterator[dict[str, Any]]:
    """Starts ranks 1 to gpus - 1 of a run, which end with it, and yields what Training.run() needs to be rank 0. An exception
    of a function that they call is raised here as it is."""
    if gpus is None or gpus == 1:
        return (yield {})
    if not isinstance(gpus, int) or gpus < 1:
        raise _cohort.InputError(f"train: gpus: expected a number of GPUs of this machine, got {gpus!r}; hint: 1 or more")
    if request["losses"]:
        raise _cohort.InputError(f"train: loss: {next(iter(request['losses']))} is a function, which cannot get the arrays of "
                                 f"{gpus} GPUs; hint: gpus=1, or a loss of the configuration")
    training.expect_gpus(gpus)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"size": gpus, "port": free.getsockname()[1], "name": f"cohort-{os.urandom(8).hex()}"}
    functions: Functions = {kind: request[kind] for kind in ("rewards", "environments", "advantages")}
    theirs = request | {"continues": training.continues, "overrides": training.overrides}
    theirs |= {kind: {name: partial(_remote, kind, name) for name in named} for kind, named in functions.items()}
    errors: list[BaseException] = []
    ranks: list[tuple[subprocess.Popen[bytes], Connection]] = []
    grace = 0.0  # seconds for the ranks to end by themselves
    try:
        for _ in range(1, gpus):
            ranks.append(_start())
        for rank, (process, connection) in enumerate(ranks, 1):
            try:
                connection.recv()
            except EOFError:
                raise _cohort.Error(f"train: rank {rank} has ended before the run, with code {process.wait()}; hint: standard error "
                                    "has its messages") from None
            connection.send((rank, meeting, theirs, logging.getLogger("cohort").level))
            threading.Thread(target=_serve, args=(connection, functions, errors), daemon=True).start()
        grace = 30.0
        yield meeting
    except _cohort.Error:
        if errors:
            raise errors[0] from None
        raise
    finally:
        for process, _ in ranks:
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace)
            process.kill()
            process.wait()


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    """A process with run_rank(), in a session of its own, so that an interrupt from the terminal goes to this process alone."""
    ours, theirs = Pipe()
    code = f"import sys; sys.path[:] = {list(map(str, sys.path))!r}; from cohort._ranks import run_rank; run_rank({theirs.fileno()})"
    with theirs:
        return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                                start_new_session=True), ours


def _serve(connection: Connection, functions: Functions, errors: list[BaseException]) -> None:
    """Calls functions for a rank until it ends."""
    with connection, suppress(EOFError, OSError):
        while True:
            kind, name, requests = connection.recv()
            answers, failure = None, ""
            try:
                answers = functions[kind][name](requests)
                if kind == "environments":  # of any types that JSON knows
                    answers = json.loads(dumps(answers))
            except BaseException as error:
                errors.append(error)
                failure = f"{kind}: {name} raised {type(error).__name__}: {error}"
            connection.send((answers, failure))


_parent: Connection  # of a process that _start() has started


def _remote(kind: str, name: str, requests: Any) -> Any:
    """Calls a function of rank 0's process, on the one thread that trains."""
    _parent.send((kind, name, requests))
    answers, failure = _parent.recv()
    if failure:
        raise _cohort.Error(failure)
    return answers


def run_rank(descriptor: int) -> None:
    from ._log import _console
    from .training import Callback
    global _parent
    _parent = Connection(descriptor)
    _parent.send(None)
    rank, meeting, request, level = _parent.recv()
    _console.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s"))
    logging.getLogger("cohort").setLevel(max(level, logging.WARNING))
    try:
        _cohort.Training(**request).run(Callback(), rank, **meeting)
    except (_cohort.Error, EOFError, ConnectionError) as error:
        sys.exit(f"[rank {rank}] {error}")

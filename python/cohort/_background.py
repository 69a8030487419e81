"""Work on a thread of its own, as an iterator."""
from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from . import _cohort


_logger = logging.getLogger("cohort")
_thread = threading.local()  # `waits_not` in not_waiting()


@contextmanager
def not_waiting() -> Iterator[None]:
    """Within it, close() on this thread makes a run end soon and does not wait."""
    before, _thread.waits_not = getattr(_thread, "waits_not", False), True
    try:
        yield
    finally:
        _thread.waits_not = before


class _Work:
    """The thread. It does not know the iterator, whose end ends it."""

    def __init__(self, waits: bool, saves: bool) -> None:
        self._saves = saves
        self.items: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.consumer: int | None = None  # the thread that has asked for the latest item
        self._resume = threading.Semaphore(0) if waits else None
        self._lock = threading.Lock()
        self._inside = threading.local()  # `active` on a thread that is in a function of call()
        self._num_active = 0  # functions that run
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of coroutines, on a thread of its own
        self._stop: Callable[[], None] = lambda: None
        self._is_done = threading.Event()
        self._at_exit = self._end_at_exit
        self._is_over = False
        self._interrupts = 0  # while end() waited

    def start(self, run: Callable[[Callable[[Any], None]], Any], stop: Callable[[], None]) -> None:
        def target() -> None:
            try:
                result = "result", run(self._put)
            except BaseException as error:
                result = "error", error
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
            self.items.put(result)
            self._is_done.set()
        with self._lock:
            if self._is_over:
                return self.items.put(("over", None))
            self._stop, self._thread = stop, threading.Thread(target=target, daemon=True)
            self._thread.start()
        atexit.register(self._at_exit)  # before the interpreter is finalized, when no thread can call it any more

    def resume(self) -> None:
        if self._resume is not None:
            self._resume.release()

    def end(self, waits: bool | None = None) -> None:
        """waits: for the thread; None: unless it may wait for the calling one, which a function of the run may wait for."""
        with self._lock:
            self._is_over = True
            thread = self._thread
        if thread is None:
            return
        self._stop()
        self.resume()
        if waits is None:
            waits = self._interrupts < 2 and (threading.get_ident() == self.consumer or self._num_active == 0)
        if waits and thread is not threading.current_thread() and not self.is_inside() and not getattr(_thread, "waits_not", False):
            self._wait()
            thread.join()
            atexit.unregister(self._at_exit)
            self._stop = lambda: None  # which refers to what refers to this

    def say(self, text: str) -> None:
        if self._saves:
            with not_waiting():
                _logger.warning(text)

    def _wait(self) -> None:
        """Until the thread is done. The second interrupt while it waits is raised. (An interrupt breaks Thread.join().)"""
        while True:
            try:
                self._is_done.wait()
                return
            except KeyboardInterrupt:
                self._interrupts += 1
                if self._interrupts > 1:
                    raise
                self.say("the run is about to save and end; interrupt once more not to wait for that")

    def _end_at_exit(self) -> None:
        try:
            self.end(waits=True)
        except KeyboardInterrupt:  # a thread that calls Python cannot outlive the interpreter
            os._exit(130)

    def is_inside(self) -> bool:
        return getattr(self._inside, "active", False)

    def call(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        before, self._inside.active = self.is_inside(), True
        with self._lock:
            self._num_active += 1
        try:
            value = function(*arguments, **keywords)
            return self._awaited(value) if inspect.isawaitable(value) else value
        finally:
            self._inside.active = before
            with self._lock:
                self._num_active -= 1

    def _awaited(self, value: Any) -> Any:
        async def result() -> Any:
            return await value
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(result(), self._loop).result()

    def _put(self, item: Any) -> None:
        self.items.put(("item", item))
        if self._resume is not None and not self._is_over:
            self._resume.acquire()


class Background(Generator[Any, None, Any]):
    """Yields what run(put) puts, and returns what it returns; its exception is raised here. If the caller ends early, by an
    interrupt too, stop() is called, which makes run() return soon, and is waited for.

    waits: put() returns when the next item is asked for, so that run() pauses while the caller uses an item. saves: says what
    follows an interrupt."""

    def __init__(self, *, waits: bool = False, saves: bool = False) -> None:
        self._work = _Work(waits, saves)
        self._begin: tuple[Any, ...] = ()
        self._is_over = False

    def begin(self, run: Callable[[Callable[[Any], None]], Any], stop: Callable[[], None]) -> Background:
        """What is done on the thread, from the first next() on."""
        self._begin = (run, stop)
        _iterators.add(self)
        return self

    def called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` for the run, which may call it on any thread; coroutines are awaited on one event loop. Within it, close()
        makes the run end soon and does not wait."""
        work = self._work
        return lambda *arguments, **keywords: work.call(function, *arguments, **keywords)

    def send(self, value: None) -> Any:
        if self._work.is_inside():
            raise RuntimeError("a function that the run calls asks for its next step, for which it would wait forever")
        if self._is_over:
            raise StopIteration
        self._work.consumer = threading.get_ident()
        try:
            if self._begin:
                begin, self._begin = self._begin, ()
                self._work.start(*begin)
            else:
                self._work.resume()
            kind, item = self._work.items.get()
        except BaseException:  # an interrupt
            try:
                self._work.say("interrupted: the run ends after its step in progress, and saves it")
            finally:
                self.close()
            raise
        if kind == "item":
            return item
        self._work.items.put(("over", None))  # for another thread that waits
        self.close()
        if kind == "error":
            raise item
        raise StopIteration(item)

    def throw(self, *error: Any) -> Any:
        self.close()
        return super().throw(*error)

    def close(self) -> None:
        self._is_over = self._is_over or not self._work.is_inside()
        self._begin = ()
        self._work.end()

    def __del__(self) -> None:
        self.close()


_iterators: weakref.WeakSet[Background] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:  # also those that were never asked for an item, while their objects can be freed
    for iterator in list(_iterators):
        iterator.close()
    _cohort.set_log_function(None)

"""Work on a thread of its own, as an iterator."""
from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any


class _Work:
    """The thread. It does not know the iterator, whose end ends it."""

    def __init__(self, waits: bool) -> None:
        self.items: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._resume = threading.Semaphore(0) if waits else None
        self._inside = threading.local()  # `active` on a thread that is in a function of called()
        self._thread: threading.Thread | None = None
        self._is_over = False

    def start(self, run: Callable[[Callable[[Any], None]], Any], stop: Callable[[], None]) -> None:
        def target() -> None:
            try:
                self.items.put(("result", run(self._put)))
            except BaseException as error:
                self.items.put(("error", error))
        self._stop, self._thread = stop, threading.Thread(target=target, daemon=True)
        self._thread.start()
        atexit.register(self.end)  # before the interpreter is finalized, when no thread can call it any more

    def resume(self) -> None:
        if self._resume is not None:
            self._resume.release()

    def end(self) -> None:
        self._is_over = True
        if self._thread is None:
            return
        self._stop()
        self.resume()
        if not self.is_inside():
            self._thread.join()
            atexit.unregister(self.end)

    def is_inside(self) -> bool:
        return getattr(self._inside, "active", False)

    def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        before, self._inside.active = self.is_inside(), True
        try:
            return function(*arguments, **keywords)
        finally:
            self._inside.active = before

    def _put(self, item: Any) -> None:
        self.items.put(("item", item))
        if self._resume is not None and not self._is_over:
            self._resume.acquire()


class Background(Generator[Any, None, Any]):
    """Yields what run(put) puts, and returns what it returns; its exception is raised here. If the caller ends early, by an
    interrupt too, stop() is called, which makes run() return soon, and is waited for.

    waits: put() returns when the next item is asked for, so that run() pauses while the caller uses an item."""

    def __init__(self, *, waits: bool = False) -> None:
        self._work = _Work(waits)
        self._begin: Callable[[], None] | None = None
        self._is_over = False

    def begin(self, run: Callable[[Callable[[Any], None]], Any], stop: Callable[[], None]) -> Background:
        """What is done on the thread, from the first next() on."""
        self._begin = lambda: self._work.start(run, stop)
        return self

    def called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` for the run, which may call it on any thread: within it, close() makes the run end
        soon and does not wait."""
        work = self._work
        return lambda *arguments, **keywords: work.call(function, *arguments, **keywords)

    def send(self, value: None) -> Any:
        if self._work.is_inside():
            raise RuntimeError("a function that the run calls asks for its next step, for which it would wait forever")
        if self._is_over:
            raise StopIteration
        if self._begin is not None:
            begin, self._begin = self._begin, None
            begin()
        else:
            self._work.resume()
        try:
            kind, item = self._work.items.get()
        except BaseException:  # an interrupt
            self.close()
            raise
        if kind == "item":
            return item
        self.close()
        if kind == "error":
            raise item
        raise StopIteration(item)

    def throw(self, *error: Any) -> Any:
        self.close()
        return super().throw(*error)

    def close(self) -> None:
        self._is_over = self._is_over or not self._work.is_inside()
        self._work.end()

    def __del__(self) -> None:
        self.close()

"""Work on a thread of its own, as an iterator."""
from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any


def in_background(run: Callable[[Callable[[Any], None]], Any], stop: Callable[[], None]) -> Generator[Any, None, Any]:
    """Yields what run(put) puts, and returns what it returns; its exception is raised here. If the caller ends early, by an
    interrupt too, stop() is called, which makes run() return soon, and is waited for."""
    items: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def target() -> None:
        try:
            items.put(("result", run(lambda item: items.put(("item", item)))))
        except BaseException as error:
            items.put(("error", error))

    thread = threading.Thread(target=target, daemon=True)

    def end() -> None:
        stop()
        thread.join()

    thread.start()
    atexit.register(end)  # before the interpreter is finalized, when no thread can call it any more
    try:
        while True:
            kind, value = items.get()
            if kind == "error":
                raise value
            if kind == "result":
                return value
            yield value
    finally:
        end()
        atexit.unregister(end)

"""Messages of the library, as records of the logger "cohort" of Python's logging."""
from __future__ import annotations

import logging
import sys

from . import _cohort
from ._background import not_waiting

_logger = logging.getLogger("cohort")
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)


class _Console(logging.Handler):
    """Prints to standard error, unless the program has handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and _logger.handlers == [self]:
            print(self.format(record), file=sys.stderr, flush=True)


def set_log_level(level: str | int) -> None:
    """The least level of messages that are shown: "debug", "info" (default), "warning" or "error", or one of logging's."""
    try:
        _logger.setLevel(level.upper() if isinstance(level, str) else level)
    except (TypeError, ValueError) as error:
        raise _cohort.InputError(f"set_log_level: {error}; hint: debug, info, warning or error") from None


def _log(level: int, text: str) -> None:
    with not_waiting():  # a handler may close the run that logs
        _logger.log(_LEVELS[level], "%s", text)


_console = _Console()
_console.setFormatter(logging.Formatter("[%(asctime)s %(levelname).1s] %(message)s", "%H:%M:%S"))
_logger.addHandler(_console)
if _logger.level == logging.NOTSET:
    _logger.setLevel(logging.INFO)
_cohort.set_log_function(_log)

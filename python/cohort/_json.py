"""Values of Python as JSON, which is YAML too."""
import json
import os
from typing import Any


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numbers and arrays of numpy and torch
        return value.tolist()
    raise TypeError(f"expected a text, a number, a boolean, None, a list or a dictionary, got {value!r}")


def dumps(value: Any) -> str:
    """TypeError or ValueError for values that JSON does not have, UnicodeEncodeError for texts that UTF-8 does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    text.encode()
    return text

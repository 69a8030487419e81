#!/usr/bin/env python3
"""Serves a Python function as a reward:
    rewards: [{name: command, run: "python3 cohort_reward.py FILE.py"}]

FILE.py defines reward(completions, **fields), as for TRL: lists of equal length, of texts and of every field of the
data's lines in addition to `prompts`, `answers` and `messages`; if it accepts them and the data have no such fields,
also `lengths` and `max_lengths` (in tokens), `truncated` and `stop_reasons`. It returns a list of numbers, with None where it does
not apply. Below `@conversational` (from cohort_reward import conversational) it gets messages, as in TRL. Its output and the
tracebacks of its exceptions go to workers.log in the run's directory. `cmake --install` installs this file in PREFIX/share/cohort.
"""
import functools
import importlib.util
import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


def load(path, name):
    if not os.path.isfile(path):
        sys.exit(f"{path}: no such file in {os.getcwd()}")
    # The modules beside the file; those beside a link to it come second.
    sys.path[:0] = [os.path.dirname(os.path.realpath(path)), os.path.dirname(os.path.abspath(path))]
    spec = importlib.util.spec_from_file_location("user_reward", path)
    module = sys.modules["user_reward"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        sys.exit(f"{path}: defines no function {name}(completions, **fields)")
    return function


# What the sampler knows of a completion: the argument's name -> the key of a request.
ROLLOUT = {"lengths": "length", "max_lengths": "max_length", "truncated": "truncated", "stop_reasons": "stop_reason"}


def accepts(function, name):
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def conversational(function: Callable[..., Any]) -> Callable[..., Any]:
    """The reward `function` with completions as TRL gives them: [{"role": "assistant", "content": text}] each, or all messages of a
    dialogue after its prompt; `prompts` are the messages before it, where the data have messages."""
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)
    call.conversational = True  # type: ignore[attr-defined]
    return call


def prompt_messages(sample):
    messages, given = sample.get("messages"), sample["fields"].get("prompt")
    if not messages:
        return sample["prompt"]
    if isinstance(given, list):
        messages = messages[:len(given)]  # without the completion
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def arguments_of(function, batch):
    """The keyword arguments of function() for a list of requests."""
    names = {name for sample in batch for name in sample["fields"]}
    fields = {name: [sample["fields"].get(name) for sample in batch] for name in names}
    for name in ("prompt", "completion", "answer"):
        fields[name + "s"] = [sample[name] for sample in batch]
    fields["messages"] = [sample.get("messages") for sample in batch]
    if getattr(function, "conversational", False):
        fields["prompts"] = [prompt_messages(sample) for sample in batch]
        fields["completions"] = [sample.get("transcript") or [{"role": "assistant", "content": sample["completion"]}]
                                 for sample in batch]
    for name, key in ROLLOUT.items():
        if accepts(function, name):
            fields.setdefault(name, [sample.get(key) for sample in batch])
    return fields


def score(function, batch):
    try:
        values = [None if value is None else float(value) for value in function(**arguments_of(function, batch))]
        if len(values) != len(batch):
            raise ValueError(f"{len(values)} rewards of {len(batch)} completions")
        errors = [None if value is None or math.isfinite(value) else f"the reward is {value}" for value in values]
    except Exception as error:
        traceback.print_exc()
        last_line = traceback.format_exception_only(type(error), error)[-1].strip()
        if isinstance(error, (TypeError, AttributeError)) and any(
                text in last_line for text in ("string ind", "'str' object")):
            last_line = "completions are texts, not messages, without @conversational: " + last_line
        values, errors = batch, [last_line] * len(batch)
    return [{"index": sample["index"], **({"error": error_text} if error_text else {"reward": value})}
            for sample, value, error_text in zip(batch, values, errors)]


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: cohort_reward.py FILE.py [FUNCTION]")
    # Separate the protocol from standard input and output, which the function and its children may use.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    function = load(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else "reward")
    for line in requests:
        request = json.loads(line)
        results = score(function, request if isinstance(request, list) else [request])
        answers.write(json.dumps(results if isinstance(request, list) else results[0]) + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.modules.setdefault("cohort_reward", sys.modules["__main__"])  # for FILE.py, if this is a module of the package
    main()

#!/usr/bin/env python3
"""Serves a Python function as a reward: rewards: [{name: command, run: "python3 cohort_reward.py FILE.py"}]

FILE.py defines reward(completions, **fields), as for TRL: lists of equal length, of texts and of every field of the
data's lines besides `prompts`, `answers` and `messages`. It returns a list of numbers, None where it does not apply. Its
prints go to rewards.log in the run's directory.
"""
import importlib.util
import json
import sys


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: cohort_reward.py FILE.py [FUNCTION]")
    requests, answers = sys.stdin, sys.stdout
    sys.stdout = sys.stderr
    spec = importlib.util.spec_from_file_location("user_reward", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, sys.argv[2] if len(sys.argv) == 3 else "reward")
    for line in requests:
        request = json.loads(line)
        batch = request if isinstance(request, list) else [request]
        names = {name for one in batch for name in one["fields"]}
        fields = {name: [one["fields"].get(name) for one in batch] for name in names}
        for name, key in (("prompts", "prompt"), ("answers", "answer"), ("messages", "messages")):
            fields[name] = [one.get(key) for one in batch]
        try:
            values = function(completions=[one["completion"] for one in batch], **fields)
            values = [None if value is None else float(value) for value in values]
            results = [{"index": one["index"], "reward": value} for one, value in zip(batch, values, strict=True)]
        except Exception as error:
            results = [{"index": one["index"], "error": repr(error)} for one in batch]
        answers.write(json.dumps(results if isinstance(request, list) else results[0]) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

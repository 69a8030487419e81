#!/usr/bin/env python3
"""Prints JSON lines of conversations that teach a chat model to call the calculator of the environment `tools` in the Hermes
format: arithmetic in steps, as the task `arithmetic` has it, with one call per step.

  python3 bench/tool_dialogues.py [--num 1000] [--seed 0] [--steps 2 4] [--direct 0.8] > dialogues.jsonl

--steps: smallest and largest number of operators. --direct: the fraction of the conversations that answer at once, without the
tool. Prompts of GRPO end before the assistant's last message: take --direct 1 for them.
"""
import argparse
import json
import random

SYSTEM = """You are a careful assistant. You have a calculator. To use it, write
<tool_call>
{"name": "calculator", "arguments": {"expression": "12+34"}}
</tool_call>
and nothing else. You then get the result. Calculate step by step, and give the answer at the end."""
MAX_VALUE = 10**9  # exclusive, of the size of every result
OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def message(role, content):
    return {"role": role, "content": content}


def conversation(rng, steps, direct):
    value = rng.randint(10, 999)
    expression, calls = "(" * (steps - 1) + str(value), []
    for i in range(steps):
        operand = rng.randint(10, 999)
        op, result = rng.choice([(op, result) for op, apply in OPERATIONS.items()
                                 if abs(result := apply(value, operand)) < MAX_VALUE])
        expression += f"{')' if i else ''}{op}{operand}"
        call = json.dumps({"name": "calculator", "arguments": {"expression": f"{value}{op}{operand}"}})
        calls += [message("assistant", f"<tool_call>\n{call}\n</tool_call>"), message("tool", str(result))]
        value = result
    return {"messages": [message("system", SYSTEM), message("user", f"What is {expression}?"), *([] if direct else calls),
                         message("assistant", f"The answer is {value}.")], "answer": str(value)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, nargs=2, default=[2, 4], metavar=("MIN", "MAX"))
    parser.add_argument("--direct", type=float, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    for _ in range(args.num):
        print(json.dumps(conversation(rng, rng.randint(*args.steps), rng.random() < args.direct)))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Serves tools or dialogues in Python to an environment of programs:
    environment: {name: command, run: "python3 cohort_environment.py FILE.py"}

FILE.py has functions with the decorator `tool`, of `from cohort_environment import tool`. Name, docstring (with an "Args:"
section) and type hints are what the model is shown; print them into the file of environment.tool_schemas by
    python3 cohort_environment.py FILE.py --schemas > tools.json
The calls of a turn are answered in their order by the results, texts or values as JSON; exceptions, unknown names and calls
that cannot be parsed are answered by a text that says so. A turn without a call ends the dialogue.

Or FILE.py has a class Environment with turn(self, messages, completion, ...), which takes any keys of a request
(rl/environments/command.cpp). It returns the observation (a text, a list of texts or of messages), Done(reward) of
`from cohort_environment import Done`, or a dict with keys of an answer, such as {"observation": "no", "reward": -0.1}. An
exception fails the dialogue. With environment.starts it may also have start(self, fields, ...), which returns a user's message
after the prompt, a list of messages, or a dict such as {"observation": "Guess!", "fields": {"answer": "7"}}.

Up to --concurrency (256) turns are answered at the same time: functions run in threads, coroutines (async def) in an event
loop. Output and tracebacks go to workers.log in the run's directory. An installed Cohort has this file in share/cohort.
"""
import argparse
import asyncio
import concurrent.futures
import importlib.util
import inspect
import json
import os
import re
import sys
import traceback
import typing

TOOLS: typing.Dict[str, typing.Callable[..., typing.Any]] = {}  # by name
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", tuple: "array", dict: "object"}


class Done(typing.NamedTuple):
    """Ends the dialogue, with a reward of the turn or None."""
    reward: typing.Optional[float] = None


def tool(function):
    """Decorator of a function that the model may call."""
    function.schema = schema_of(function)
    TOOLS[function.__name__] = function
    return function


def type_schema(hint):
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"type": TYPES[type(arguments[0])], "enum": list(arguments)}
    if origin is typing.Union or type(hint).__name__ == "UnionType":
        kinds = [type_schema(argument) for argument in arguments if argument is not type(None)]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if hint is typing.Any:
        return {}
    if (origin or hint) not in TYPES:
        raise TypeError(f"the type {hint} has no JSON schema")
    name = TYPES[origin or hint]
    return {"type": name, "items": type_schema(arguments[0])} if name == "array" and arguments else {"type": name}


def schema_of(function):
    text, _, section = (inspect.getdoc(function) or "").partition("Args:\n")
    found = re.findall(r"^    (\w+)[^:\n]*: (.*(?:\n {5}.*)*)", section, re.MULTILINE)
    described = {name: " ".join(words.split()) for name, words in found}
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    properties = {name: {**type_schema(hints.get(name, typing.Any)),
                         **({"description": described[name]} if name in described else {})} for name in parameters}
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    return {"type": "function",
            "function": {"name": function.__name__, "description": " ".join(text.split()),
                         "parameters": {"type": "object", "properties": properties, "required": required}}}


def load(path):
    if not os.path.isfile(path):
        sys.exit(f"{path}: no such file in {os.getcwd()}")
    sys.modules["cohort_environment"] = sys.modules[__name__]  # FILE.py imports the module that runs
    # The modules beside the file; those beside a link to it come second.
    sys.path[:0] = [os.path.dirname(os.path.realpath(path)), os.path.dirname(os.path.abspath(path))]
    spec = importlib.util.spec_from_file_location("user_environment", path)
    module = sys.modules["user_environment"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    environment = getattr(module, "Environment", lambda: None)()
    if environment is None and not TOOLS:
        sys.exit(f"{path}: defines neither a class Environment nor functions with the decorator tool")
    return environment


def last_line(error):
    return traceback.format_exception_only(type(error), error)[-1].strip()


def encode(value):
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


async def call(function, arguments):
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await asyncio.get_running_loop().run_in_executor(None, lambda: function(**arguments))


async def call_tool(name, arguments, error=None, **_):
    if error is not None:
        return f"Error: {error}"
    if name not in TOOLS:
        return f"Error: there is no tool {name}; there are: {', '.join(TOOLS)}"
    try:
        result = await call(TOOLS[name], arguments)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    except Exception as error:
        return f"Error: {last_line(error)}"


def accepted(function, request):
    """The keys of a request that a function takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {key: value for key, value in request.items() if takes_all or key in parameters}


async def turn(environment, request):
    if request["turn"] == 0:
        start = getattr(environment, "start", None)
        return {} if start is None else await call(start, accepted(start, request))
    if environment is None:
        calls = request.get("tool_calls")
        return [await call_tool(**one) for one in calls] if calls else Done()
    return await call(environment.turn, accepted(environment.turn, request))


async def answer(environment, request):
    """The line that answers a request."""
    key = {"index": request["index"], "turn": request["turn"]}
    try:
        result = await turn(environment, request)
        if isinstance(result, Done):
            result = {"done": True, **({} if result.reward is None else {"reward": float(result.reward)})}
        elif isinstance(result, list) and any(isinstance(item, dict) for item in result):
            result = {"messages": result}
        elif isinstance(result, (str, list)):
            result = {"observation": result}
        line = encode({**result, **key})
        if len(line) > 1 << 20:  # cohort would end this process
            raise ValueError(f"the answer has {len(line)} bytes, which is over 1 MB")
        return line
    except Exception as error:
        traceback.print_exc()
        return encode({**key, "error": last_line(error)})


async def serve(environment, concurrency, requests, answers):
    async def serve_one(line):
        async with slots:
            answers.write(await answer(environment, json.loads(line)) + b"\n")
            answers.flush()

    loop, slots, tasks = asyncio.get_running_loop(), asyncio.Semaphore(concurrency), set()
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(concurrency + 1))
    while line := await loop.run_in_executor(None, requests.readline):
        tasks.add(task := asyncio.ensure_future(serve_one(line)))
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


def main():
    parser = argparse.ArgumentParser(usage="cohort_environment.py FILE.py [--schemas] [--concurrency N]")
    parser.add_argument("file")
    parser.add_argument("--schemas", action="store_true")
    parser.add_argument("--concurrency", type=int, default=256)
    options = parser.parse_args()
    # Separate the protocol from standard input and output, which functions and their children may use.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    environment = load(options.file)
    if options.schemas:
        answers.write(json.dumps([function.schema for function in TOOLS.values()], indent=2).encode() + b"\n")
    else:
        asyncio.run(serve(environment, options.concurrency, requests, answers))
    answers.flush()


if __name__ == "__main__":
    sys.modules.setdefault("cohort_environment", sys.modules["__main__"])  # for FILE.py, if this is a module of the package
    main()

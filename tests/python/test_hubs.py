"""The examples of examples/hubs, each with its package, through the scripts that serve rewards and environments."""
import ast
import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
HUBS = ROOT / "examples" / "hubs"
EXAMPLES = sorted(HUBS.glob("*.py"))


def needs(package):
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=f"{package} is not installed")


def environment(**variables):
    """The environment of a program, which finds the helpers of scripts/."""
    return os.environ | {"PYTHONPATH": str(ROOT / "scripts")} | variables


def problems(example, *arguments, **variables):
    """The lines that an example writes as problems."""
    done = subprocess.run([sys.executable, HUBS / example, *arguments], env=environment(**variables), capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


class Program:
    """A script of scripts/ that serves an example, with one line of JSON per request and answer."""

    def __init__(self, script, example, **variables):
        self.process = subprocess.Popen([sys.executable, ROOT / "scripts" / script, HUBS / example], env=environment(**variables),
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.timer = threading.Timer(120, self.process.kill)

    def __enter__(self):
        self.timer.start()
        return self

    def __exit__(self, *error):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.timer.cancel()

    def send(self, request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def receive(self):
        line = self.process.stdout.readline()
        assert line, "the program has ended"
        return json.loads(line)

    def ask(self, request):
        self.send(request)
        return self.receive()

    def reward(self, completion, fields, **more):
        """A completion's reward, or the whole answer if it has none."""
        answer = self.ask({"index": 0, "step": 0, "prompt": "", "completion": completion, "answer": "", "fields": fields} | more)
        return answer.get("reward", answer)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_at_most_25_lines_of_code(path):
    text = path.read_text()
    docstring = ast.parse(text).body[0].end_lineno
    assert sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines()[docstring:]) <= 25


def test_there_are_three_examples():
    assert len(EXAMPLES) == 3


@needs("reasoning_gym")
def test_own_answers_of_reasoning_gym_score_1_and_others_less():
    tasks = ["chain_sum", "leg_counting", "countdown", "spell_backward", "mini_sudoku", "prime_factorization"]
    lines = problems("reasoning_gym_reward.py", *tasks)
    assert len(lines) == 500 * len(tasks) and lines[0] == problems("reasoning_gym_reward.py", tasks[0])[0]
    with Program("cohort_reward.py", "reasoning_gym_reward.py") as program:
        for line in lines[::250]:
            answer = line["answer"]
            assert program.reward(answer, line) == 1
            assert program.reward(f"Let me see ... <answer>{answer}</answer>", line) == 1
            assert program.reward(f"I will not say it, {answer}7.", line) < 1
            assert program.reward("", line) < 1
        batch = [{"index": i, "prompt": "", "completion": line["answer"], "answer": "", "fields": line}
                 for i, line in enumerate(lines[::250])]
        assert program.ask(batch) == [{"index": i, "reward": 1.0} for i in range(len(batch))]


SERVER = '''
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    message: str

class Answer(Observation):
    message: str

class Game(Environment):
    """Guess the seed, in at most three turns."""
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        self.secret, self.turns = seed, 0
        return Answer(message=f"Guess a number with the remainder {seed % 3} modulo 3.")

    def step(self, action, timeout_s=None, **more):
        self.turns += 1
        if action.message == str(self.secret):
            return Answer(message="Right.", reward=1.0, done=True)
        return Answer(message=f"It is not {action.message}.", reward=-0.125, done=self.turns == 3)

    @property
    def state(self):
        return State(step_count=self.turns)

app = create_fastapi_app(Game, Guess, Answer, max_concurrent_envs=16)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
'''


@pytest.fixture
def server(tmp_path):
    """The URL of a small server, made of openenv's own classes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "server.py").write_text(SERVER)
    process = subprocess.Popen([sys.executable, tmp_path / "server.py", str(port)])
    try:
        for _ in range(600):
            assert process.poll() is None, "the server has ended"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        else:
            pytest.fail("the server does not listen")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@needs("openenv")
def test_each_dialogue_has_its_own_session_of_openenv(server):
    def request(index, turn, completion, step=0):
        return {"index": index, "step": step, "turn": turn, "completion": completion, "messages": [], "fields": {"seed": index}}

    with Program("cohort_environment.py", "openenv_environment.py", OPENENV_URL=server) as program:
        for i in range(8):
            assert program.ask({"index": i, "step": 0, "turn": 0, "fields": {"seed": i}}) == {
                "index": i, "turn": 0, "observation": f"Guess a number with the remainder {i % 3} modulo 3."}
        # All dialogues at the same time, with answers in any order.
        for turn in (1, 2, 3):
            open_dialogues = [i for i in range(8) if i > 3 or turn <= i % 4]
            for i in open_dialogues:
                program.send(request(i, turn, str(i) if i <= 3 and turn == i else "x"))
            answers = sorted((program.receive() for _ in open_dialogues), key=lambda answer: answer["index"])
            for i, answer in zip(open_dialogues, answers):
                right, last = i <= 3 and turn == i, turn == 3
                end = {"done": True} if right or last else {"observation": "It is not x."}
                assert answer == {"index": i, "turn": turn, "reward": 1 if right else -0.125} | end
        # Dialogues that a limit ends leave sessions behind; those of earlier steps are closed, else the server had none left.
        for step in range(1, 6):
            for i in range(8):
                assert program.ask(request(i, 1, "x", step)) == {"index": i, "turn": 1, "observation": "It is not x.", "reward": -0.125}
        assert program.ask(request(5, 1, "5", 5)) == {"index": 5, "turn": 1, "done": True, "reward": 1}
        # A turn without a session, as after a restart, fails its dialogue only.
        assert "KeyError" in program.ask(request(5, 2, "5", 5))["error"]


TASKSET = '''
import verifiers.v1 as vf

__all__ = ["Sums"]

class SumData(vf.TaskData):
    total: int

class Sum(vf.Task[SumData]):
    @vf.reward(weight=0.75)
    async def right(self, trace) -> float:
        return float(trace.last_reply == str(self.data.total))

    @vf.reward(weight=0.25)
    async def asked(self, trace) -> float:
        assert trace.nodes[0].message.content == "Answer by a number." and not trace.nodes[1].sampled
        return float(trace.messages[1].content.startswith("What is") and len(trace.assistant_messages) == 1)

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for i in range(4):
            yield Sum(SumData(prompt=f"What is {i}+7?", system_prompt="Answer by a number.", total=i + 7), self.config.task)
'''


@needs("verifiers")
def test_tasks_of_verifiers_score_a_conversation(tmp_path):
    (tmp_path / "sums_of_seven.py").write_text(TASKSET)
    variables = {"TASKSET": "sums-of-seven", "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), str(tmp_path)])}
    lines = problems("verifiers_reward.py", "3", **variables)
    assert len(lines) == 3 and lines[2]["prompt"] == [{"role": "system", "content": "Answer by a number."},
                                                      {"role": "user", "content": "What is 2+7?"}]
    with Program("cohort_reward.py", "verifiers_reward.py", **variables) as program:
        for line, right in zip(lines, ("7", "8", "9")):
            given = {"messages": line["prompt"] + [{"role": "assistant", "content": "unknown"}]}
            assert program.reward(right, line, **given) == 1
            assert program.reward("70", line, **given) == 0.25
            turns = [{"role": "assistant", "content": "Wait.", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
                     {"role": "tool", "content": "done", "name": "add"}, {"role": "assistant", "content": right}]
            assert program.reward(right, line, transcript=turns, **given) == 0.75


@needs("verifiers")
def test_a_task_of_verifiers_whose_rewards_all_need_a_runtime_has_none(tmp_path):
    (tmp_path / "sums_of_seven.py").write_text(TASKSET.replace("self, trace)", "self, trace, runtime)"))
    variables = {"TASKSET": "sums_of_seven", "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), str(tmp_path)])}
    line = problems("verifiers_reward.py", "1", **variables)[0]
    with Program("cohort_reward.py", "verifiers_reward.py", **variables) as program:
        assert program.reward("7", line, messages=line["prompt"]) is None

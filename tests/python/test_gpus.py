"""train(gpus=N), with CPUs in place of GPUs: one process for each rank, and functions that are called in this one."""
import contextlib
import copy
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback

import cohort
import pytest
from cohort import _cohort, _ranks

ROOT = pathlib.Path(__file__).parents[2]
REWARD = '''
def reward(completions, answers, **fields):
    return [0.3 * c.count("1") + 0.1 * len(c) if "7" not in c else None for c, a in zip(completions, answers)]
'''
exec(REWARD)


@pytest.fixture
def ranks(monkeypatch):
    """The processes of ranks 1, 2, ... that have been started, where CPUs are as good as GPUs."""
    start, processes = _ranks._start, []

    def started():
        process, connection = start()
        processes.append(process)
        return process, connection
    monkeypatch.setattr(_ranks, "_start", started)
    monkeypatch.setattr(_cohort.Training, "expect_gpus", lambda training, count: None)
    yield processes
    assert processes and all(process.poll() is not None for process in processes)


def weights(run):
    return [path.read_bytes() for name in ("model.safetensors", "training/optimizer.safetensors")
            for path in sorted(pathlib.Path(run).glob(f"checkpoints/step-*/{name}"))[-1:]]


def checkpoints(run):
    return sorted(int(path.name[5:]) for path in pathlib.Path(run).glob("checkpoints/step-*"))


def of_the_command_line(config, folder, size):
    """The weights that `size` processes of `cohort train` give, started as by torchrun, with REWARD as a program."""
    program = {"name": "command", "directory": str(folder), "run": f"{sys.executable} {ROOT / 'scripts' / 'cohort_reward.py'} reward.py"}
    (folder / "reward.py").write_text(REWARD)
    (folder / "ranks.yaml").write_text(json.dumps(
        config | {"output_dir": str(folder / "command"), "rewards": [config["rewards"][0] | program]}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [subprocess.Popen([sys.executable, "-m", "cohort", "train", str(folder / "ranks.yaml")], env=os.environ | {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        stdout=subprocess.DEVNULL) for rank in range(size)]
    assert [process.wait(timeout=120) for process in processes] == [0] * size
    return weights(folder / "command")


@pytest.mark.parametrize("size", [2, 3])
def test_functions_are_called_here_and_give_the_weights_of_the_command_line(small, tmp_path, ranks, size):
    calls = []

    def mine(completions, answers, **fields):
        calls.append((os.getpid(), threading.get_ident(), len(completions)))
        return reward(completions, answers)  # noqa: F821
    config = small("grpo", rewards=[{"name": "mine", "weight": 2}])
    result = cohort.train(config, rewards={"mine": mine}, gpus=size, progress=False)
    assert len(ranks) == size - 1 and [process.returncode for process in ranks] == [0] * (size - 1)
    assert result.finished and [m["step"] for m in result.metrics] == [1, 2, 3, 4]
    assert {call[0] for call in calls} == {os.getpid()} and len({call[1] for call in calls}) == size
    seen, calls[:] = sum(call[2] for call in calls), []
    cohort.train(config | {"output_dir": str(tmp_path / "one")}, rewards={"mine": mine}, gpus=1, progress=False)
    assert seen == sum(call[2] for call in calls) and len(ranks) == size - 1
    assert weights(result.dir) == of_the_command_line(config, tmp_path, size) and len(weights(result.dir)) == 2


@pytest.mark.skipif(cohort.cuda_device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_weights_of_the_command_line(small, tmp_path):
    config = small("grpo", rewards=[{"name": "mine"}], device="cuda")
    result = cohort.train(config, rewards={"mine": reward}, gpus=2, progress=False)  # noqa: F821
    assert weights(result.dir) == of_the_command_line(config, tmp_path, 2) and len(weights(result.dir)) == 2


def test_environments_advantages_and_data_in_memory_have_ranks_too(small, tmp_path, ranks):
    pids = set()

    def play(requests):
        pids.add(os.getpid())
        return [{"reward": 0.1 * len(request["completion"]), "done": True} for request in requests]

    def half(b):
        pids.add(os.getpid())
        return [value - 0.5 for value in b.rewards]
    config = small("grpo", rewards=[{"name": "environment"}], environment={"name": "game", "max_turns": 2}, steps=2)
    config["data"] = {"jsonl": {"held_out_fraction": 0}}
    config["model"]["context"] = 32
    arguments = {"environments": {"game": play}, "advantage": half, "progress": False,
                 "data": [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(12)]}
    ours = cohort.train(config, gpus=2, **arguments)
    threads = cohort.train(config | {"ranks": 2, "output_dir": str(tmp_path / "threads")}, **arguments)
    assert weights(ours.dir) == weights(threads.dir) and weights(ours.dir) and pids == {os.getpid()}
    resumed = cohort.train(resume=ours.dir, overrides={"steps": 3}, gpus=2, environments={"game": play}, advantage=half, progress=False)
    assert resumed.finished and len(resumed.metrics) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_function_raises_ends_all_ranks_and_is_raised(small, ranks, rank):
    first, steps = [], []  # the gold answers are scored by rank 0

    def failing(completions, **fields):
        first.append(threading.get_ident())
        if len(steps) == 2 and (first[0] == first[-1]) == (rank == 0):
            raise ZeroDivisionError("from the reward")
        return [float(len(c)) for c in completions]

    class Steps(cohort.Callback):
        def on_step(self, metrics):
            steps.append(metrics["step"])
    config = small("grpo", rewards=[{"name": "mine"}], checkpoint={"every": 2})
    with pytest.raises(ZeroDivisionError, match="from the reward") as raised:
        cohort.train(config, rewards={"mine": failing}, callbacks=[Steps()], gpus=2, progress=False)
    assert "failing" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert checkpoints(config["output_dir"]) == [0, 2] and ranks[0].wait(10) == 1


def test_an_answer_that_a_rank_refuses_is_named(small, ranks):
    main = []

    def wrong(completions, **fields):
        main.append(threading.get_ident())
        return [float(len(c)) for c in completions[main[0] != main[-1]:]]
    with pytest.raises(cohort.Error, match="rank 1 .* reward mine: its function returned .* hint: one to each"):
        cohort.train(small("grpo", rewards=[{"name": "mine"}]), rewards={"mine": wrong}, gpus=2, progress=False)


def test_a_rank_that_dies_is_named(small, ranks):
    class Kills(cohort.Callback):
        def on_step(self, metrics):
            if metrics["step"] == 3:
                ranks[1].kill()
    config = small("sft", batch_size=6, steps=10**8)
    with pytest.raises(cohort.Error, match=r"rank 2 \(.*\) ended without a message") as raised:
        cohort.train(config, callbacks=[Kills()], gpus=3, progress=False)
    assert f"pid {ranks[1].pid})" in str(raised.value)
    assert cohort.train(resume=config["output_dir"], overrides={"steps": 4}, gpus=2, progress=False).finished


def test_a_rank_that_does_not_start_is_named(small, tmp_path, ranks, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(cohort.Error, match="rank 1 has ended before the run, with code 1; hint: standard error"):
        cohort.train(small("sft", batch_size=4), gpus=2, progress=False)
    assert not list(tmp_path.iterdir())


def test_steps_are_yielded_with_ranks(small, ranks):
    config = small("sft", batch_size=4, steps=10**6)
    steps = cohort.train_steps(config, gpus=2)
    assert [next(steps)["step"] for _ in range(3)] == [1, 2, 3]
    steps.close()
    assert checkpoints(config["output_dir"]) == [0, 3]


def test_a_pause_between_two_steps_is_no_hang(small, ranks):
    seen = []
    for metrics in cohort.train_steps(small("sft", batch_size=4, steps=3, watchdog_minutes=0.08), gpus=2):
        seen.append(metrics["step"])
        if len(seen) == 2:
            time.sleep(8)
    assert seen == [1, 2, 3]


SCRIPT = """
import json, sys, cohort
from cohort import _cohort, _ranks
_cohort.Training.expect_gpus = lambda training, count: None
start = _ranks._start
def started():
    process, connection = start()
    print(process.pid, flush=True)
    return process, connection
_ranks._start = started
class Says(cohort.Callback):
    def on_step(self, metrics):
        if metrics["step"] == 2: print("step", flush=True)
cohort.train(json.loads(sys.argv[1]), callbacks=[Says()], gpus=2, progress=False)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_this_process(small, number):
    config = small("sft", batch_size=4, steps=10**8)
    with subprocess.Popen([sys.executable, "-c", SCRIPT, json.dumps(config)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          start_new_session=True) as process:
        rank = int(process.stdout.readline())
        assert process.stdout.readline() == "step\n"
        os.killpg(process.pid, number)  # as a terminal does
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -number
    if number == signal.SIGINT:
        assert checkpoints(config["output_dir"])[-1] >= 2 and errors.count("KeyboardInterrupt") == 1 and "[rank 1]" not in errors
    until = time.monotonic() + 30
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.kill(rank, 0)
            time.sleep(0.05)
        pytest.fail("rank 1 is still there")


def test_what_cannot_have_ranks_is_refused_before_anything_starts(small, tmp_path, monkeypatch):
    monkeypatch.setattr(_ranks, "_start", lambda: pytest.fail("a rank was started"))
    data = [{"prompt": "1+1=", "answer": "2"}] * 12
    for gpus in (0, -1, "2", 2.0):
        with pytest.raises(cohort.InputError, match="train: gpus: expected a number of GPUs of this machine, got "):
            cohort.train(small("sft"), gpus=gpus, progress=False)
    with pytest.raises(cohort.InputError, match="gpus: expected device: cuda, the configuration has device: cpu"):
        cohort.train(copy.deepcopy(small("sft")) | {"data": {"jsonl": {}}}, data=data, gpus=2, progress=False)
    with pytest.raises(cohort.InputError, match="CUDA|gpus: 1000 GPUs requested, this machine has"):
        cohort.train(small("sft", device="cuda"), gpus=1000, progress=False)
    with pytest.raises(cohort.InputError, match="loss: mine is a function, .* of 2 GPUs; hint: gpus=1"):
        def mine(b):
            return 0.0, b.logprob
        cohort.train(small("grpo", device="cuda"), loss=mine, gpus=2, progress=False)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    with pytest.raises(cohort.InputError, match="gpus: this process is already rank 0 of 2 that torchrun started; hint: omit gpus"):
        cohort.train(small("sft", device="cuda"), gpus=2, progress=False)
    assert not list(tmp_path.iterdir())

"""cohort.train(): the runs of the command line tool, with functions of Python."""
import asyncio
import contextlib
import copy
import itertools
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import cohort
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
REWARD = '''
def reward(completions, answers, **fields):
    return [0.3 * c.count("1") + 0.1 * len(c) if "7" not in c else None for c, a in zip(completions, answers)]
'''
exec(REWARD)


def weights(run):
    return [path.read_bytes() for name in ("model.safetensors", "training/optimizer.safetensors")
            for path in sorted(pathlib.Path(run).glob(f"checkpoints/step-*/{name}"))[-1:]]


def mine(**more):
    return [{"name": "mine", "weight": 2, **more}, {"name": "format", "pattern": ".*1.*", "weight": 0.5}]


def test_a_function_gives_the_weights_of_the_same_program(small, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    ours = cohort.train(small("grpo", rewards=mine(), output_dir=str(tmp_path / "function")), rewards={"mine": reward},  # noqa: F821
                        progress=False)
    program = {"name": "command", "weight": 2, "directory": str(tmp_path),
               "run": f"{sys.executable} {ROOT / 'scripts' / 'cohort_reward.py'} reward.py"}
    theirs = cohort.train(small("grpo", rewards=[program, mine()[1]], output_dir=str(tmp_path / "program")), progress=False)
    assert ours.finished and len(ours.metrics) == 4
    assert weights(ours.dir) == weights(theirs.dir) and len(weights(ours.dir)) == 2
    assert [m["step"] for m in ours.metrics] == [1, 2, 3, 4]
    assert all("rewards/mine/mean" in m for m in ours.metrics)
    assert cohort.Model(ours.dir, device="cpu").generate("1+1=", temperature=0) is not None


def test_a_file_is_as_good_as_a_dictionary(small, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(small("sft", batch_size=4, output_dir=str(tmp_path / "file"))))
    from_file = cohort.train(path, progress=False, overrides={"steps": 3})
    from_dict = cohort.train(small("sft", batch_size=4, steps=3, output_dir=str(tmp_path / "dict")), progress=False)
    assert weights(from_file.dir) == weights(from_dict.dir) and weights(from_file.dir)


class Recorder(cohort.Callback):
    def __init__(self, stop_at=None):
        self.events, self.stop_at = [], stop_at

    def on_stage(self, name, step, steps):
        self.events.append(("stage", step, steps))

    def on_step(self, metrics):
        self.events.append(("step", metrics["step"]))
        return metrics["step"] == self.stop_at

    def on_completion(self, record):
        self.events.append(("completion", record["completion"]))

    def on_message(self, text):
        self.events.append(("message", text))


def test_callbacks_stop_and_a_resume_gives_the_same_weights(small, tmp_path):
    config = small("grpo", rewards=mine())
    whole = cohort.train(config | {"output_dir": str(tmp_path / "whole")}, rewards={"mine": reward}, progress=False)  # noqa: F821
    recorder = Recorder(stop_at=2)
    parts = cohort.train(config | {"output_dir": str(tmp_path / "parts")}, rewards={"mine": reward},  # noqa: F821
                         callbacks=[recorder], progress=False)
    assert not parts.finished and [m["step"] for m in parts.metrics] == [1, 2]
    kinds = [event[0] for event in recorder.events]
    assert kinds.index("stage") < kinds.index("completion") < kinds.index("step")
    assert any("Resume with" in event[1] for event in recorder.events if event[0] == "message")
    with pytest.raises(cohort.InputError, match="mine"):
        cohort.train(resume=parts.dir, progress=False)
    resumed = cohort.train(resume=parts.dir, rewards={"mine": reward}, progress=False)  # noqa: F821
    assert resumed.finished and [m["step"] for m in resumed.metrics] == [1, 2, 3, 4]
    assert resumed.metrics[1]["loss"] == parts.metrics[1]["loss"] and resumed.metrics[0].keys() == resumed.metrics[3].keys()
    assert [m["step"] for m in cohort.train(resume=parts.dir, rewards={"mine": reward},  # noqa: F821
                                            progress=False).metrics] == [1, 2, 3, 4]
    assert weights(resumed.dir) == weights(whole.dir)


@pytest.mark.parametrize("fails", [False, True])
def test_callbacks_are_called_at_the_end(small, fails):
    class Ends(Recorder):
        def on_step(self, metrics):
            super().on_step(metrics)
            assert not fails

        def on_end(self):
            self.events.append(("end",))

    recorder = Ends()
    with pytest.raises(AssertionError) if fails else contextlib.nullcontext():
        cohort.train(small("sft", batch_size=4), callbacks=[recorder], progress=False)
    assert recorder.events[-1] == ("end",) and recorder.events.count(("end",)) == 1


def test_steps_are_yielded_during_the_run(small):
    steps = cohort.train_steps(small("sft", batch_size=4, steps=10**6))
    assert [next(steps)["step"] for _ in range(3)] == [1, 2, 3]
    steps.close()  # stops the run and saves
    (run,) = [path for path in [pathlib.Path(small("sft")["output_dir"])] if path.is_dir()]
    resumed = cohort.train(resume=run, overrides={"steps": 4}, progress=False)
    assert resumed.finished


def checkpoints(run):
    return sorted(int(path.name[5:]) for path in pathlib.Path(run).glob("checkpoints/step-*"))


def test_the_next_step_starts_when_it_is_asked_for(small):
    config = small("sft", batch_size=4, steps=10**6)
    recorder = Recorder()
    for metrics in cohort.train_steps(config, callbacks=[recorder]):
        time.sleep(0.05)
        assert [event[1] for event in recorder.events if event[0] == "step"] == list(range(1, metrics["step"] + 1))
        if metrics["step"] == 3:
            break
    del metrics
    assert checkpoints(config["output_dir"]) == [0, 3]


@pytest.mark.parametrize("place", ["reward", "callback", "thread", "thread of a reward"])
def test_functions_of_a_run_may_close_it(small, place):
    """A reward or a callback closes the iterator that waits for its step; another thread, while its step is used."""
    closed = []

    def close():
        closed.append(steps.close())

    class Closing(cohort.Callback):
        def on_step(self, metrics):
            if place == "callback" and metrics["step"] == 2:
                close()

    def closing(completions, **fields):
        if place == "reward" and len(seen) == 2:
            close()
        if place == "thread of a reward" and len(seen) == 2:
            thread = threading.Thread(target=close)
            thread.start()
            thread.join(30)
            assert not thread.is_alive()
        return [float(len(c)) for c in completions]

    config, seen = small("grpo", rewards=mine(), steps=10**6, checkpoint={"every": 1}), []
    steps = cohort.train_steps(config, rewards={"mine": closing}, callbacks=[Closing()])
    for metrics in steps:
        seen.append(metrics["step"])
        if place == "thread" and len(seen) == 2:
            thread = threading.Thread(target=close)
            thread.start()
            thread.join(30)
            assert not thread.is_alive()
    assert closed and 2 <= len(seen) <= 3
    with pytest.raises(StopIteration):
        next(steps)
    assert checkpoints(config["output_dir"])[-1] in (2, 3)


def test_a_function_of_a_run_cannot_ask_for_its_next_step(small):
    def asking(completions, **fields):
        next(steps)
    steps = cohort.train_steps(small("grpo", rewards=mine()), rewards={"mine": asking})
    with pytest.raises(RuntimeError, match="would wait forever"):
        next(steps)


def test_a_run_that_is_not_closed_ends_quietly_with_the_process(small, tmp_path):
    script = tmp_path / "script.py"
    config = small("grpo", rewards=mine(), steps=10**6)
    script.write_text("import cohort\n"
                      f"def train(**keys): return cohort.train_steps({config!r} | keys, rewards={{'mine': lambda completions, **_: "
                      "list(map(len, completions))})\n"
                                      "other, steps = train(output_dir='never'), train()\n"
                      "print(next(steps)['step'])\n")
    run = subprocess.run([sys.executable, "-I", str(script)], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, "1\n") and "leak" not in run.stderr and "Error" not in run.stderr


def test_exceptions_of_functions_are_raised_and_keep_the_checkpoint(small):
    recorder = Recorder()

    def failing(completions, **fields):
        if ("step", 2) in recorder.events:
            raise ZeroDivisionError("from the reward")
        return [float(i) for i in range(len(completions))]

    config = small("grpo", rewards=mine(), checkpoint={"every": 1})
    with pytest.raises(ZeroDivisionError, match="from the reward"):
        cohort.train(config, rewards={"mine": failing}, callbacks=[recorder], progress=False)
    resumed = cohort.train(resume=config["output_dir"], rewards={"mine": reward}, progress=False)  # noqa: F821
    assert resumed.metrics[2]["step"] == 3

    class Failing(cohort.Callback):
        def on_step(self, metrics):
            raise LookupError("from the callback")
    with pytest.raises(LookupError, match="from the callback"):
        cohort.train(small("sft", batch_size=4, output_dir=config["output_dir"] + "2"), callbacks=[Failing()], progress=False)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("place", ["reward", "callback", "completion"])
def test_a_run_that_fails_in_a_function_saves_its_last_step(small, tmp_path, place, ranks):
    config, seen = small("grpo", rewards=mine(), ranks=ranks), []

    class Failing(cohort.Callback):
        def on_step(self, metrics):
            seen.append(metrics["step"])
            if place == "callback" and metrics["step"] == 2:
                raise LookupError("from the callback")

        def on_completion(self, record):
            if place == "completion" and len(seen) == 2 and "eval" not in record:
                raise LookupError("from the callback")

    # Equal rewards give no update, so that the third step's state is that of the second.
    def scores(completions, **fields):
        return [1.0] * len(completions) if place == "completion" else reward(completions, [""] * len(completions))  # noqa: F821

    def failing(completions, **fields):
        if place == "reward" and len(seen) == 2:
            raise LookupError("from the reward")
        return scores(completions)
    if place == "completion":
        config["rewards"] = mine()[:1]
    with pytest.raises(LookupError, match="from the"):
        cohort.train(config, rewards={"mine": failing}, callbacks=[Failing()], progress=False)
    assert checkpoints(config["output_dir"]) == [0, 2]
    resumed = cohort.train(resume=config["output_dir"], rewards={"mine": scores}, progress=False)
    whole = cohort.train(config | {"output_dir": str(tmp_path / "whole")}, rewards={"mine": scores}, progress=False)
    assert weights(resumed.dir) == weights(whole.dir) and weights(whole.dir)
    states = [json.loads((pathlib.Path(run.dir) / "checkpoints/step-00000004/training/state.json").read_text())
              for run in (resumed, whole)]
    assert states[0]["data_position"] == states[1]["data_position"]


@pytest.mark.parametrize("values, error", [
    (lambda n: [1.0] * (n - 1), "hint: one to each"), (lambda n: [float("nan")] * n, "reward mine: .* nan"),
    (lambda n: itertools.repeat(1.0), "hint: one to each"), (lambda n: ["x"] * n, "reward mine: .*returned 'x' for completion 0"),
    (lambda n: 7, "reward mine: .*returned 7; hint: a list of"), (lambda n: None, "reward mine: .*returned None; hint: a list"),
    (lambda n: np.zeros((n, 1)), r"an array of shape \(\d+, 1\)"), (lambda n: np.float32(1), r"an array of shape \(\)"),
    (lambda n: {"a": 1}, "returned {'a': 1}"), (lambda n: [[1.0]] * n, r"returned \[1.0\] for completion 0")])
def test_wrong_rewards_end_the_run(small, values, error):
    with pytest.raises(cohort.InputError, match=error):
        cohort.train(small("grpo", rewards=mine()), rewards={"mine": lambda completions, **_: values(len(completions))},
                     progress=False)


def test_functions_may_be_coroutines(small, tmp_path):
    shared = []

    async def awaited(completions, **fields):
        shared[:] = shared or [asyncio.Semaphore(1)]  # belongs to the loop that has used it first
        async with shared[0]:
            await asyncio.sleep(0)
        return reward(completions, [""] * len(completions))  # noqa: F821
    ours = cohort.train(small("grpo", rewards=mine(), output_dir=str(tmp_path / "a")), rewards={"mine": awaited}, progress=False)
    theirs = cohort.train(small("grpo", rewards=mine(), output_dir=str(tmp_path / "b")), rewards={"mine": reward},  # noqa: F821
                          progress=False)
    assert weights(ours.dir) == weights(theirs.dir)


def test_wrong_requests_are_named(small, tmp_path):
    for config, text in [(small("sft", stepz=1), "stepz"), ({"trainer": "nothing"}, "trainer"), (str(tmp_path / "none.yaml"), "none"),
                         (small("grpo", rewards=mine()), "mine"), (None, "configuration")]:
        with pytest.raises(cohort.InputError, match=text):
            cohort.train(config, progress=False)
    with pytest.raises(cohort.InputError, match="task"):  # the name of a reward of cohort's own
        cohort.train(small("grpo", rewards=mine()), rewards={"mine": reward, "task": reward}, progress=False)  # noqa: F821
    with pytest.raises(TypeError):
        cohort.train({"steps": object()}, progress=False)
    with pytest.raises(TypeError):
        cohort.train(small("sft"), rewards={"mine": 3}, progress=False)
    with pytest.raises(TypeError, match="environments"):
        cohort.train(small("sft"), environments={3: print}, progress=False)
    with pytest.raises(TypeError, match="callbacks"):
        cohort.train(small("sft"), callbacks=[object()], progress=False)
    with pytest.raises(UnicodeEncodeError):
        cohort.train(small("sft", name="\ud800"), progress=False)


def test_a_dictionary_may_hold_paths_and_numbers_of_numpy(small, tmp_path):
    config = small("sft", batch_size=np.int64(4), learning_rate=np.float32(0.5), output_dir=tmp_path / "other")
    result = cohort.train(config, overrides={"steps": np.int32(2)}, progress=False)
    assert result.finished and len(result.metrics) == 2 and pathlib.Path(result.dir) == tmp_path / "other"


def test_an_environment_is_a_function(small):
    turns = []

    def play(requests):
        turns.extend(requests)
        return [{"reward": 1.0, "done": True} for _ in requests]

    result = cohort.train(small("grpo", rewards=[{"name": "environment"}], environment={"name": "game", "max_turns": 2}, steps=1),
                          environments={"game": play}, progress=False)
    assert result.finished and turns and all(turn["turn"] == 1 for turn in turns)
    assert 0 < result.metrics[0]["reward"] <= 1
    for answers, error in [(None, "its function returned null"), ([], "0 answers"), (7, "its function returned 7")]:
        with pytest.raises(cohort.InputError, match=error):
            cohort.train(small("grpo", rewards=[{"name": "environment"}], environment={"name": "game"}, steps=1,
                               output_dir=result.dir + "2"), environments={"game": lambda _: answers}, progress=False)


def test_an_interrupt_saves_and_is_raised(small):
    config = small("sft", batch_size=4, steps=10**6)
    thread = threading.Thread(target=lambda: (time.sleep(0.5), os.kill(os.getpid(), signal.SIGINT)))
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        cohort.train(config, progress=False)
    thread.join()
    assert weights(config["output_dir"])


def test_the_process_ends_cleanly_with_a_run_open(small, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import cohort, json\nsteps = cohort.train_steps(json.loads({json.dumps(json.dumps(small('sft', batch_size=4, steps=10**6)))}))\n"
                      "print(next(steps)['step'])\n")
    done = subprocess.run([sys.executable, "-I", str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.split()[-1] == "1", done.stderr
    assert weights(small("sft")["output_dir"])


def test_progress_prints_the_run(small, capsys):
    cohort.train(small("sft", batch_size=4))
    out = capsys.readouterr()
    assert "run directory" in out.out


def test_stories_learn_by_a_function(shared_data, tmp_path, capsys):
    """Ten lines of Python give the weights of the YAML run with the same reward as a program."""
    (tmp_path / "reward.py").write_text("def reward(completions, **fields):\n"
                                        "    return [('dog' in c) + 0.5 * (c[-1:] in '.!?') for c in completions]\n")
    scope: dict = {}
    exec((tmp_path / "reward.py").read_text(), scope)
    config = str(ROOT / "configs" / "stories_grpo.yaml")
    options = {"model.path": str(shared_data / "models" / "stories260K"), "steps": 3, "max_completion_length": 40}
    ours = cohort.train(config, rewards={"mine": scope["reward"]}, progress=False,
                        overrides=options | {"rewards": [{"name": "mine"}], "eval.correct.reward": "mine", "output_dir": str(tmp_path / "a")})
    program = {"name": "command", "run": f"{sys.executable} {ROOT / 'scripts' / 'cohort_reward.py'} {tmp_path / 'reward.py'}"}
    theirs = cohort.train(config, progress=False, overrides=options | {
        "rewards": [program], "eval.correct.reward": "command", "output_dir": str(tmp_path / "b")})
    assert weights(ours.dir) == weights(theirs.dir) and len(weights(ours.dir)) == 2


ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b), "self": a, "function": b} for a in range(8) for b in range(8)]
COLUMNS = {"data": {"jsonl": {"prompt": "{question}", "answer": "{answer}", "solution": "{answer}"}}}


def test_data_in_memory_are_files_of_the_run(small, tmp_path):
    config = small("sft", batch_size=8, **COLUMNS)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    by_file = copy.deepcopy(config) | {"output_dir": str(tmp_path / "file")}
    by_file["data"]["jsonl"]["path"] = str(file)
    expected = cohort.train(by_file, progress=False)
    result = cohort.train(config, data=iter(ROWS), progress=False, callbacks=[Recorder(stop_at=2)])
    assert not result.finished and (pathlib.Path(result.dir) / "data.jsonl").read_text() == file.read_text()
    with pytest.raises(cohort.InputError, match="has its data; hint: omit data"):
        cohort.train(resume=result.dir, data=ROWS, progress=False)
    with pytest.raises(cohort.InputError, match="has other data than data"):
        cohort.train(config, data=ROWS[:-1], continues=True, progress=False)
    resumed = cohort.train(config, data=ROWS, continues=True, progress=False)
    assert resumed.dir == result.dir and resumed.finished and weights(resumed.dir) == weights(expected.dir)
    other = list(cohort.train_steps(config, data=ROWS, eval_data=[np_row(row) for row in ROWS[:9]]))
    assert len(other) == 4 and pathlib.Path(f"{result.dir}-2/eval.jsonl").read_text().count("\n") == 9


def test_folders_and_files_of_others_stay(small, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "data.jsonl").write_text("mine")
    config = small("sft", batch_size=8, output_dir=str(mine), **COLUMNS)
    for wrong in ({}, {"model": {"context": -1}}):
        with pytest.raises(cohort.InputError, match="has other data than data|model.context"):
            cohort.train(config | wrong, data=ROWS, continues=True, progress=False)
    assert (mine / "data.jsonl").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    assert cohort.train(config, data=ROWS, progress=False).dir == f"{mine}-2"
    named = copy.deepcopy(config)
    named["data"]["jsonl"]["path"] = str(mine / "data.jsonl")
    with pytest.raises(cohort.InputError, match="data.jsonl.path: .* is given beside data in memory"):
        cohort.train(named, data=ROWS, progress=False)
    # What a killed start has left.
    (mine / "data.jsonl").write_text((tmp_path / "mine-2/data.jsonl").read_text())
    (mine / ".lock").touch()
    assert cohort.train(config, data=ROWS, continues=True, progress=False).dir == str(mine)


def test_stages_of_every_trainer_have_metrics(tmp_path):
    trainers = ["pretrain", "sft", "grpo", "mlm", "classify", "dpo"]
    for number, trainer in enumerate(trainers):
        folder = tmp_path / f"{number}-{trainer}"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(json.dumps({"step": number, "step_time": 1, "time": 2}) + "\n")
    assert [m["step"] for m in cohort.training._metrics(str(tmp_path))] == list(range(len(trainers)))


def test_a_result_has_the_metrics_of_all_stages(small, tmp_path):
    config = small("sft", stages=[{"trainer": "sft", "batch_size": 4, "steps": n} for n in (3, 4, 2)])
    del config["trainer"], config["steps"]
    steps, expected = cohort.train_steps(config), [1, 2, 3, 1, 2, 3, 4, 1, 2]
    for metrics in steps:
        if metrics["step"] == 2 and len(list(tmp_path.glob("run/*-sft"))) == 2:
            break
    steps.close()
    for _ in range(2):
        result = cohort.train(resume=tmp_path / "run", progress=False)
        assert [m["step"] for m in result.metrics] == expected and result.finished
    assert all(isinstance(value, (int, float)) for m in result.metrics for value in m.values())
    with open(tmp_path / "config.json", "w") as file:
        json.dump(config | {"output_dir": str(tmp_path / "other")}, file)
    steps = cohort.train_steps(tmp_path / "config.json")
    while True:
        try:
            next(steps)
        except StopIteration as end:
            assert [m["step"] for m in end.value.metrics] == expected
            break


def test_a_log_handler_may_close_the_run(small, caplog):
    caplog.set_level(logging.INFO, logger="cohort")  # other packages may disable messages
    steps = cohort.train_steps(small("sft", batch_size=4, steps=10**6))

    class Closes(logging.Handler):
        def emit(self, record):
            steps.close()
    handler = Closes()
    logging.getLogger("cohort").addHandler(handler)
    try:
        done = threading.Thread(target=lambda: list(steps), daemon=True)
        done.start()
        done.join(60)
        assert not done.is_alive()
    finally:
        logging.getLogger("cohort").removeHandler(handler)
        steps.close()


@pytest.mark.parametrize("interrupts, is_saved", [(2, True), (3, True), (4, False)])
def test_interrupts_save_first_and_only_the_fourth_ends_the_process_without_that(small, tmp_path, interrupts, is_saved):
    code = """
import json, sys, time, cohort
def slow(completions, **fields):
    print("reward", flush=True)
    until = time.monotonic() + 4
    while time.monotonic() < until: time.sleep(0.01)
    return [1.0] * len(completions)
cohort.train(json.loads(sys.argv[1]), rewards={"mine": slow}, progress=False)
"""
    config = small("grpo", rewards=mine(), eval={"size": 8, "every": 0, "at_start": False})
    with subprocess.Popen([sys.executable, "-c", code, json.dumps(config)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as process:
        for _ in range(2):  # on gold answers, then in the first step
            assert process.stdout.readline() == "reward\n"
        for _ in range(interrupts):
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert "interrupt once more not to wait for that" in err and "Fatal" not in err, err
    assert bool(list(tmp_path.glob("run/checkpoints/step-*1"))) == is_saved, err
    assert process.returncode == (-signal.SIGINT if is_saved else 130)


def test_text_of_any_bytes_is_given_with_replacements(small):
    config = small("sft", batch_size=4)
    config["data"]["tokenizer"] = "byte"
    seen = []

    class Sees(cohort.Callback):
        def on_message(self, text):
            seen.append(text)
    model = cohort.Model(cohort.train(config, callbacks=[Sees()], progress=False).dir, device="cpu")
    assert model.decode([200, 201]) == "\ufffd\ufffd" and seen
    texts = cohort.Engine(model).rollouts(["1+1="], 20, temperature=5.0, max_completion_length=20).texts
    assert any("\ufffd" in text for text in texts)
    assert "".join(model.stream("1+1=", temperature=5.0, max_completion_length=20)).startswith(texts[0][:1])


def np_row(row):
    return {name: np.str_(value) for name, value in row.items()} | {"level": np.int64(3)}


def test_the_first_rows_of_data_train_without_a_criterion(small):
    config = small("grpo", rewards=[{"name": "mine"}, {"name": "size"}], **COLUMNS)
    rewards = {"mine": reward, "size": lambda completions, **fields: [float(len(c)) for c in completions]}  # noqa: F821
    result = cohort.train(config, data=ROWS[:20], rewards=rewards, progress=False)
    assert result.finished and result.measure == ""
    with pytest.raises(cohort.InputError, match=r"eval.correct.reward: there are 2 rewards \(mine, size\)"):
        cohort.train(config, data=ROWS[:20], eval_data=ROWS[20:25], rewards=rewards, progress=False)


def test_wrong_data_in_memory_leave_no_run(small, tmp_path):
    config = small("sft", batch_size=8, **COLUMNS)
    for rows, text in (("rows.jsonl", "data: got str; hint: an iterable of dictionaries"), (7, "got int"), ({"a": [1]}, "got dict"),
                       (["a row"], "row 0 is 'a row'"), ([{"question": object()}], "row 0: expected a text, a number"),
                       ([{"answer": "no question"}], "question"),
                       ([ROWS[0], ROWS[1] | {"x": float("nan")}], "row 1: .*JSON compliant"), ([{"question": "\ud800"}], "row 0: .*surrogates"), ([], "no ")):
        with pytest.raises(cohort.InputError, match=text):
            cohort.train(config, data=rows, progress=False)
    assert not list(tmp_path.iterdir())


def test_messages_go_to_pythons_logging(small, caplog, capfd):
    with caplog.at_level(logging.INFO, logger="cohort"):
        cohort.train(small("sft"), progress=False)
    assert any(record.name == "cohort" and record.levelno == logging.INFO for record in caplog.records)
    capfd.readouterr()
    code = "import cohort, sys; cohort.set_log_level(sys.argv[1]); cohort.train(eval(sys.argv[2]), progress=False)"
    for level, is_shown in (("info", True), ("error", False)):
        subprocess.run([sys.executable, "-c", code, level, repr(small("sft"))], check=True)
        out, err = capfd.readouterr()
        assert out == "" and bool(err) == is_shown, err
    for wrong in ("loud", None):
        with pytest.raises(cohort.InputError, match="hint: debug, info, warning or error"):
            cohort.set_log_level(wrong)


def test_the_package_has_the_command_line(small, tmp_path):
    import shutil
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(small("sft")))
    script = shutil.which("cohort", path=os.path.dirname(sys.executable))
    for command in ([sys.executable, "-m", "cohort"], [script]):
        def run(*arguments, command=command):
            return subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=tmp_path)
        assert run("--version").stdout.startswith(f"cohort {cohort.__version__} (with")
        trained = run("train", "config.yaml", "steps=3")
        assert trained.returncode == 0 and "run directory" in trained.stdout, trained.stderr
        wrong = run("train", "missing.yaml")
        assert wrong.returncode == 2 and "cohort: " in wrong.stderr and "missing.yaml" in wrong.stderr
    assert sorted(path.name for path in tmp_path.glob("run*")) == ["run", "run-2"]


def test_a_conversational_reward_gets_messages_as_in_trl(small, chat_run, tmp_path):
    question, reply = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
    (tmp_path / "data.jsonl").write_text(12 * (json.dumps({"prompt": [question], "answer": "2"}) + "\n"))
    (tmp_path / "reward.py").write_text("from cohort_reward import conversational\n"
                                        "@conversational\n"
                                        "def reward(completions, prompts, lengths, **fields):\n"
                                        f"    assert prompts == len(completions) * [[{question!r}]] and lengths\n"
                                        "    assert all(turn['role'] == 'assistant' for [turn] in completions)\n"
                                        "    return [0.1 * len(turn['content']) for [turn] in completions]\n")
    scope: dict = {}
    exec((tmp_path / "reward.py").read_text().replace("cohort_reward", "cohort"), scope)

    def trained(name, program=None, **functions):
        config = small("grpo", model={"path": chat_run}, output_dir=str(tmp_path / name), rewards=[program or {"name": "mine"}],
                       data={"jsonl": {"path": str(tmp_path / "data.jsonl"), "held_out_fraction": 0}})
        return weights(cohort.train(config, rewards=functions, progress=False).dir)
    of_texts = trained("texts", mine=lambda completions, **fields: [0.1 * len(c) for c in completions])
    assert trained("function", mine=scope["reward"]) == of_texts and of_texts
    assert trained("program", {"name": "command", "directory": str(tmp_path), "run":
                               f"{sys.executable} {ROOT / 'scripts' / 'cohort_reward.py'} reward.py"}) == of_texts
    from cohort.cohort_reward import arguments_of
    sample = {"prompt": "text", "completion": "4", "answer": "2", "fields": {}}
    for more, prompt, completion in (({}, "text", [reply | {"content": "4"}]),
                                     ({"messages": [question, reply], "transcript": [reply, question, reply]},
                                      [question], [reply, question, reply]),
                                     ({"messages": [question, reply, question, reply], "fields": {"prompt": [question]}},
                                      [question], [reply | {"content": "4"}])):
        arguments = arguments_of(scope["reward"], [sample | more])
        assert (arguments["prompts"], arguments["completions"]) == ([prompt], [completion])

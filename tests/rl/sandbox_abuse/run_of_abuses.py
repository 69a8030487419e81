#!/usr/bin/env python3
"""Trains with a reward that runs all of abuses.py, and right and wrong programs, in place of completions. The weights and
metrics must be those of a run that scores them without running any, and not those of a run in which one abuse is rewarded.

    run_of_abuses.py COHORT
    run_of_abuses.py --reward KIND    the reward program of these runs: sandbox, known, or escape
"""
import contextlib
import glob
import json
import os
import signal
import subprocess
import sys
import tempfile
import zlib

import abuses
import sandbox_abuse

COMPLETIONS = 104  # of a step; a half of them are abuses
CONFIG = f"""{{trainer: grpo, steps: 3, prompts_per_step: 8, num_generations: {COMPLETIONS // 8}, max_completion_length: 12,
  learning_rate: 1e-3, log_completions: 1000, num_threads: 1, model: {{num_layers: 1, d_model: 32, num_heads: 2, context: 24}},
  data: {{task: reverse}}, eval: {{size: 8}}, output_dir: KIND,
  rewards: [{{name: command, run: "{sys.executable} {os.path.abspath(__file__)} --reward KIND", workers: 6, timeout: 60}}]}}"""


def reward(kind):
    names = sorted(abuses.ABUSES)
    sandbox_abuse.TIMEOUT = 2.0  # right programs must not reach it, even on a loaded machine
    worker = sandbox_abuse.Worker("auto", None, sys.executable) if kind == "sandbox" else None
    for line in sys.stdin:
        request = json.loads(line)
        number = request["step"] * COMPLETIONS + request["index"]
        name = names[number // 2 % len(names)] if number % 2 else ""
        right = zlib.crc32(request["completion"].encode()) % 2 if not name else int(kind == "escape" and name == "fork_bomb")
        answer = {"reward": right}
        if worker:
            answer, _ = worker.abuse(name) if name else worker.ask(f"def f(x): return x + {right}", "assert f(1) == 2")
        print(json.dumps({**answer, "index": request["index"]}), flush=True)


def results(cohort, folder, kind):
    """The weights, the metrics without times, and the completions of a run."""
    path = os.path.join(folder, kind)
    with open(path + ".yaml", "w") as file:
        file.write(CONFIG.replace("KIND", kind))
    subprocess.run([cohort, "train", path + ".yaml"], check=True, stdout=subprocess.DEVNULL)
    with open(os.path.join(path, "metrics.jsonl")) as file:
        metrics = [{k: v for k, v in json.loads(line).items() if "time" not in k and "per_second" not in k} for line in file]
    with open(os.path.join(path, "completions.jsonl")) as file:
        completions = file.read()
    with open(os.path.join(path, "workers.log")) as file:
        assert file.read() == "", "workers.log has messages"
    newest = max(os.listdir(os.path.join(path, "checkpoints")))
    with open(os.path.join(path, "checkpoints", newest, "model.safetensors"), "rb") as file:
        return file.read(), metrics, completions


def main(cohort):
    assert len(abuses.ABUSES) <= 3 * COMPLETIONS // 2, "too few completions for all abuses"
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        os.environ["TMPDIR"] = folder  # of the workers' secrets and folders
        sandbox, known, escape = (results(cohort, folder, kind) for kind in ("sandbox", "known", "escape"))
        for what, *values in zip(("weights", "metrics", "completions"), sandbox, known, escape):
            assert values[0] == values[1], f"the {what} differ from those of known scores"
            assert values[1] != values[2], f"the {what} do not depend on the score of one abuse"
        workers = glob.glob(os.path.join(folder, "cohort_abuse_*"))
        assert workers and not any(os.listdir(os.path.join(path, "open")) for path in workers), "files are left"
        for path in glob.glob("/proc/[0-9]*/cmdline"):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                assert folder.encode() not in file.read(), "processes are left"
    print(f"{len(abuses.ABUSES)} abuses in a run: weights, metrics and completions are those of known scores")


if __name__ == "__main__":
    if sys.argv[1] == "--reward":
        reward(sys.argv[2])
    else:
        signal.alarm(300)
        main(sys.argv[1])

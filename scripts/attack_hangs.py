#!/usr/bin/env python3
"""Hangs of `cohort train` on 2 to 4 CPU ranks, and slow runs that are none.

  scripts/attack_hangs.py                       40 hangs, 200 slow runs: a quarter of an hour
  scripts/attack_hangs.py --hangs 6 --slow 6    one or two of each kind
  scripts/attack_hangs.py --only hangs:17       repeats one case, with the same --seed

A hang must end the run within the limit, on every rank, with an error that names the rank that
hangs and no other. A slow run must end as if it were fast. The watchdog's limit is 3 seconds.
A case with a finding is kept in the folder printed at the end. Exit code: 0 no findings, 1 findings.
"""
import argparse
import concurrent.futures
import itertools
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WATCHDOG, HEARTBEATS, GRACE, SAVING_GRACE = 3, 20, 5, 20  # seconds
MARGIN = 8  # seconds for the beats, the messages and a busy machine
NONE = ""  # no fault

MODEL = ("output_dir: run\nnum_threads: 1\nlearning_rate: 1e-2\nmax_completion_length: 4\n"
         "model: {num_layers: 1, d_model: 16, num_heads: 2, context: 24, init_std: 0.1}\n"
         f"watchdog_minutes: {WATCHDOG / 60}\neval: {{size: 8}}\ncheckpoint: {{every: 20}}\n"
         "data: {tokenizer: byte, jsonl: {path: data.jsonl, prompt: '{a}+1=', answer: '{b}', "
         "held_out_fraction: 0.3}}\n")
SFT = MODEL + "trainer: sft\nbatch_size: 8\n"
GRPO = (MODEL + "trainer: grpo\nprompts_per_step: 4\nnum_generations: 4\nlr_schedule: constant\n"
        "rewards: [{name: command, run: python3 reward.py, workers: 2, timeout: 1000}]\n")
# Answers by the number of characters; its sleep before the answer is in the environment, for one
# rank (or all), from one answer on.
REWARD = """import json, os, sys, time
for number, line in enumerate(sys.stdin):
    if os.environ['SLEEPER'] in (os.environ['RANK'], 'all') and number >= int(os.environ['FIRST']):
        time.sleep(float(os.environ['SLEEP']))
    sample = json.loads(line)
    print(json.dumps({'index': sample['index'], 'reward': len(sample['completion']) % 5 / 5}),
          flush=True)
"""


class Run:
    """The processes of one run, each a rank, in a folder of its own."""

    def __init__(self, folder, options, size, config, faults=None, **environment):
        self.folder = folder
        (folder / "run.yaml").write_text(config)
        (folder / "reward.py").write_text(REWARD)
        (folder / "data.jsonl").write_text(
            "".join(f'{{"a": {i}, "b": {i + 1}}}\n' for i in range(60)))
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.processes = []
        for rank in range(size):
            variables = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SLEEPER": "none",
                "FIRST": "0", "SLEEP": "0"} | environment
            if fault := (faults or {}).get(rank):
                variables |= {"LD_PRELOAD": str(options.faults), "COHORT_FAULT": fault}
            self.processes.append(subprocess.Popen(
                [options.binary, "train", "run.yaml"], cwd=folder, env=variables,
                stdin=subprocess.DEVNULL, stdout=(folder / f"out{rank}").open("wb"),
                stderr=(folder / f"err{rank}").open("wb"), start_new_session=True))

    def wait_for_steps(self, count, seconds=60):
        """Waits until the run has logged so many steps."""
        end, metrics = time.monotonic() + seconds, self.folder / "run/metrics.jsonl"
        while time.monotonic() < end:
            if metrics.exists() and metrics.read_text().count('"loss"') >= count:
                return
            time.sleep(0.01)

    def wait(self, seconds, stopped=None):
        """Exit codes, None for the stopped rank and for a process that is still there then."""
        end = time.monotonic() + seconds
        codes = []
        for rank, process in enumerate(self.processes):
            try:
                codes.append(None if rank == stopped
                             else process.wait(max(0.1, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
        return codes

    def error(self, rank):
        return (self.folder / f"err{rank}").read_text(errors="replace")

    def end(self):
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def hang(number, rng, folder, options):
    """One hang; returns its kind, the seconds until the end, and what was wrong."""
    kind = HANGS[number % len(HANGS)]
    size = rng.randint(2, 4)
    culprit = 0 if kind in ("stop rank 0", "write") else rng.randrange(0, size)
    if kind == "stop":
        culprit = rng.randrange(1, size)
    fault, environment, config = NONE, {}, SFT + "steps: 100000000\n"
    if kind == "reward":
        config = GRPO + "steps: 100000000\n"
        environment = {"SLEEPER": str(culprit), "FIRST": str(rng.randint(3, 40)), "SLEEP": "1000"}
    elif kind == "write":
        fault = f"write|checkpoints|-2|{rng.randint(2, 30)}|1000000"
    elif kind in ("read", "loop"):
        # The first reads are those of the start, the later ones those of steps.
        passed = rng.choice([0, 1, rng.randint(100, 2000)])
        fault = f"pread|data.jsonl|{-2 if kind == 'read' else -3}|{passed}|1000000"
    run = Run(folder, options, size, config, {culprit: fault}, **environment)
    try:
        limit = WATCHDOG + GRACE
        if kind.startswith("stop"):
            run.wait_for_steps(rng.randint(1, 200))
            run.processes[culprit].send_signal(signal.SIGSTOP)
            limit = HEARTBEATS + GRACE
        elif kind == "write":
            limit = WATCHDOG + SAVING_GRACE
        # The time from the hang on; where it begins in the run, the run gets a minute to reach it.
        start = time.monotonic()
        reach = 0 if kind.startswith("stop") else 60
        codes = run.wait(limit + MARGIN + reach, culprit if kind.startswith("stop") else None)
        seconds = time.monotonic() - start
        return kind, seconds, problems(run, codes, culprit, kind)
    finally:
        run.end()


def problems(run, codes, culprit, kind):
    """What is wrong with the end of a run that hangs."""
    found, stopped = [], kind.startswith("stop")
    for rank, code in enumerate(codes):
        expected = (None if stopped else 4) if rank == culprit else 3
        if code != expected:
            found.append(f"rank {rank}: exit code {code}, not {expected}")
        if rank == culprit and stopped:
            continue
        last = run.error(rank).strip().split("\n")[-1]
        why = "sent no heartbeat for 20 s" if stopped else "has made no progress for 3 s: "
        named = rf"rank {culprit} \([^)]*, pid {run.processes[culprit].pid}\) {why}"
        if not re.match(rf"cohort: (\[\w+\] )?{named}", last):
            found.append(f"rank {rank}: {last}")
    log = run.folder / "run/log.txt"
    if not stopped and log.exists() and "the last calls:" not in log.read_text():
        found.append("log.txt has no calls")
    return found


def slow(number, rng, folder, options):
    """A run with slow parts, which must end by itself."""
    kind = SLOW[number % len(SLOW)]
    size = rng.randint(2, 3)
    faults, environment, config, load = {}, {}, SFT + "steps: 60\n", []
    if kind == "save":  # of 5 seconds and more
        faults = {0: f"write|checkpoints|{-rng.randint(1000, 1500)}|{rng.randint(0, 40)}|5"}
    elif kind == "reward":  # each of a rank's 8 answers takes a second
        config = GRPO + "steps: 2\n"
        environment = {"SLEEPER": rng.choice(["all", str(rng.randrange(size))]), "SLEEP": "1"}
    elif kind == "read":
        faults = {rng.randrange(size): "pread|data.jsonl|-1000|4|6"}
    elif kind == "busy":
        load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6)]
        config = SFT + "steps: 3000\n"
    elif kind == "stop":  # all but one are stopped for 10 seconds, which have no step
        config = SFT + "steps: 400\n"
    run = Run(folder, options, size, config, faults, **environment)
    start = time.monotonic()
    try:
        if kind == "stop":
            run.wait_for_steps(5)
            awake = rng.randrange(size)
            others = [p for rank, p in enumerate(run.processes) if rank != awake]
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for process in others:
                    process.send_signal(number)
                time.sleep(10 if number == signal.SIGSTOP else 0)
        codes = run.wait(120)
        errors = [run.error(rank)[-400:] for rank, code in enumerate(codes) if code != 0]
        return kind, time.monotonic() - start, errors
    finally:
        run.end()
        for process in load:
            process.kill()
            process.wait()


HANGS = ["stop", "reward", "write", "read", "stop rank 0", "loop"]
SLOW = ["save", "reward", "busy", "read", "stop"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--hangs", type=int, default=40)
    parser.add_argument("--slow", type=int, default=200)
    parser.add_argument("--only", help="a case, such as hangs:17")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time")
    parser.add_argument("--binary", type=Path, default=ROOT / "build/cpu/cohort")
    options = parser.parse_args()
    options.faults = options.binary.parent / "tests/libcohort_faults.so"
    work = Path(tempfile.mkdtemp(prefix="cohort-hangs-"))
    cases = [("hangs", i) for i in range(options.hangs)] + [("slow", i) for i in range(options.slow)]
    if options.only:
        name, number = options.only.split(":")
        cases = [(name, int(number))]

    def attempt(case):
        name, number = case
        folder = work / f"{name}-{number}"
        folder.mkdir()
        rng = random.Random(f"{options.seed}:{name}:{number}")
        result = (hang if name == "hangs" else slow)(number, rng, folder, options)
        if not result[2]:
            shutil.rmtree(folder, ignore_errors=True)
        return name, number, *result

    findings, longest = 0, {}
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for name, number, kind, seconds, found in pool.map(attempt, cases):
            findings += bool(found)
            total = longest.setdefault((name, kind), [0, 0.0])
            total[0] += 1
            total[1] = max(total[1], seconds)
            for line in found:
                print(f"{name}:{number} ({kind}): {line}", flush=True)
    for (name, kind), (count, seconds) in longest.items():
        print(f"{name}: {count} of kind '{kind}', at most {seconds:.1f} s")
    print(f"{findings} findings" + (f", kept in {work}" if findings else ""))
    if not findings:
        shutil.rmtree(work, ignore_errors=True)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

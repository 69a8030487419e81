#!/usr/bin/env python3
"""Robustness tests of the `cohort` binary: runs that are killed at random moments and resumed,
fault injection into calls of the C library (tests/support/faults), traps (files, terminals and
limits made by an attacker: scripts/attack_traps.py), and mutated inputs.

  scripts/attack.py                200 kills, 1,600 faults, 400 traps, 10,000 mutations: minutes
  scripts/attack.py --smoke                a tenth of that, with no new case after 60 seconds
  scripts/attack.py --only mutations:1234  repeats one case, with the same --seed

A case depends on the seed, its kind and its number only, except that the moment of a kill depends
on the machine. The expectations are documented in kills(), faults(), mutations(), for each trap,
and for every command in Case.cohort(). A case with a finding is kept, with its commands, in the
folder printed at the end. Exit code: 0 no findings, 1 findings, 2 the tests could not run.
"""
import argparse
import collections
import ctypes
import errno
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from attack_lab import (ADDITION, COMMON, CONFIGS, LAB, PDEATHSIG, ROOT, USER_FILES, WORKERS, Case,
                        Finding, copy_base, expect, expect_complete, expect_resumable, newest,
                        outcome, write_inputs, xxh3)
from attack_traps import traps

# ---- Kills and faults --------------------------------------------------------------------


def kills(case):
    """A run that is repeatedly killed or stopped has the result of an undisturbed run."""
    name = case.rng.choice(sorted(CONFIGS))
    write_inputs(case.folder, name)
    for _ in range(case.rng.randint(2, 8)):
        run = case.path("run")
        arguments = ["--continue", "run.yaml"]
        if (run / "config.yaml").exists() and case.rng.random() < 0.5:
            arguments = ["--resume", run]
        number = case.rng.choice([signal.SIGKILL] * 6 +
                                 [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
        moment = case.rng.uniform(0, 1.2) * LAB.seconds[name]
        code = case.cohort("train", *arguments, signal_at=(moment, number)).code
        expect(code in (0, 130, -number), "exit code", code)
        if code == 0:
            break
        case.counts[number.name] += 1
    expect_resumable(case, name)


def without_free_space(output):
    """An output without the free space on the disk, which changes and may be unknown."""
    return re.sub(rb"; free: [0-9.]+ MiB", b"", output)


# Command, folder of LAB.work/base, arguments.
COMMANDS = [
    ("train", "task-new", ["train", "{}/run.yaml"]),
    ("train", "jsonl-new", ["train", "{}/run.yaml"]),
    ("train", "text-new", ["train", "{}/run.yaml"]),
    ("train", "ranks-new", ["train", "{}/run.yaml"]),
    ("resume", "task-half", ["train", "--resume", "{}/run"]),
    ("resume", "jsonl-half", ["train", "--resume", "{}/run"]),
    ("resume", "text-half", ["train", "--resume", "{}/run"]),
    ("resume", "text-half", ["train", "--resume", "{}/run"]),
    ("generate", "jsonl", ["generate", "{}/run", "1+1=", "--max-tokens", "6", "--json"]),
    ("eval", "jsonl", ["eval", "{}/run"]), ("eval", "text", ["eval", "{}/run"]),
    ("logprobs", "task", ["logprobs", "{}/run", "11+11=22", "--eos"]),
    ("check", "jsonl", ["check", "{}/run.yaml", "init_from={}/run", "stages.1.beta=0"]),
    ("check", "text", ["check", "{}/run.yaml"]), ("report", "jsonl", ["report", "{}/run"]),
]
OPEN = [errno.EACCES, errno.EMFILE, errno.EIO]
FULL = [errno.ENOSPC, errno.EIO, errno.EDQUOT]
ERRORS = collections.defaultdict(lambda: [errno.EIO], {
    "open": OPEN, "openat": OPEN, "fopen": OPEN, "opendir": OPEN, "fread": [errno.EIO],
    "read": [errno.EIO, errno.EINTR, errno.ESTALE, 0],
    "pread": [errno.EIO, errno.EINTR, errno.ESTALE, 0], "write": [*FULL, errno.EINTR, 0],
    "fwrite": FULL, "fflush": FULL, "fsync": FULL, "close": FULL, "mkdir": [*FULL, errno.EACCES],
    "rename": [*FULL, errno.EACCES], "symlink": [*FULL, errno.EPERM], "mmap": [errno.ENOMEM],
    "unlinkat": [errno.EACCES, errno.EBUSY, errno.EROFS], "flock": [errno.ENOLCK],
    "stat": [errno.EACCES, errno.EIO], "lstat": [errno.EACCES, errno.EIO]})


def faults(case):
    """With an injected fault the command completes or reports the failure; nothing is lost, and the
    command without the fault then completes the work."""
    index = case.rng.randrange(len(COMMANDS))
    (command, base, arguments), trace = COMMANDS[index], LAB.traces[index]
    copy_base(case, base)
    call = case.rng.choice(sorted(trace))
    error, times = case.rng.choice(ERRORS[call]), case.rng.choice([1, 1, 3, 1 << 30])
    fault = (call, case.folder, error, case.rng.randrange(trace[call]),
             1 if error == errno.EINTR else times)  # endless EINTR would be a hang, not a fault
    before = {k: v.name for k, v in newest(case.path("run")).items()}
    case.counts[call] += 1  # corrected below if the call never occurred
    result = case.cohort(*[a.format(case.folder) for a in arguments], fault=fault)
    case.counts[call] = min(1, len(result.hits))
    if result.code != 0:
        message = result.err[result.err.rfind("cohort: "):]
        expect("/" in message or "standard output" in message, "no location:", message)
    if command in ("train", "resume"):
        after = {k: v.name for k, v in newest(case.path("run")).items()}
        expect(all(after.get(k, "") >= v for k, v in before.items()), "lost:", before, after)
        lost = result.code != 0 and "lines are lost" in result.err
        if result.code == 0:
            expect_complete(case, base.split("-")[0])
        expect_resumable(case, base.split("-")[0], lost)
        for name in USER_FILES if command == "resume" else []:
            expect(case.path(name).read_text() == name, "the user's file is lost:", name)
    elif result.code == 0:
        plain = LAB.outputs[index].replace(b"{}", os.fsencode(case.folder))
        expect(without_free_space(result.out) == plain, "exit code 0 but the output", result.out, "instead of", plain)


# ---- Mutations -----------------------------------------------------------------------------------

VALUES = [v.encode() for v in """0 -1 1 2 1e9 1000000000 16777216 4096 65536 2147483648 1e308 -1e308
    9223372036854775807 9223372036854775808 -9223372036854775809 1e400 1e-400 nan inf -inf .nan .inf
    0.5 0x10 1_000 +1 true null ~ none '' "" [] {} [1,2] [-1] [[[]]] {a:b} *a &a !!binary ? | >
    task text sft grpo pretrain format numeric char byte f64 bf16 cuda cpu {a} {b} {{ }} { } {a {}
    (a+)+$ (?R) [^ ( .{1000000} \\d{0,65535} \\Q (?<=a*) \\x{110000} /dev/null . .. /""".split()]
VALUES += [b"", b"\xff\xfe", b"\0", b"\n", b"\t", b"x" * 100000, b"9" * 5000, b"[" * 3000,
           b"{a: " * 3000, b"\xe2\x80\xae", b"\xf0\x9f\x98\x80" * 20, b"\xed\xa0\x80",
           b"\xef\xbb\xbf", b"- " * 3000, b"(" * 3000, b"&a [*a]", b"\r\n",
           b"%YAML 9.9", b"---\n", b"\x1b[2J"]
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e-?\d+)?")
JSON_VALUES = [None, True, -1, 0, 1, 7, 2**31, 2**63 - 1, 2**63, -2**63, 1e308, 0.5, "", "x", "\0",
               "x" * 100000, [], {}, [0], [2**62, 2**62], {"a": 1}, [[[]]], float("nan"), "F64"]


def mutate(rng, data):
    """Changes some bytes, numbers, values or lines of a text."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at, kind = rng.randrange(len(data) + 1), rng.randrange(9)
        lines = data.splitlines(keepends=True) or [b""]
        line, numbers = rng.randrange(len(lines)), list(NUMBER.finditer(data))
        if kind == 0:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1:]
        elif kind == 1:
            data = data[:at] + data[at + rng.choice([1, 3, 20, len(data)]):]
        elif kind == 2:
            data = data[:at] + rng.choice(VALUES) + data[at:]
        elif kind == 3:
            data = b"".join(lines[:line] + lines[line + 1:])
        elif kind == 4:
            data = b"".join(lines[:line] + [lines[rng.randrange(len(lines))]] + lines[line:])
        elif kind == 5 and b":" in lines[line]:
            lines[line] = lines[line].split(b":")[0] + b": " + rng.choice(VALUES) + b"\n"
            data = b"".join(lines)
        elif numbers:
            number = rng.choice(numbers)
            data = data[:number.start()] + rng.choice(VALUES[:22]) + data[number.end():]
    return data


def mutate_json(rng, data):
    """Changes one value or some bytes of a JSON text."""
    if rng.random() < 0.4:
        return mutate(rng, data)
    root = json.loads(data)
    node = root
    while True:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = rng.choice(keys)
        if isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.8:
            node = node[key]
            continue
        if isinstance(node, dict) and rng.random() < 0.2:
            node["extra" if rng.random() < 0.5 else key + key] = node.pop(key)
        else:
            node[key] = rng.choice(JSON_VALUES)
        return json.dumps(root, indent=2).encode()


def mutate_tensors(rng, data):
    """Changes the header of a safetensors file, its length, some bytes or the file's end."""
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8:8 + length], data[8 + length:]
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice([data[:rng.randrange(len(data))], data + b"x" * rng.choice([1, 8, 999])])
    if kind == 1:
        return rng.randrange(1 << rng.choice([8, 16, 63])).to_bytes(8, "little") + header + rest
    if kind == 2:
        special = rng.choice([b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff" * 4, b"\0" * 4])
        at = rng.randrange(len(rest) // 4) * 4
        return data[:8] + header + rest[:at] + special + rest[at + 4:]
    header = mutate_json(rng, header.rstrip())
    header += b" " * (-len(header) % 8 if rng.random() < 0.8 else 0)
    return len(header).to_bytes(8, "little") + header + rest


SMALL = ["num_threads=1", "ranks=1", "eval.size=4", "eval.num_samples=0", "eval.k=[]",
         "eval.every=0", "max_completion_length=4", "checkpoint.every=0", "num_iterations=1"]


def is_small(report):
    """True if `check` reports a run that trains quickly."""
    def largest(name):
        return max([float(x) for x in re.findall(name + r" +(?:up to about )?([\d.]+)", report)])
    work = largest("tokens per step") * largest("optimiser updates") * largest("parameters")
    return work < 2e9 and largest("peak per rank") < 300 and largest("optimiser updates") < 300


def check_and_train(case, config, *overrides):
    """Checks a configuration and, if it is valid and small, trains up to two steps with it."""
    if case.cohort("check", config, *overrides).code == 0 and case.rng.random() < 0.5:
        limits = [*overrides, *SMALL, "steps=2", f"output_dir={case.path('made')}"]
        checked = case.cohort("check", config, *limits)
        if checked.code == 0 and is_small(checked.out.decode(errors="replace")):
            case.cohort("train", config, *limits)


def argument(text):
    """The text reduced to a valid command line argument."""
    return text.replace(b"\0", b"")[:120000]


def yaml_case(case):
    """A mutated configuration."""
    write_inputs(case.folder, case.rng.choice(sorted(CONFIGS)))
    source = case.rng.choice([case.path("run.yaml"), LAB.work / "base/task/run/config.yaml",
                              *sorted((ROOT / "configs").glob("*.yaml"))])
    case.path("run.yaml").write_bytes(mutate(case.rng, source.read_bytes()))
    check_and_train(case, "run.yaml")


def override_case(case):
    """Overrides with mutated values on the command line."""
    write_inputs(case.folder, case.rng.choice(sorted(CONFIGS)))
    overrides = []
    for _ in range(case.rng.randint(1, 3)):
        key = case.rng.choice(LAB.keys)
        key = case.rng.choice(["", "stages.0.", "stages.1.", "stages.2."]) + key
        value = case.rng.choice(VALUES)
        override = key.encode() + b"=" + value
        if case.rng.random() < 0.2:
            override = mutate(case.rng, override)
        overrides.append(argument(override))
    check_and_train(case, "run.yaml", *overrides)


def data_case(case):
    """Mutated lines of JSON data, or a mutated text."""
    name, file = case.rng.choice([("jsonl", "data.jsonl")] * 3 + [("text", "text.txt")])
    write_inputs(case.folder, name)
    data = case.path(file).read_bytes()
    if file == "data.jsonl" and case.rng.random() < 0.5:
        lines = data.splitlines()
        number = case.rng.randrange(len(lines))
        lines[number] = mutate_json(case.rng, lines[number]).replace(b"\n", b" ")
        data = b"\n".join(lines) + b"\n"
    else:
        data = mutate(case.rng, data)
    case.path(file).write_bytes(data)
    check_and_train(case, "run.yaml")


def template_case(case):
    """Mutated prompt templates and reward patterns."""
    write_inputs(case.folder, "jsonl")
    rng = case.rng
    key = rng.choice(["data.jsonl.prompt", "data.jsonl.answer", "data.jsonl.solution"])
    text = mutate(rng, rng.choice([b"{a}+1=", b"{{x}} {b}", b"{why} {a} = {b}"]))
    pattern = mutate(rng, rng.choice([b".*1.*", b"#### *([^ \n]+)", b"(a|b)*c{1,3}"]))
    pattern = b"'" + pattern.replace(b"'", b"''") + b"'"
    name = rng.choice([b"format", b"numeric", b"exact_match", b"countdown", b"task"])
    rewards = b"stages.1.rewards=[{name: " + name + b", pattern: " + pattern + b"}]"
    check_and_train(case, "run.yaml", argument(key.encode() + b"=" + text), argument(rewards))


def prompt_case(case):
    """Mutated prompts and texts on standard input."""
    rng = case.rng
    option, text = rng.choice([([], b"1+1=\n22+1=\n"),
                               (["--json-input"], b'"1+1="\n"a\\n\\u0041"\n'),
                               (["--template"], b'{"a": 1, "b": [1, null]}\n{"a": "x"}\n')])
    run, stdin = LAB.work / "base" / rng.choice(["jsonl", "task"]) / "run", mutate(rng, text)
    if rng.random() < 0.3:
        case.cohort("logprobs", run, *rng.choice([[], ["--eos"]]), stdin=stdin)
    else:
        temperature = rng.choice(["0", "1e-9", "100"])
        sampling = rng.choice([[], ["--num", "3"], ["--temperature", temperature],
                               ["--top-k", "1"], ["--top-p", "1e-6"]])
        length = rng.choice(["4", "4", "9" * 18])
        case.cohort("generate", run, *option, "--max-tokens", length, *sampling, stdin=stdin)


def checkpoint_case(case):
    """A damaged file of a checkpoint or a run, possibly with a manifest updated to match."""
    rng = case.rng
    copy_base(case, rng.choice(["jsonl-half", "task-half", "text-half"]))
    folders = newest(case.path("run"))
    checkpoint = folders[max(folders)]
    own = [p for p in case.path("run").rglob("*") if p.name in
           ("config.yaml", "1.yaml", "metrics.jsonl", "completions.jsonl")]
    saved = sorted(p for p in checkpoint.rglob("*") if p.is_file())
    path = rng.choice(own if rng.random() < 0.2 else saved)
    change = (mutate_tensors if path.suffix == ".safetensors" else
              mutate_json if path.suffix == ".json" else mutate)
    path.write_bytes(change(rng, path.read_bytes()))
    manifest = checkpoint / "manifest.json"
    if checkpoint in path.parents and path != manifest and rng.random() < 0.8:
        listed = json.loads(manifest.read_bytes())
        name = str(path.relative_to(checkpoint))
        listed["files"][name] = {"bytes": path.stat().st_size, "xxh3": xxh3(path.read_bytes())}
        manifest.write_text(json.dumps(listed))
    run = case.path("run")
    command = rng.choice([["generate", checkpoint, "1+1=", "--max-tokens", "4"], ["eval", run],
                          ["logprobs", run, "1+1=2"], ["train", "--resume", run],
                          ["check", "run.yaml", "init_from=run"]])
    if path.name == "config.yaml":
        checked = case.cohort("check", path)
        if checked.code != 0 or not is_small(checked.out.decode(errors="replace")):
            return
        command = ["train", "--resume", run, *SMALL]
    case.cohort(*command)


MUTATIONS = [(yaml_case, 30), (override_case, 25), (checkpoint_case, 17), (data_case, 10),
             (template_case, 9), (prompt_case, 9)]


def mutations(case):
    """A mutated input is accepted, or rejected with a message."""
    make = case.rng.choices([m for m, _ in MUTATIONS], [weight for _, weight in MUTATIONS])[0]
    case.counts[make.__name__.replace("_case", "")] += 1
    make(case)


# ---- Main program --------------------------------------------------------------------------------


def attempt(task):
    """Runs one case and returns (name, counts, problem), or None after the deadline."""
    kind, number, deadline = task
    if time.monotonic() > deadline:
        return None
    name = f"{kind.__name__}-{number}"
    case = Case(LAB.work / "cases" / name, random.Random(f"{LAB.seed} {name}"))
    try:
        problem = ""
        kind(case)
    except Finding as finding:
        problem = str(finding)[:2000]
    except Exception as error:  # in this script, or from output that it could not read
        problem = f"{type(error).__name__}: {error}"[:2000]
        case.history.append(repr(sys.exc_info()[2].tb_next.tb_frame))
    if problem:
        case.path("case.txt").write_text("\n".join([problem, *case.history]), errors="replace")
        shutil.move(case.folder, LAB.work / "findings" / name)
    else:
        shutil.rmtree(case.folder)
    return name, case.counts, problem


def prepare():
    """Creates the undisturbed and the interrupted runs, and the call trace of every command."""
    base, rng = LAB.work / "base", random.Random(0)
    LAB.outcomes, LAB.seconds, LAB.traces, LAB.outputs = {}, {}, [], []
    for name in CONFIGS:
        case, half = Case(base / name, rng), Case(base / f"{name}-half", rng)
        write_inputs(case.folder, name)
        shutil.copytree(case.folder, base / f"{name}-new")
        start = time.monotonic()
        if case.cohort("train", "run.yaml").code != 0:
            sys.exit("attack.py: an undisturbed run failed: " + case.history[-1])
        LAB.seconds[name] = time.monotonic() - start
        LAB.outcomes[name] = outcome(case.path("run"))
        write_inputs(half.folder, name)
        # Killed at the rename that publishes a checkpoint of the last stage.
        half.cohort("train", "run.yaml", fault=("rename", "/.tmp-step-00000006 ", -1, len(
            newest(case.path("run"))) - 1, 1))
        for file in USER_FILES:
            half.path(file).parent.mkdir(parents=True, exist_ok=True)
            half.path(file).write_text(file)
    for number, (_, folder, arguments) in enumerate(COMMANDS):
        case = Case(LAB.work / f"trace-{number}", rng)
        copy_base(case, folder)
        result = case.cohort(*[a.format(case.folder) for a in arguments],
                             fault=("*", case.folder, 0, 0, 0))
        if result.code != 0:
            sys.exit("attack.py: an undisturbed command failed: " + case.history[-1])
        calls = collections.Counter(line.split()[0] for line in result.hits)
        LAB.traces.append(calls | {"*": calls.total()})  # "*": any call
        LAB.outputs.append(without_free_space(result.out).replace(os.fsencode(case.folder), b"{}"))
    # A model that takes a while to load.
    large = Case(base / "large", rng)
    large.path("run.yaml").write_text(COMMON + ADDITION +
                                      "trainer: sft\nsteps: 1\nbatch_size: 8\n")
    if large.cohort("train", "run.yaml", "model.d_model=256", "model.num_layers=6").code != 0:
        sys.exit("attack.py: an undisturbed run failed: " + large.history[-1])
    help_text = Case(LAB.work / "help", rng).cohort("train", "--keys").out.decode()
    LAB.keys, groups = [], []
    key_line = re.compile(r"^( *)([a-z]\w*)(:?) {2}", re.M)
    for spaces, name, group in key_line.findall(help_text.split("keys")[1]):
        groups = groups[:len(spaces) // 2] + [name, "0"][:2 if name == "rewards" else 1]
        if not group:
            LAB.keys.append(".".join(groups).replace("rewards.", "rewards.0."))


def start_worker():
    """Initialises a worker: it ends with its parent and immediately on SIGTERM."""
    ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def attack(options):
    """Runs all cases in two processes, prints the counts and returns the findings."""
    findings, start = [], time.monotonic()
    plan = [(kills, options.kills, 0.28), (faults, options.faults, 0.58),
            (traps, options.traps, 0.75), (mutations, options.mutations, 1.0)]
    with multiprocessing.get_context("fork").Pool(WORKERS, start_worker) as pool:
        for kind, wanted, time_fraction in plan:
            if options.only and not options.only.startswith(kind.__name__ + ":"):
                continue
            counts, cases = collections.Counter(), 0
            deadline = start + time_fraction * options.seconds
            while sum(counts.values()) < wanted and time.monotonic() < deadline:
                missing = wanted - sum(counts.values())
                numbers = range(cases, cases + max(WORKERS, missing // (5 if kind is kills else 1)))
                if options.only:
                    numbers = [int(options.only.split(":")[1])]
                for done in pool.imap_unordered(attempt, [(kind, n, deadline) for n in numbers]):
                    if done is None:
                        continue
                    counts.update(done[1])
                    if done[2]:
                        findings.append(done[0])
                        print(f"FOUND {done[0]}: {done[2]}", flush=True)
                cases += len(numbers)
                if options.only:
                    break
            listed = ", ".join(f"{name} {n}" for name, n in sorted(counts.items()))
            print(f"{sum(counts.values())} of {wanted} {kind.__name__}: {listed}", flush=True)
        # A worker ended by a signal could hold a lock that the other one waits for.
        pool.close()
        pool.join()
    print(f"{len(findings)} findings in {time.monotonic() - start:.0f} s, seed {options.seed}")
    return findings


def main():
    """Parses the arguments, runs the cases in a temporary folder and cleans up."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600, help="no new case after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--faults", type=int, default=1600)
    parser.add_argument("--traps", type=int, default=400)
    parser.add_argument("--mutations", type=int, default=10000)
    parser.add_argument("--smoke", action="store_true", help="a tenth, in a minute")
    parser.add_argument("--only", metavar="KIND:NUMBER", help="one case")
    parser.add_argument("--binary", type=Path, default=ROOT / "build/cpu/cohort")
    options = parser.parse_args()
    if options.smoke:
        options.seconds = min(options.seconds, 60)
        for kind in ("kills", "faults", "traps", "mutations"):
            setattr(options, kind, max(1, getattr(options, kind) // 10))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # cleans up first
    LAB.seed, LAB.binary = options.seed, options.binary.resolve()
    LAB.shim = LAB.binary.parent / "tests/libcohort_faults.so"
    for path in (LAB.binary, LAB.shim):
        if not path.exists():
            sys.exit(f"attack.py: {path} is missing; scripts/test.sh --build-only builds it")
    LAB.xxhash = ctypes.CDLL("libxxhash.so.0")
    LAB.xxhash.XXH3_64bits.restype = ctypes.c_uint64
    LAB.work = Path(tempfile.mkdtemp(prefix="cohort-attack-"))
    kept = LAB.work / "findings"
    kept.mkdir()
    try:
        prepare()
        return 1 if attack(options) else 0
    finally:
        if any(kept.iterdir()):
            for path in set(LAB.work.iterdir()) - {kept}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            print(f"kept: {kept}")
        else:
            shutil.rmtree(LAB.work)


if __name__ == "__main__":
    sys.exit(main())

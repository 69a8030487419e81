"""Shared by the cases of scripts/attack.py: commands under limits, and checks of runs."""
import collections
import ctypes
import json
import os
import pty
import re
import resource
import select
import shlex
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
LAB = SimpleNamespace()  # shared by all cases; set before the workers are forked
WORKERS = 2
TIME_LIMIT = 20  # seconds per command
MEMORY, FILE_SIZE = 4 << 30, 256 << 20  # limits of a command in bytes
PDEATHSIG = 1

COMMON = ("output_dir: run\nnum_threads: 1\nlearning_rate: 1e-2\nmax_completion_length: 4\n"
          "eval: {every: 3, size: 8}\ncheckpoint: {every: 2, keep_last: 2}\n"
          "model: {num_layers: 1, d_model: 16, num_heads: 2, context: 24, init_std: 0.1}\n")
ADDITION = "data: {task: addition, task_sizes: {max_size: 2}}\n"
STAGES = ("stages:\n  - {trainer: sft, steps: 10, batch_size: 8}\n"
          "  - {trainer: grpo, steps: 8, prompts_per_step: 4, num_generations: 8, beta: 0.1,\n"
          "     rewards: [{name: format, pattern: '.*1.*'}], log_completions: 3}\n")
CONFIGS = {
    "task": COMMON + ADDITION + STAGES,
    "ranks": COMMON + ADDITION + "ranks: 2\n" + STAGES,
    "jsonl": COMMON + STAGES + "data:\n  tokenizer: byte\n  jsonl: {path: data.jsonl, prompt: "
             "'{a}+1=', answer: '{b}', held_out_fraction: 0.3}\n",
    "text": COMMON + "trainer: pretrain\nsteps: 12\nbatch_size: 4\n"
            "data: {text: text.txt, held_out_fraction: 0.2}\n",
}
JSONL = "".join(f'{{"a": {i}, "b": {i + 1}, "why": ["x", {{"y": null}}]}}\n' for i in range(60))
TEXT = "".join(f"{w} one two three\n" for w in "four five and seven eight but not nine".split() * 9)
# Files of the user in folders where Cohort writes.
USER_FILES = ["run/notes.txt", "run/checkpoints/user/a", "run/checkpoints/.tmp-user",
              "run/starts/user"]


class Finding(Exception):
    """A violated expectation."""


def expect(condition, *message):
    """Raises a Finding with the message unless the condition holds."""
    if not condition:
        raise Finding(" ".join(str(m) for m in message))


# ---- Commands ------------------------------------------------------------------------------------

Result = collections.namedtuple("Result", "code out err hits")


def in_child(stack=None, root=True):
    """In a child: sets resource limits, ties its life to the parent, and resets signal handling,
    independent of how this script was started. Unless `root`, file permissions apply to root."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PDEATHSIG, signal.SIGKILL)
    # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
    for capability in () if root else (1, 2, 3):
        prctl(24, capability)  # PR_CAPBSET_DROP
    if stack:
        resource.setrlimit(resource.RLIMIT_STACK, (stack, stack))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for limit, value in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, FILE_SIZE),
                         (resource.RLIMIT_CPU, 4 * TIME_LIMIT), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (value, value))


class Case:
    """One case: its folder, its random generator and its command history."""

    def __init__(self, folder, rng):
        self.folder, self.rng, self.history = folder, rng, []
        self.counts = collections.Counter()  # actions by kind
        folder.mkdir(parents=True)

    def path(self, name):
        """A path in the case's folder."""
        return self.folder / name

    def cohort(self, *arguments, stdin=b"", fault=None, signal_at=None, meanwhile=None,
               shell=None, **limits):
        """Runs a command to its end. `fault`: for COHORT_FAULT; `signal_at`: (seconds, signal);
        `meanwhile`: (seconds, function to call then);
        `shell`: a script that executes its arguments; `limits`: for in_child().

        Expects that the command always ends by itself within the time limit, with a documented exit
        code, and explains a failure."""
        command = [os.fsencode(a) for a in (LAB.binary, *arguments)]
        command[:0] = [b"bash", os.fsencode(shell)] if shell else []
        environment, log = dict(os.environ), LAB.work / f"hits-{os.getpid()}"
        if fault:
            environment |= {"LD_PRELOAD": str(LAB.shim), "COHORT_FAULT_LOG": str(log),
                            "COHORT_FAULT": "|".join(str(f) for f in fault)}
        line = " ".join(shlex.quote(os.fsdecode(c)) for c in command)
        self.history.append(f"{line}  # fault {fault}, signal {signal_at}, stdin {stdin[:1000]!r}")
        # Standard error is outside the folder with fault injection.
        error_path, hits = LAB.work / f"err-{os.getpid()}", []
        self.path("in").write_bytes(stdin)
        with open(self.path("in"), "rb") as in_, open(self.path("out"), "wb") as out, \
                open(error_path, "wb") as err:
            process = subprocess.Popen(command, stdin=in_, stdout=out, stderr=err, env=environment,
                                       cwd=self.folder, preexec_fn=lambda: in_child(**limits))
            try:
                if meanwhile and not ended(process, meanwhile[0]):
                    meanwhile[1]()
                if signal_at and not ended(process, signal_at[0]):
                    process.send_signal(signal_at[1])
                in_time = ended(process, TIME_LIMIT)
            finally:
                process.kill()
                process.wait()
        if log.exists():
            hits = log.read_text(errors="replace").splitlines()
            log.unlink()
        result = Result(process.returncode, self.path("out").read_bytes(),
                        error_path.read_text(errors="replace"), hits)
        self.history.append(f"# code {result.code}, hits {len(hits)}: {result.err[-2000:]}")
        expect(in_time, "still running after", TIME_LIMIT, "s")
        allowed = {0, 1, 2} | ({130, -signal_at[1]} if signal_at else set())
        expect(result.code in allowed or fault and fault[2] < 0, "exit code", result.code)
        expect(fault or result.code != 1 or arguments[0] != "check", "check failed:", result.err)
        if result.code in (1, 2):
            self.expect_message(result)
        return result

    def on_terminal(self, *arguments):
        """Runs a command whose output is a terminal. Returns its exit code and its output."""
        command = [os.fsencode(a) for a in (LAB.binary, *arguments)]
        self.history.append(" ".join(shlex.quote(os.fsdecode(c)) for c in command) + "  # on a pty")
        master, slave = pty.openpty()
        pieces = []

        def drain():
            try:
                while piece := os.read(master, 65536):
                    pieces.append(piece)
            except OSError:  # the other end is closed
                pass
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave,
                                   cwd=self.folder, preexec_fn=in_child)
        os.close(slave)
        reader = threading.Thread(target=drain)
        reader.start()
        in_time = ended(process, TIME_LIMIT)
        process.kill()
        process.wait()
        reader.join()
        os.close(master)
        expect(in_time, "still running after", TIME_LIMIT, "s")
        return process.returncode, b"".join(pieces)

    def expect_message(self, result):
        """Expects a failure message in the user's terms, of readable length."""
        last = result.err.splitlines()[-1] if result.err.strip() else ""
        message = result.err[result.err.rfind("cohort: "):] if "cohort: " in result.err else ""
        expect(len(message) > 20, "no message, but:", last)
        for internal in ("std::", "terminate called", "bad_alloc", "yaml-cpp", "YAML::", "basic_",
                         "json.exception", "Sanitizer", "filesystem error", ": Success"):
            expect(internal not in result.err, "a message with", internal, message[:500])
        expect(len(result.err) < 20000, "a message of", len(result.err), "characters")


def ended(process, seconds):
    """True if the process ends within `seconds`."""
    if process.returncode is not None:  # reaped by send_signal()
        return True
    handle = os.pidfd_open(process.pid)
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


# ---- Runs ----------------------------------------------------------------------------------------


def xxh3(data):
    """The checksum that manifests use."""
    return "%016x" % LAB.xxhash.XXH3_64bits(data, ctypes.c_size_t(len(data)))


def is_sound(checkpoint):
    """True if the manifest exists and the checksum of every listed file matches."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_bytes())["files"]
        data = {name: (checkpoint / name).read_bytes() for name in files}
    except OSError:
        return False
    return all(xxh3(data[name]) == files[name]["xxh3"] for name in files)


def log_lines(path):
    """The lines of a log without the timings, which differ from run to run."""
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    timed = re.compile(r"time|step_time|(.*/)?tokens_per_second")
    return [json.dumps({k: v for k, v in line.items() if not timed.match(k)}) for line in lines]


def newest(run):
    """The newest sound checkpoint of each stage that has one."""
    out = {}
    for folder in run.rglob("checkpoints"):
        sound = [c for c in sorted(folder.glob("step-*")) if is_sound(c)]
        if sound:
            out[str(folder.relative_to(run))] = sound[-1]
    return out


def outcome(run):
    """Final weights and logs of each stage, which must be equal for equal runs."""
    out = {}
    for name, checkpoint in newest(run).items():
        logs = run / Path(name).parent
        out[name, "weights"] = (checkpoint / "model.safetensors").read_bytes()
        for log in ("metrics.jsonl", "completions.jsonl"):
            out[name, log] = log_lines(logs / log)
    return out


def write_inputs(folder, name):
    """Writes a configuration and its data files."""
    (folder / "run.yaml").write_text(CONFIGS[name])
    (folder / "data.jsonl").write_text(JSONL)
    (folder / "text.txt").write_text(TEXT)


def copy_base(case, name):
    """Copies a folder of LAB.work/base into the case and adapts the run's configuration."""
    source = LAB.work / "base" / name
    shutil.copytree(source, case.folder, symlinks=True, dirs_exist_ok=True)
    for config in case.folder.glob("run/**/*.yaml"):
        config.write_text(config.read_text().replace(str(source), str(case.folder)))


def expect_complete(case, name, lost=False):
    """Expects the weights and logs of an undisturbed run; `lost`: log lines may be missing."""
    expected, found = LAB.outcomes[name], outcome(case.path("run"))
    expect(expected.keys() == found.keys(), "other stages:", list(found))
    for key, value in expected.items():
        same = found[key] == value
        if lost and key[1] != "weights":
            same = [line for line in value if line in found[key]] == found[key]
        expect(same, "differs from the undisturbed run:", *key)


def expect_resumable(case, name, lost=False):
    """Resumes a run to its end and expects the result of an undisturbed run."""
    run = case.path("run")
    if run.exists() and not (run / "config.yaml").exists():
        shutil.rmtree(run)  # killed before the run was created
    arguments = ["--resume", run] if run.exists() else ["run.yaml"]
    result = case.cohort("train", *arguments)
    expect(result.code == 0, "the plain command failed")
    expect_complete(case, name, lost)
    for path in run.rglob("*"):
        temporary = re.match(r"\.(tmp|old)-step-|.*\.tmp$", path.name)
        expect(not temporary or "user" in path.name, "left behind:", path.relative_to(run))
        expect(not re.match(r"step-\d+$", path.name) or is_sound(path), "unsound:", path)

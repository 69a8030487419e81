"""The traps of scripts/attack.py: files, terminals, signals and limits made by an attacker."""
import json
import os
import re
import shutil
import signal
import stat
import threading
import time

from attack_lab import (LAB, copy_base, expect, expect_complete,
                        expect_resumable, newest, write_inputs)

EVIL = b"\x1b[31m\x1b]0;x\x07\xe2\x80\xae\xc2\x9b2J"
REGULAR = ("regular file", "folder", "directory")


def make_node(rng, path):
    """Makes a special file in the case's folder; devices only as root. Returns its kind."""
    kinds = ["fifo", "folder", "link", "dangling"]
    kinds += ["null", "block"] if os.geteuid() == 0 else []
    kind = rng.choice(kinds)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("link", "dangling"):
        if kind == "link":
            path.with_name("linked").write_text("before")
        path.symlink_to("linked")
    else:
        # No driver has the number of the block device.
        mode, number = (stat.S_IFCHR, (1, 3)) if kind == "null" else (stat.S_IFBLK, (240, 77))
        try:
            os.mknod(path, mode | 0o600, os.makedev(*number))
        except OSError:  # in a container
            os.mkfifo(path)
            kind = "fifo"
    return kind


def copy_model(case, base="task"):
    """Copies the newest checkpoint of a run to the folder `model`, which belongs to no run."""
    folders = newest(LAB.work / "base" / base / "run")
    shutil.copytree(folders[max(folders)], case.path("model"))
    case.path("model").joinpath("manifest.json").unlink()
    shutil.rmtree(case.path("model") / "training")
    return case.path("model")


def output_trap(case):
    """Written files go into FIFOs, character devices and the files of links, which stay what they
    are; block devices and folders are refused."""
    copy_base(case, "jsonl")
    path = case.path("target")
    kind = make_node(case.rng, path)
    before = stat.S_IFMT(path.lstat().st_mode)
    received = []

    def read():
        with open(path, "rb") as fifo:
            received.append(fifo.read())
    if kind == "fifo":
        threading.Thread(target=read, daemon=True).start()
    command = case.rng.choice([["report", "run", f"--output={path}"],
                               ["eval", "run", f"--pass-rates={path}"]])
    result = case.cohort(*command)
    kept = os.path.lexists(path) and stat.S_IFMT(path.lstat().st_mode) == before
    expect(kept, "replaced:", kind, result.err)
    expect(kind not in ("block", "folder") or result.code != 0, "not refused:", kind)
    expect(kind not in ("fifo", "link", "dangling", "null") or result.code == 0, "failed:", kind)
    expect(kind not in ("link", "dangling") or len(case.path("linked").read_text()) > 6,
           "the link was not followed")
    left = [p.name for p in case.folder.iterdir() if ".tmp" in p.name]
    expect(not left, "left behind:", left)


def input_trap(case):
    """FIFOs, devices and folders as files, and manifests that name paths outside the checkpoint,
    are refused before they are read."""
    rng = case.rng
    if rng.random() < 0.2:
        copy_base(case, "task")
        folders = newest(case.path("run"))
        manifest = folders[max(folders)] / "manifest.json"
        listed = json.loads(manifest.read_bytes())
        name = rng.choice(["../state.json", "training/../config.json", "/etc/passwd", "..", "a/../config.json", "."])
        listed["files"][name] = listed["files"]["config.json"]
        manifest.write_text(json.dumps(listed))
        result = case.cohort("generate", manifest.parent, "1+1=")
        expect(result.code == 2 and name in result.err, "not refused:", result.err)
        return
    model = copy_model(case)
    name = rng.choice(["data.jsonl", "text.txt"])
    write_inputs(case.folder, "jsonl" if name == "data.jsonl" else "text")
    path, command = rng.choice([
        (case.path(name), ["train", "run.yaml"]), (case.path(name), ["check", "run.yaml"]),
        *[(model / file, ["generate", model, "1+1=", "--max-tokens", "4"])
          for file in ("config.json", "model.safetensors", "tokenizer.json")]])
    path.unlink()
    kind = rng.choice(["fifo", "zero", "folder"])
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    result = case.cohort(*command)
    expect(result.code == 2, "exit code", result.code, "for a", kind, "as", path.name)
    expect(any(word in result.err for word in REGULAR), "no reason:", kind, result.err)


def planted_trap(case):
    """No command of a configuration above or beside a model is executed, unless the folders are
    those of a run: RUN/checkpoints/step-N, RUN/N-TRAINER/checkpoints/step-N."""
    write_inputs(case.folder, "jsonl")
    deep = case.rng.choice(["", "models/", "models/checkpoints/", "models/0-sft/checkpoints/"])
    model = copy_model(case, "jsonl")
    if deep:
        case.path(deep).mkdir(parents=True)
        model = model.rename(case.path(deep) / case.rng.choice(["model", "step-6"]))
    evil = ("trainer: grpo\nsteps: 2\n"
            f"rewards: [{{name: command, run: touch {case.path('owned')}}}]\n"
            "eval: {size: 4, correct: {reward: command}}\nmax_completion_length: 4\n"
            f"data:\n  tokenizer: byte\n  jsonl: {{path: {case.path('data.jsonl')}, "
            "prompt: '{a}', answer: '{b}', held_out_fraction: 0.3}\n")
    for parent in [model, *model.parents]:
        if parent.is_relative_to(case.folder):
            (parent / "config.yaml").write_text(evil)
    case.cohort(*case.rng.choice([["eval", model], ["generate", model, "1+1=", "--max-tokens=4"],
                                  ["generate", model, "--template", '{"a": 1, "b": 2}'],
                                  ["chat", model], ["inspect", model]]))
    expect(not case.path("owned").exists(), "a planted command was executed")


def escape_trap(case):
    """Escape sequences of models, prompts and data never reach a terminal."""
    rng, model = case.rng, copy_model(case)
    evil = rng.choice([EVIL, EVIL * rng.choice([1, 50000])])
    kind = rng.randrange(4)
    if kind == 0:
        config = json.loads((model / "config.json").read_bytes())
        config["model_type"] = evil.decode()
        (model / "config.json").write_text(json.dumps(config))
        command = [rng.choice(["inspect", "generate"]), model]
    elif kind == 1:
        command = ["generate", model, evil[:10000], "--max-tokens", "4"]
    elif kind == 2:
        case.path("a.jinja").write_bytes(evil)
        case.path("b.json").write_text("{}")
        command = ["template", "render", "a.jinja", "--context", "b.json"]
    else:
        write_inputs(case.folder, "jsonl")
        with open(case.path("data.jsonl"), "ab") as data:
            data.write(b'{"a": "' + evil.replace(b"\x1b", b"\\u001b").replace(b"\x07", b"") +
                       b'", "b": 1}\n{"' + evil)
        command = ["check", "run.yaml"]
    _, output = case.on_terminal(*command)
    own = re.sub(rb"\x1b\[(K|m|3[0-9]m)", b"", output)
    for piece in (b"\x1b", b"\x07", b"\xc2\x9b", b"\xe2\x80\xae", b"\x1b[31m\x1b"):
        found = piece in (output if len(piece) > 4 else own)
        expect(not found, "raw on a terminal:", piece, own[:500])
    expect(kind != 0 or len(output) < 20000, "an error of", len(output), "bytes")


def signal_trap(case):
    """SIGINT and SIGTERM in the first second are obeyed at once; nothing is lost."""
    rng = case.rng
    number = rng.choice([signal.SIGINT, signal.SIGTERM])
    moment = rng.uniform(0, 1) ** 2
    name = rng.choice(["task", "jsonl", "text"])
    write_inputs(case.folder, name)
    command, blocked = ["train", "run.yaml"], rng.random() < 0.4
    if blocked:
        os.mkfifo(case.path("fifo"))
        command = rng.choice([["check", "fifo"], ["train", "fifo"],
                              ["template", "render", "fifo", "--context", "fifo"],
                              ["tokenizer", "train", "--output", "tokens", "fifo"]])
    start = time.monotonic()
    result = case.cohort(*command, signal_at=(moment, number))
    waited = time.monotonic() - start - moment
    expect(waited < 3, "ended", round(waited, 1), "s after the signal")
    expect(result.code in (0, 2, 130, -number), "exit code", result.code)
    if not blocked:
        expect_resumable(case, name)


def shrink_trap(case):
    """A file that shrinks while it is loaded is an error, not a crash."""
    model = copy_model(case, "large")
    path = model / case.rng.choice(["model.safetensors"] * 3 + ["tokenizer.json", "config.json"])
    size = int(path.stat().st_size * case.rng.choice([0, case.rng.random()]))
    case.cohort("generate", model, "1+1=", "--max-tokens", "4",
                meanwhile=(case.rng.uniform(0, 0.06), lambda: os.truncate(path, size)))


def cache_trap(case):
    """A token cache that is deleted while it is made is made again; a complete one that is
    read-only is used."""
    write_inputs(case.folder, "text")
    cache = case.path("cache")
    command = ["train", "run.yaml", f"data.cache_dir={cache}"]
    if case.rng.random() < 0.5:
        delay = case.rng.uniform(0, 0.1)
        result = case.cohort(*command, meanwhile=(delay, lambda: shutil.rmtree(cache, True)))
        expect(result.code == 0, "failed:", result.err)
    else:
        expect(case.cohort("check", *command[1:]).code == 0, "check failed")
        expect(case.cohort(*command).code == 0, "the first run failed")
        shutil.rmtree(case.path("run"))
        paths = [cache, *cache.rglob("*")]
        expect(len(paths) > 1, "no cache in", cache)
        try:
            for path in paths:
                path.chmod(0o555 if path.is_dir() else 0o444)
            result = case.cohort(*command, root=False)
        finally:
            for path in paths:
                path.chmod(0o755)
        expect(result.code == 0, "a read-only cache:", result.err)
    expect_complete(case, "text")


def limit_trap(case):
    """Small stacks, a deleted current directory and huge numbers are errors with a reason."""
    rng, kind = case.rng, case.rng.randrange(3)
    if kind == 0:
        depth = rng.choice([140, 1000, 100000])
        case.path("a.jinja").write_text(rng.choice(["{{ " + "(" * depth, "{% if a %}" * depth,
            "{{ " + "-" * depth + "1 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{{ deep | tojson }}"]))
        case.path("b.json").write_text('{"deep": ' + "[" * depth + "]" * depth + "}")
        case.path("c.yaml").write_text("a: " + "[" * depth)
        case.cohort(*rng.choice([["template", "render", "a.jinja", "--context", "b.json"],
                                 ["check", "c.yaml"]]), stack=96 << 10)
    elif kind == 1:
        number = rng.choice(["1000000000", "9223372036854775807"])
        option = rng.choice(["--num", "--best-of"])
        result = case.cohort("generate", copy_model(case), "1+1=", option, number)
        expect(result.code == 2 and option in result.err, "not refused by name:", result.err)
    else:
        folder, gone = case.folder, case.path("gone")
        gone.mkdir()
        case.path("run.sh").write_text('cd gone && rmdir ../gone && exec "$@"\n')
        command = rng.choice(["check x", "train x", "report x", "eval x", "generate x y"]).split()
        result = case.cohort(*command, shell=folder / "run.sh")
        expect(result.code == 2 and "current directory" in result.err, "no reason:", result.err)


TRAPS = [output_trap, input_trap, planted_trap, escape_trap, signal_trap, shrink_trap, cache_trap,
         limit_trap]


def traps(case):
    """A trap does no harm: see each."""
    trap = case.rng.choice(TRAPS)
    case.counts[trap.__name__.replace("_trap", "")] += 1
    trap(case)

#!/usr/bin/env python3
"""Runs the commands of README.md and docs/*.md: every line of a ```bash block, in one folder with stand-ins for the names
that pages use (DIR, RUN, input.txt, ...). RULES says for each command how it is run, shortened or skipped; a command without
a rule, a rule without a command, a path or a link without a file are failures.

  docs_commands.py COHORT [--list] [--only TEXT]
"""
import argparse
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("COHORT_TEST_DATA", TREE.parent / "shared/data"))

# Keys that shorten a run; the documents have the full commands.
SHORT = "steps=2 eval.size=4"
SMALL = SHORT + " eval.num_samples=0 eval.k=[] batch_size=4"
GRPO = " num_generations=4 prompts_per_step=4 max_completion_length=8"
STAGES = "stages.0.steps=2 stages.1.steps=2 eval.size=4"
WORDS = "data.jsonl.limit=40 data.too_long=skip max_completion_length=8"

# (pattern of the whole command, action, argument). The first match decides. Actions:
#   run    runs it, with the argument appended to the part that starts with cohort
#   check  a training on GPUs: `cohort check` with the same arguments and the argument appended
#   cpu    runs it without --device and --dtype
#   other  a command that is not run here; the argument is the reason. Its paths and options are checked.
RULES = [
    (r"scripts/quickstart\.sh( --gpu)?$", "other", "installs packages and builds"),
    (r"scripts/test\.sh$", "other", "builds and runs this test"),
    (r"scripts/build\.sh cpu-portable$", "other", "builds"),
    (r"hf download ", "other", "needs the network"),
    (r"vllm serve \w+$", "other", "needs vLLM and a GPU"),
    (r"tensorboard --logdir runs$", "other", "a server; tests/apps/tensorboard_test.cpp reads the event files"),
    (r"cmake ", "other", "builds; .ci/run builds the example"),
    (r"(torchrun|srun|mpirun) .*build/cuda/cohort train (--continue )?CONFIG.yaml$", "check", STAGES),
    (r"build/cuda/cohort (train|check) .*CONFIG.yaml$", "check", STAGES),
    (r"build/cuda/cohort train .*configs/shakespeare_char_gpu.yaml", "check", ""),
    (r"build/cuda/cohort train configs/(gsm8k_sft|gsm8k_grpo|qwen3_5_grpo).yaml", "check", WORDS),
    (r".*build/cuda/cohort (generate|chat) ", "cpu", "--max-tokens 2"),
    (r"python3 bench/memory_table.py build/cpu/cohort$", "run", "--only SmolLM2-135M"),
    (r"python3 bench/memory_table.py build/cpu/cohort --scaling$", "run", "--only Llama-3.1-8B"),
    (r"build/cpu/cohort train configs/demo.yaml seed=3 stages.1.steps=50$", "run", STAGES),
    (r"build/cpu/cohort train configs/demo.yaml --profile 3$", "run", STAGES.replace("=2", "=6")),
    (r"build/cpu/cohort train configs/demo.yaml micro_batch_tokens=auto$", "run", STAGES),
    (r"build/cpu/cohort train --continue configs/demo.yaml$", "run", STAGES + " output_dir=runs/continued"),
    (r"build/cpu/cohort train --resume runs/quickstart$", "run", ""),
    (r"build/cpu/cohort train --resume runs/quickstart stages.1.steps=120$", "run", "stages.1.steps=4"),
    (r"build/cpu/cohort train examples/assistant/config.yaml ", "run", SHORT + GRPO + " rewards.0.workers=1"),
    (r"build/cpu/cohort train configs/stories_grpo.yaml ", "run", SHORT + GRPO),
    (r"build/cpu/cohort train configs/countdown_sft.yaml ", "run", SMALL),
    (r"build/cpu/cohort train configs/countdown_grpo.yaml ", "run", SMALL + GRPO),
    (r"build/cpu/cohort train configs/pretrain.yaml ", "run", "steps=2 eval.tokens=1000"),
    (r"build/cpu/cohort train configs/shakespeare_char.yaml ", "run", "steps=2 eval.tokens=1000"),
    (r"build/cpu/cohort train configs/raw_text.yaml ", "run", "steps=2 batch_size=2 eval.tokens=2000 model.context=64"),
    (r"build/cpu/cohort train configs/tools_grpo.yaml$", "run", STAGES),
    (r"build/cpu/cohort check ", "run", ""),
    (r"build/cpu/cohort eval runs/gsm8k_sft ", "run", "max_completion_length=2 data.jsonl.path=train.jsonl"),
    (r"build/cpu/cohort eval DIR --rewards ", "run", "data.jsonl.path=train.jsonl eval.size=2 max_completion_length=2"),
    (r"build/cpu/cohort eval runs/quickstart ", "run", "eval.size=8"),
    (r"build/cpu/cohort eval runs/\w+$", "run", "eval.size=4 eval.tokens=1000"),
    (r".*build/cpu/cohort (generate|chat) ", "run", "--max-tokens 4"),
    (r"build/cpu/cohort sample DIR ", "run", "max_completion_length=8"),
    (r"build/cpu/cohort tokenizer train --vocab-size 8000 --output DIR ", "run", "--vocab-size 400 --output NEW"),
    (r"build/cpu/cohort tokenizer train ", "run", "--vocab-size 400"),
    (r"build/cpu/cohort (fill-mask|classify) [A-Z]+ ", "other", "tests/apps/encode_test.cpp makes encoders"),
    (r"build/cpu/cohort (embed|logprobs|report|replay|export|inspect|template render|gradcheck)\b", "run", ""),
    (r"echo .* \| build/cpu/cohort tokenizer encode DIR$", "run", ""),
]

# What the output of a command must contain, where success alone says little.
OUTPUT = {
    "check examples/assistant/config.yaml": "user: ",  # the conversation is rendered by the template
    "cohort report ": "report.html",
}
# Texts that a reader replaces.
STAND_INS = {"<completion>": ":1"}


def commands():
    """(file, line, command) of every ```bash block: comments removed, lines that end in a backslash joined."""
    for page in [TREE / "README.md", *sorted((TREE / "docs").glob("*.md"))]:
        inside, pending, start = False, "", 0
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if line.startswith("```"):
                inside = line == "```bash"
            elif inside:
                start = start if pending else number
                pending += line
                if pending.endswith("\\"):
                    pending = pending[:-1]
                    continue
                # A comment begins with # after a blank, outside of quotes.
                command = re.match(r"""((?:'[^']*'|"[^"]*"|(?<!\s)#|[^'"#])*)""", " " + pending)[1].strip()
                if not pending.lstrip().startswith("#") and command:
                    yield page.relative_to(TREE), start, command
                pending = ""


def broken_links():
    """Links of the pages to files, and to headings of pages, that do not exist."""
    pages = [page for folder in (".", "docs", "bench/results", ".github") for page in sorted((TREE / folder).glob("*.md"))]
    for page in pages:
        prose = re.sub(r"(?s)^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M)
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose):
            name, _, anchor = target.partition("#")
            path = page.parent / name if name else page
            text = path.read_text(encoding="utf-8") if path.suffix == ".md" and path.exists() else ""
            headings = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"(?m)^#+ (.*)", text)]
            if not path.exists() or (anchor and anchor not in headings):
                yield f"{page.relative_to(TREE)}: link to {target}, which does not exist"


def unknown_keys(cohort):
    """Names in the second column of docs/from_trl.md's tables that are no key of a configuration."""
    run = subprocess.run([cohort, "train", "--help"], capture_output=True, text=True)
    keys = set(re.findall(r"(?m)^ *(\w+)(?:  |:)", run.stdout))
    for line in (TREE / "docs/from_trl.md").read_text(encoding="utf-8").splitlines():
        cells = line.split("|")
        for name in re.findall(r"`([\w.]+)[^`]*`", cells[2]) if len(cells) > 3 else []:
            if name != "cohort" and not set(name.split(".")) <= keys:
                yield f"docs/from_trl.md: no key {name}"


class Sandbox:
    """A folder with copies of what commands name, and stand-ins for models, data and runs."""

    def __init__(self, cohort, root):
        self.root, self.cohort = root, cohort
        for name in ("configs", "examples", "bench", "scripts"):
            shutil.copytree(TREE / name, root / name)
        for preset in ("cpu", "cuda"):
            (root / "build" / preset).mkdir(parents=True)
            (root / "build" / preset / "cohort").symlink_to(cohort)
        self.env = {**os.environ, "HOME": str(root), "COHORT_NUM_THREADS": "2"}
        self.write_data()
        self.model = (DATA / "models/stories260K/model.safetensors").exists()
        if self.model:
            self.write_model()
        self.train("quickstart", f"configs/demo.yaml {STAGES}")
        self.train("countdown_sft", f"configs/countdown_sft.yaml data.jsonl.path=train.jsonl {SMALL}")
        self.train("text", "configs/shakespeare_char.yaml data.text=input.txt steps=1 eval.tokens=100")
        shutil.copytree(root / "runs/text", root / "RUN")
        shutil.copy(root / "configs/demo.yaml", root / "CONFIG.yaml")

    def write_data(self):
        rng = random.Random(1)
        words = "once upon a time there was a king who had a red ball and a big dog in the old house ".split()
        text = "".join("".join(rng.choice(words) + " " for _ in range(12)) + "\n" for _ in range(300))
        (self.root / "input.txt").write_text("ROMEO:\n" + text + "+-.,!?THE")
        (self.root / "FOLDER").mkdir()
        for i in range(3):
            (self.root / f"FOLDER/{i}.txt").write_text(text)
        lines = []
        for i in range(1, 80):
            a, b, c = i % 30 + 1, i % 17 + 2, i % 7 + 1
            lines.append(json.dumps({"question": f"Ann has {i} clips and buys as many.", "answer": f"{i}+{i}\n#### {2 * i}",
                                     "numbers": [a, b, c], "target": a + b - c, "solution": f"(({a}+{b})-{c})"}))
        for name in ("train", "test"):
            (self.root / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        (self.root / "messages.json").write_text(json.dumps(
            {"messages": [{"role": "user", "content": "Hello"}], "add_generation_prompt": True}))

    def write_model(self):
        folder = self.root / "DIR"
        shutil.copytree(DATA / "models/stories260K", folder)
        os.chmod(folder, 0o755)
        (folder / "chat_template.jinja").write_text(
            "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}")
        for name, more in (("gsm8k_sft", ""), ("gsm8k_grpo", "prompts_per_step=4 num_generations=2")):
            path = "DIR" if name == "gsm8k_sft" else "runs/gsm8k_sft"
            self.train(name, f"configs/{name}.yaml model.path={path} data.jsonl.path=train.jsonl "
                       f"steps=1 eval.size=2 batch_size=4 {WORDS} {more}")
        shutil.copytree(folder, self.root / "models/base")
        self.train("my-run", f"configs/gsm8k_sft.yaml model.path=models/base data.jsonl.path=train.jsonl lora.rank=4 "
                   f"steps=1 eval.size=2 batch_size=4 {WORDS}")
        _, error = self.shell("build/cpu/cohort export runs/my-run my-peft-adapter")
        if error:
            sys.exit(f"cannot make the stand-in my-peft-adapter: {error}")

    def train(self, name, arguments):
        _, error = self.shell(f"build/cpu/cohort train {arguments} output_dir=runs/{name}")
        if error:
            sys.exit(f"cannot make the stand-in runs/{name}: {error}")

    def shell(self, command):
        """Runs a command with "Hello" as input; returns its output, and "" or what went wrong."""
        run = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=self.root, env=self.env, input="Hello\n",
                             capture_output=True, text=True, errors="replace", timeout=120)
        error = f"exit code {run.returncode}: {(run.stderr or run.stdout)[-800:].strip()}"
        return run.stdout, error if run.returncode else ""

    def options_of(self, program):
        """The text of --help of a cohort command or a script."""
        run = subprocess.run([*program, "--help"], cwd=TREE if program[0].startswith("scripts") else self.root,
                             capture_output=True, text=True, timeout=60)
        return run.stdout + run.stderr

    def check_names(self, command):
        """The paths of the tree that a command names exist, and so do the options of its own programs."""
        words = shlex.split(command)
        for word in words:
            if re.match(r"(scripts|configs|examples|bench)/", word) and not (TREE / word).exists():
                return f"{word} does not exist"
        if words[0].startswith("scripts/"):
            text = self.options_of([words[0]])
            missing = [w for w in words[1:] if w.startswith("--") and w not in text]
            return f"{words[0]} has no option {missing[0]}" if missing else ""
        return ""


def shortened(command, action, argument):
    """The command that is run instead."""
    for name, text in STAND_INS.items():
        command = command.replace(name, text)
    if action == "check":
        tail = command[command.index("build/cuda/cohort"):].replace("build/cuda/cohort train", "build/cpu/cohort check")
        tail = re.sub(r"--continue |--restarts \d+ ", "", tail)
        return f"{tail.replace('build/cuda', 'build/cpu')} {argument} device=cuda"
    if action == "cpu":
        command = re.sub(r" --(device|dtype|max-tokens) \w+", "", command).replace("build/cuda", "build/cpu")
    if "--max-tokens" in argument:
        command = re.sub(r" --max-tokens \d+", "", command)
    if "tokenizer train" in command:
        command = re.sub(r" --(vocab-size) \w+", "", command)
        if "--output" in argument:
            command = re.sub(r" --output \w+", "", command)
    # Keys of the argument replace those of the document.
    keys = {word.split("=")[0] for word in argument.split() if "=" in word}
    words = [w for w in command.split(" ") if w.split("=")[0] not in keys]
    return f"{' '.join(words)} {argument}".strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cohort")
    parser.add_argument("--list", action="store_true", help="print the commands with their rules, run nothing")
    parser.add_argument("--only", default="", help="run the commands that contain this text")
    options = parser.parse_args()
    failures, used, skipped = [*broken_links(), *unknown_keys(options.cohort)], set(), []
    with tempfile.TemporaryDirectory() as folder:
        sandbox = None if options.list else Sandbox(Path(options.cohort).resolve(), Path(folder))
        for page, line, command in commands():
            place = f"{page}:{line}: {command}"
            rule = next((r for r in RULES if re.match(r[0], command)), None)
            if rule is None:
                failures.append(f"{place}\n    no rule: add one to RULES of {Path(__file__).name}")
                continue
            used.add(rule[0])
            _, action, argument = rule
            if options.list or options.only not in command:
                print(f"{place}\n    {action}: {argument}")
                continue
            if error := sandbox.check_names(command):
                failures.append(f"{place}\n    {error}")
            elif action == "other":
                skipped.append(f"{place} ({argument})")
            elif not sandbox.model and re.search(r"\b(DIR|gsm8k_\w+|assistant|raw_text|my-\w+)\b", command):
                skipped.append(f"{place} (no model: {DATA}/models/stories260K)")
            else:
                start, text = time.monotonic(), shortened(command, action, argument)
                output, error = sandbox.shell(text)
                missing = [w for part, w in OUTPUT.items() if part in command and w not in output]
                if missing and not error:
                    error = f"the output lacks {missing[0]!r}: {output[-800:]}"
                print(f"{time.monotonic() - start:6.1f} s  {page}:{line}: {text}", flush=True)
                if error:
                    failures.append(f"{place}\n    ran: {text}\n    {error}")
        failures += [f"rule without a command: {pattern}" for pattern, *_ in RULES if pattern not in used]
    if sandbox and not sandbox.model and "data" in os.environ.get("COHORT_REQUIRE", "").split(","):
        failures.append(f"COHORT_REQUIRE has data, and there is no {DATA}/models/stories260K")
    print("\n".join(["not run:", *skipped]) if skipped else "")
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()

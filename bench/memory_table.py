#!/usr/bin/env python3
"""Prints the tables of docs/cards.md, models by cards, from what `cohort check --gpu` says of the shapes of models on the
Hugging Face hub. Needs neither a GPU nor the models.

  python3 bench/memory_table.py [COHORT] [--scaling] [--only MODEL] [--check PAGE]     COHORT: by default build/cpu/cohort

--scaling: the table of docs/scaling.md, models by several cards.
--check: prints nothing, and fails if PAGE lacks a line of the tables.
"""
import argparse
import concurrent.futures
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# name: layers, width, heads, key/value heads, head width, MLP width, vocabulary, tied head, qk_norm
MODELS = {
    "SmolLM2-135M": (30, 576, 9, 3, 64, 1536, 49152, True, False),
    "SmolLM2-360M": (32, 960, 15, 5, 64, 2560, 49152, True, False),
    "Qwen2.5-0.5B": (24, 896, 14, 2, 64, 4864, 151936, True, False),
    "Qwen3-0.6B": (28, 1024, 16, 8, 128, 3072, 151936, True, True),
    "Llama-3.2-1B": (16, 2048, 32, 8, 64, 8192, 128256, True, False),
    "Qwen2.5-1.5B": (28, 1536, 12, 2, 128, 8960, 151936, True, False),
    "Qwen3-1.7B": (28, 2048, 16, 8, 128, 6144, 151936, True, True),
    "SmolLM3-3B": (36, 2048, 16, 4, 128, 11008, 128256, True, False),
    "Qwen2.5-7B": (28, 3584, 28, 4, 128, 18944, 152064, False, False),
    "Llama-3.1-8B": (32, 4096, 32, 8, 128, 14336, 128256, False, False),
}
LARGE = {
    "Llama-3.1-8B": MODELS["Llama-3.1-8B"],
    "Qwen3-14B": (40, 5120, 40, 8, 128, 17408, 151936, False, True),
    "Qwen2.5-32B": (64, 5120, 40, 8, 128, 27648, 152064, False, False),
}
SHARDINGS = ("none", "optimizer", "gradients", "full")
SCALED_STEP = ("prompts_per_step=64", "num_generations=8", "max_completion_length=256", "micro_batch_tokens=4096",
               "model.recompute=cheap", "optimizer.moments=bf16", "optimizer.place=device")
CARDS = {12: "rtx3060", 16: "rtx4060ti", 24: "rtx4090", 48: "l40s", 80: "h100", 141: "h200"}
TABLES = ("Inference", "SFT", "GRPO")


def write_tokenizer(folder, size):
    """A byte-level vocabulary of `size` tokens in GPT-2's format, most of them unused."""
    letters = [chr(c) for c in range(33, 127)] + [chr(c) for c in range(161, 173)] + [chr(c) for c in range(174, 256)]
    tokens = letters + [chr(256 + i) for i in range(256 - len(letters))]
    tokens += [f"unused{i}" for i in range(size - 257)] + ["<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")


def write_stage(folder, shape, trainer):
    """A configuration of the trainer; the other one's is beside it."""
    layers, width, heads, kv_heads, head_dim, d_ff, vocabulary, tied, qk_norm = shape
    (folder / f"{trainer}.yaml").write_text(
        f"trainer: {trainer}\nprompts_per_step: 8\nnum_generations: 8\nbatch_size: 16\nmicro_batch_tokens: auto\n"
        f"max_completion_length: 1024\nmodel: {{num_layers: {layers}, d_model: {width}, num_heads: {heads}, num_kv_heads: "
        f"{kv_heads}, head_dim: {head_dim}, d_ff: {d_ff}, context: 1536, tie_embeddings: {tied}, qk_norm: {qk_norm}}}\n"
        "data: {tokenizer_path: ., jsonl: {path: data.jsonl}}\nrewards: [{name: exact_match}]\n")


def check(cohort, config, gpu, *more):
    """The rows of `cohort check`, by name. Exit code 2 with a verdict says that the stage does not fit."""
    run = subprocess.run([cohort, "check", config, "--gpu", gpu, *more], capture_output=True, text=True)
    rows = dict(re.findall(r"(?m)^  (\S.*?)  +(\S.*)$", run.stdout.replace(f" on {gpu} ", f" on {gpu}   ")))
    if run.returncode not in (0, 2) or f"runs on {gpu}" not in rows:
        sys.exit(run.stdout + run.stderr)
    return rows | {"error": run.stderr}


def training(rows, gpu):
    """"8,192 block, bf16, host": tokens of a micro batch, recomputation, moments of AdamW, its place, or lora where only
    adapters train, with the base's format; a dash: it does not fit."""
    verdict = rows[f"runs on {gpu}"]
    if not (tokens := re.search(r"micro_batch_tokens\W+(\d+)", verdict)):
        return "-"
    words = [f"{int(tokens[1]):,}"]
    if (recompute := re.search(r"recompute\W+(\w+)", verdict)) and recompute[1] != "none":
        words.append(recompute[1])
    notes = [", bf16"] if re.search(r"moments\W+bf16", verdict) else []
    notes += [", host"] if re.search(r"place\W+(host|auto)", verdict) else []
    notes += [", lora"] if "lora.rank" in verdict else []
    notes += [f", {base[1]}"] if (base := re.search(r"precision\.base=(\w+)", verdict)) else []
    return " ".join(words) + "".join(notes)


def inference(rows, gpu):
    """Thousands of tokens in the cache; a dash: the model does not fit."""
    cache = re.search(r"a cache of (\d+) tokens", rows[f"inference on {gpu}"])
    return f"{int(cache[1]) // 1000:,}k" if cache else "-"


def write_problems(folder, prompt, answer):
    (folder / "data.jsonl").write_text("".join(
        json.dumps({"prompt": f"{i:03d} " + "x" * (prompt - 4), "answer": "y" * answer}) + "\n" for i in range(100)))


def scaled(rows, gpu):
    """"59.5, 8.1 s": GB of an update, seconds of a step; "(72.3)" if the GPU has less; a dash: nothing is known to fit."""
    if rows[f"runs on {gpu}"].startswith("yes"):
        parts = ("parameters", "gradients", "optimizer", "activations", "workspace")
        need = sum(float(rows[f"memory: {part}"].split()[0]) for part in parts)
        if blocks := rows.get("memory: weights of blocks"):  # held, less those whose memory is used
            held, whole = re.findall(r"([\d.]+) MiB", blocks)
            need += float(held) - float(whole)
        return f"{need * 2**20 / 1e9:.1f}, {float(rows['forecast: step'].split()[0]):.1f} s"
    need = re.search(r"needs ([\d.]+) MiB as configured", rows["error"])
    return f"({float(need[1]) * 2**20 / 1e9:.1f})" if need else "-"


def scaling_rows(cohort, name, shape):
    """The model's lines in the table of docs/scaling.md."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        write_tokenizer(folder, shape[6])
        write_problems(folder, 128, 100)
        write_stage(folder, shape, "grpo")
        lines = []
        for gpus, gpu in ((n, gpu) for n in (2, 4, 8) for gpu in ("h100", "h200")):
            cells = [scaled(check(cohort, folder / "grpo.yaml", gpu, "--gpus", str(gpus), *SCALED_STEP, f"sharding={kind}"),
                            gpu) for kind in SHARDINGS]
            lines.append("| " + " | ".join([f"{name}, {gpus} x {gpu}", *cells]) + " |")
        return lines


def model_rows(cohort, name, shape):
    """The model's line in each of the tables."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        write_tokenizer(folder, shape[6])
        write_problems(folder, 512, 1023)
        cells = {title: [] for title in TABLES}
        for trainer in ("sft", "grpo"):
            write_stage(folder, shape, trainer)
            for gpu in CARDS.values():
                rows = check(cohort, folder / f"{trainer}.yaml", gpu)
                cells[trainer.upper()].append(training(rows, gpu))
                if trainer == "sft":
                    cells["Inference"].append(inference(rows, gpu))
        label = f"{name}, {int(rows['parameters']) / 1e6:,.0f}M"
        return {title: "| " + " | ".join([label, *row]) + " |" for title, row in cells.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cohort", nargs="?", default="build/cpu/cohort")
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--only", choices=MODELS | LARGE)
    parser.add_argument("--check", type=Path)
    options = parser.parse_args()
    models = LARGE if options.scaling else MODELS
    shapes = {name: shape for name, shape in models.items() if options.only in (None, name)}
    make_rows = scaling_rows if options.scaling else model_rows
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(lambda item: make_rows(options.cohort, *item), shapes.items()))
    if options.scaling:
        lines = ["| | " + " | ".join(SHARDINGS) + " |", "|---" * (len(SHARDINGS) + 1) + "|", *sum(rows, [])]
    else:
        header = "| model | " + " | ".join(f"{card} GB: {gpu}" for card, gpu in CARDS.items()) + " |"
        lines = []
        for title in TABLES:
            lines += [f"### {title}", "", header, "|---" * (len(CARDS) + 1) + "|", *(row[title] for row in rows), ""]
    if not options.check:
        return print("\n".join(lines))
    page = options.check.read_text(encoding="utf-8")
    if missing := [line for line in lines if line + "\n" not in page]:
        sys.exit("\n".join([f"{options.check} lacks:", *missing]))


if __name__ == "__main__":
    main()

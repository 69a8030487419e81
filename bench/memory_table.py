#!/usr/bin/env python3
"""Prints the table of models by cards in README.md: the peak memory per GPU that `cohort check` estimates for the shapes of
models on the Hugging Face hub, in bf16. Needs neither a GPU nor the models.

  python3 bench/memory_table.py [COHORT] [--only MODEL]        COHORT: the command, by default build/cpu/cohort
"""
import argparse
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
CARDS = (8, 12, 16, 24, 48, 80, 141)
# Micro batches of one sequence of 1,536 tokens, recomputation, bf16 moments and few concurrent sequences.
LEAST = {"micro_batch_tokens": 2048, "model.recompute": "block", "optimizer.moments": "bf16", "max_concurrent": 8}
DEFAULT = {"micro_batch_tokens": 8192}


def write_tokenizer(folder, size):
    """A byte-level vocabulary of `size` tokens in GPT-2's format, most of them unused."""
    letters = [chr(c) for c in range(33, 127)] + [chr(c) for c in range(161, 173)] + [chr(c) for c in range(174, 256)]
    tokens = letters + [chr(256 + i) for i in range(256 - len(letters))]
    tokens += [f"unused{i}" for i in range(size - 257)] + ["<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")


def peak(cohort, folder, shape, trainer, settings):
    """Parameters, and the estimate in bytes."""
    layers, width, heads, kv_heads, head_dim, d_ff, vocabulary, tied, qk_norm = shape
    write_tokenizer(folder, vocabulary)
    (folder / "data.jsonl").write_text("".join(
        json.dumps({"prompt": f"{i:03d} " + "x" * 508, "answer": "y" * 1023}) + "\n" for i in range(100)))
    (folder / "config.yaml").write_text(
        f"trainer: {trainer}\ndevice: cuda\ndtype: bf16\nprompts_per_step: 8\nnum_generations: 8\nbatch_size: 16\n"
        f"max_completion_length: 1024\nmodel: {{num_layers: {layers}, d_model: {width}, num_heads: {heads}, num_kv_heads: "
        f"{kv_heads}, head_dim: {head_dim}, d_ff: {d_ff}, context: 1536, tie_embeddings: {tied}, qk_norm: {qk_norm}}}\n"
        "data: {tokenizer_path: ., jsonl: {path: data.jsonl}}\nrewards: [{name: exact_match}]\n")
    run = subprocess.run([cohort, "check", folder / "config.yaml"] + [f"{k}={v}" for k, v in settings.items()],
                         capture_output=True, text=True)
    if not (found := re.search(r"peak per rank +([\d.]+) MiB", run.stdout)):
        sys.exit(run.stdout + run.stderr)
    return int(re.search(r"parameters +(\d+)", run.stdout)[1]), float(found[1]) * 2**20


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cohort", nargs="?", default="build/cpu/cohort")
    parser.add_argument("--only", choices=MODELS)
    options = parser.parse_args()
    cohort = options.cohort
    print("| model | parameters | SFT, GRPO by default | SFT, least | GRPO, least | smallest card |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in MODELS.items():
            if options.only not in (None, name):
                continue
            values = [peak(cohort, Path(folder), shape, trainer, settings)
                      for settings in (DEFAULT, LEAST) for trainer in ("sft", "grpo")]
            bytes_ = [max(values[0][1], values[1][1]), values[2][1], values[3][1]]
            # CUDA's context, libraries and fragmentation take some memory as well: 1 GB is left for them. Cards have
            # about as many GiB as their name says; GB are counted here.
            card = next((f"{c} GB" for c in CARDS if bytes_[2] / 1e9 + 1 <= c), "more than one")
            cells = [name, f"{values[0][0] / 1e6:,.0f}M", *(f"{b / 1e9:.1f} GB" for b in bytes_), card]
            print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

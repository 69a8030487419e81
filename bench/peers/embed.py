#!/usr/bin/env python3
"""Compares `cohort embed` with sentence-transformers (with transformers and its steps, if it is not installed) on texts of a JSONL
file, which are repeated in other orders until there are enough: texts/s, and the largest difference of the embeddings.

  python3 bench/peers/embed.py MODEL TEXTS.jsonl [--field text] [--texts 10000] [--batch 32] [--dtype f32] [--rounds 3]
  OMP_NUM_THREADS=1 python3 bench/peers/embed.py MODEL TEXTS.jsonl --device cpu --texts 500 --program build/cpu/cohort

A round is our process, the same process with one text, and the peer. The peer's time is that of encode() after a first batch, ours
that of the whole process less that with one text, which is the start and the loading. With --device cpu taskset gives both one core.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent.parent


def make_texts(path, field, count):
    lines = [line for line in Path(path).read_text().splitlines() if line]
    texts = [" ".join(json.loads(line)[field].split()) for line in lines]
    texts = [text for text in texts if text]
    rng, out = random.Random(1), list(texts)
    while len(out) < count:  # words in another order: no two texts are the same
        for text in texts:
            words = text.split()
            rng.shuffle(words)
            out.append(" ".join(words))
    return out[:count]


class Transformers:
    """SentenceTransformer.encode() of a model with mean pooling and normalisation: batches by length, padded to the longest."""

    def __init__(self, folder, device, dtype):
        from transformers import AutoModel, AutoTokenizer
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder, dtype=dtype).eval().to(device)
        settings = Path(folder, "sentence_bert_config.json")
        self.limit = json.loads(settings.read_text())["max_seq_length"] if settings.exists() else 256

    @torch.inference_mode()
    def encode(self, texts, batch_size):
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        out = [None] * len(texts)
        for begin in range(0, len(texts), batch_size):
            part = order[begin : begin + batch_size]
            inputs = self.tokenizer([texts[i] for i in part], padding=True, truncation=True, max_length=self.limit,
                                    return_tensors="pt").to(self.model.device)
            hidden = self.model(**inputs).last_hidden_state
            mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
            vectors = torch.nn.functional.normalize(pooled, dim=1).float().cpu().numpy()
            for i, vector in zip(part, vectors):
                out[i] = vector
        return np.stack(out)


def make_peer(args):
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        model = Transformers(args.model, args.device, dtype)
        return "transformers", lambda texts: model.encode(texts, args.batch)
    model = SentenceTransformer(args.model, device=args.device, model_kwargs={"torch_dtype": dtype})
    return "sentence-transformers", lambda texts: model.encode(
        texts, batch_size=args.batch, normalize_embeddings=True, show_progress_bar=False).astype(np.float32)


def run_ours(args, texts, folder):
    """Seconds of the process, and the embeddings."""
    output = Path(folder, "ours.npy")
    command = [args.program, "embed", args.model, "--device", args.device, "--dtype", args.dtype, "--output", str(output)]
    begin = time.perf_counter()
    done = subprocess.run(command, input="".join(text + "\n" for text in texts), capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return seconds, np.load(output)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("jsonl")
    parser.add_argument("--field", default="text")
    parser.add_argument("--texts", type=int, default=10000)
    parser.add_argument("--batch", type=int, default=32, help="of the peer; sentence-transformers' default is 32")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--program", default=str(ROOT / "build/cuda/cohort"))
    args = parser.parse_args()
    if args.device == "cpu":
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        torch.set_num_threads(1)
    texts = make_texts(args.jsonl, args.field, args.texts)
    name, encode = make_peer(args)
    encode(texts[: args.batch])
    ours, starts, theirs = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            seconds, vectors = run_ours(args, texts, folder)
            ours.append(seconds)
            starts.append(run_ours(args, texts[:1], folder)[0])
            begin = time.perf_counter()
            expected = encode(texts)
            theirs.append(time.perf_counter() - begin)
    whole, start, peer = map(statistics.median, (ours, starts, theirs))
    words = sum(len(text.split()) for text in texts) / len(texts)
    print(f"{len(texts)} texts of {words:.1f} words, {args.device}, {args.dtype}")
    print(f"cohort embed            {len(texts) / (whole - start):10.0f} texts/s  ({whole:.2f} s, with one text {start:.2f} s)")
    print(f"{name:24s}{len(texts) / peer:10.0f} texts/s  ({peer:.2f} s in batches of {args.batch})")
    print(f"ratio                   {peer / (whole - start):10.2f}x, of whole processes at least {peer / whole:.2f}x")
    print(f"largest difference      {np.abs(vectors - expected).max():.2e}, smallest cosine {(vectors * expected).sum(1).min():.6f}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Prints images/s of the forward pass of vision transformers, ours and those of transformers (bf16, SDPA, eager and compiled), as
Open-ViT-bench tables them: Ti, S, B and L at 224 pixels in patches of 16. Ours, eager and compiled alternate in rounds.

  bench/vit_table.py [--sizes Ti,S,B,L] [--batches 1,8,64,256] [--rounds 2] [--program build/cuda/bench/cohort_bench_step]
  bench/vit_table.py --device cpu --sizes tiny --batches 1,2 --program build/cpu/bench/cohort_bench_step     to try it

Rows are printed as they are made; medians of the rounds. Compiling L takes about a minute a batch size: --no-compile leaves it out.
"""
import argparse
import re
import statistics
import subprocess
import time
from pathlib import Path

import torch
from transformers import ViTConfig, ViTForImageClassification

ROOT = Path(__file__).resolve().parent.parent
SIZES = {  # layers, width, heads, image, patch
    "Ti": (12, 192, 3, 224, 16),
    "S": (12, 384, 6, 224, 16),
    "B": (12, 768, 12, 224, 16),
    "L": (24, 1024, 16, 224, 16),
    "tiny": (2, 32, 2, 32, 8),
}
CLASSES = 1000


def ours(args, size, batch):
    layers, width, heads, image, patch = SIZES[size]
    command = [args.program, ROOT / "bench/configs/vit_b16.yaml", "--forward", "--no-ops", "--classes", CLASSES,
               f"device={args.device}", f"dtype={args.dtype}", f"batch_size={batch}", f"model.num_layers={layers}",
               f"model.d_model={width}", f"model.num_heads={heads}", f"model.d_ff={4 * width}",
               f"model.image_size={image}", f"model.patch_size={patch}"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return float(re.search(r"^images/s +([\d.]+)", done.stdout, re.M)[1])


def peer(model, pixels):
    """Images/s by the median of calls, as cohort_bench_step times them: at least ten and a second."""
    times = []
    wait = torch.cuda.synchronize if pixels.is_cuda else lambda: None
    with torch.inference_mode():
        for _ in range(3):
            model(pixel_values=pixels)
        wait()
        start = time.perf_counter()
        while len(times) < 10 or time.perf_counter() - start < 1:
            begin = time.perf_counter()
            model(pixel_values=pixels).logits.argmax(-1)
            wait()
            times.append(time.perf_counter() - begin)
    return len(pixels) / statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="Ti,S,B,L")
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--program", default=str(ROOT / "build/cuda/bench/cohort_bench_step"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    args.dtype = "bf16" if args.device == "cuda" else "f32"
    torch.manual_seed(0)
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name() if args.device == 'cuda' else 'CPU'}, {args.dtype}")
    names = ["cohort", "eager"] + ([] if args.no_compile else ["compiled"])
    print(f"| ViT | batch | {' | '.join(names)} | ours by the faster |\n|{'---|' * (len(names) + 3)}", flush=True)
    for size in args.sizes.split(","):
        layers, width, heads, image, patch = SIZES[size]
        config = ViTConfig(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width,
                           image_size=image, patch_size=patch, num_labels=CLASSES, attn_implementation="sdpa")
        model = ViTForImageClassification(config).eval().to(args.device, torch.bfloat16 if args.dtype == "bf16" else None)
        for batch in map(int, args.batches.split(",")):
            pixels = torch.rand(batch, 3, image, image, device=args.device, dtype=model.dtype) * 2 - 1
            torch.compiler.reset()  # each batch size is compiled as a static shape
            runs = {"cohort": lambda: ours(args, size, batch), "eager": lambda: peer(model, pixels)}
            if not args.no_compile:
                compiled = torch.compile(model, dynamic=False)
                runs["compiled"] = lambda: peer(compiled, pixels)
            rates = {name: [] for name in names}
            for _ in range(args.rounds):
                for name in names:
                    rates[name].append(runs[name]())
                if args.device == "cuda":
                    torch.cuda.empty_cache()
            median = {name: statistics.median(values) for name, values in rates.items()}
            cells = " | ".join(f"{median[name]:,.0f}" for name in names)
            best = max(median[name] for name in names[1:])
            print(f"| {size} | {batch} | {cells} | {median['cohort'] / best:.2f} |", flush=True)


if __name__ == "__main__":
    main()

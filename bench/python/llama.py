#!/usr/bin/env python3
"""Trains a small Hugging Face Llama from the same weights on the same data: with torch's SDPA, with
cohort.torch.flash_attention registered as an attention of transformers, and with eager operations, whose difference from SDPA
shows what rounding alone does. Prints the loss curves, the largest differences from SDPA's, and the median time of a step.
Weights are random, and the data is a text of repeated phrases, so nothing is downloaded.

  bench/python/llama.py [--steps 50] [--device cpu] [--json FILE]
"""
import argparse
import json
import statistics
import time

import cohort.torch as ct
import torch
import transformers

LEARNING_RATE = 3e-4


def cohort_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
    """An attention of transformers: query [B, H, T, D], key and value [B, Hkv, T, D] -> [B, T, H, D], and no weights."""
    if attention_mask is not None or dropout:
        raise ValueError("cohort_attention: expected a causal mask without padding, and no dropout")
    # Under autocast the rotation returns queries and keys in f32.
    q, k, v = (x.transpose(1, 2).to(value.dtype) for x in (query, key, value))
    return ct.flash_attention(q, k, v, scale=scaling or 0.0), None


transformers.AttentionInterface.register("cohort", cohort_attention)


def batches(steps, batch, length, vocabulary):
    """Tokens of random phrases, each repeated: predictable after its first occurrence."""
    generator = torch.Generator().manual_seed(2)
    phrases = torch.randint(vocabulary, (64, 16), generator=generator)
    for _ in range(steps):
        yield phrases[torch.randint(64, (batch, length // 16), generator=generator)].flatten(1)


def train(attention, options, device):
    small = device == "cpu"
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64 if small else 512, intermediate_size=128 if small else 1536,
        num_hidden_layers=2 if small else 8, num_attention_heads=4 if small else 8, num_key_value_heads=2,
        max_position_embeddings=2048, attn_implementation=attention)
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batch, length = (2, 64) if small else (8, 2048)
    losses, times = [], []
    for tokens in batches(options.steps, batch, length, config.vocab_size):
        begin = time.perf_counter()
        tokens = tokens.to(device)
        # The CPU kernels take f32: bf16 is for GPUs.
        with torch.autocast(device, torch.bfloat16, enabled=not small):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - begin)
    return losses, statistics.median(times[5:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="more than 5, which the times leave out")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a tiny model, to try the script")
    parser.add_argument("--json", help="a file for the losses and times")
    options = parser.parse_args()
    if options.steps <= 5:
        parser.error("--steps: expected more than 5")
    names = ("sdpa", "cohort", "eager")
    curves, times = zip(*(train(name, options, options.device) for name in names))
    print(" step" + "".join(f"{name:>11}" for name in names))
    for step, losses in enumerate(zip(*curves)):
        print(f"{step:5}" + "".join(f"{loss:11.5f}" for loss in losses))
    differences = [max(abs(a - b) for a, b in zip(curves[0], curve)) for curve in curves]
    for name, difference, seconds in zip(names, differences, times):
        print(f"{name}: a step takes {seconds * 1e3:.1f} ms, largest difference from sdpa {difference:.2e}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({name: {"losses": curve, "difference": difference, "step_seconds": seconds}
                       for name, curve, difference, seconds in zip(names, curves, differences, times)}, file, indent=1)


if __name__ == "__main__":
    main()

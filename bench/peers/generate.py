"""The peer of cohort_bench_grpo's rollouts: transformers' generate (5.17, PyTorch 2.11) on Qwen2.5-0.5B's shape with random
weights, in bf16 with SDPA, at temperature 1 and without a stop token. Prints one line per workload, like the C++ benchmark:
seconds including the prompts, and requested tokens over seconds. Prompts of unequal lengths are padded on the left, and all
sequences run to the longest. Each workload runs once to warm up and once to be measured.

  python3 bench/peers/generate.py                                    decode/1 decode/64 groups
  python3 bench/peers/generate.py --only decode/256 mixed uniform    names or prefixes of workloads
"""
import argparse
import random
import time

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

# bench/configs/qwen2_0_5b.yaml
SHAPE = dict(vocab_size=151936, hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
             intermediate_size=4864, max_position_embeddings=9216, rms_norm_eps=1e-6, tie_word_embeddings=True,
             rope_parameters={"rope_type": "default", "rope_theta": 1e6})
DEFAULT = ("decode/1", "decode/64", "groups")


def workloads():
    """Prompts and completions by name: tokens of each, and completions of a prompt."""
    for rows in (1, 64, 256):
        yield f"decode/{rows}", [128] * rows, [512] * rows, 1
    yield "groups", [128] * 64, [256] * 64, 8
    # nano-vllm's lengths, which bench/rollout_workloads.cpp lists. "mixed" has random lengths of its own.
    rng = random.Random(0)
    prompts = []
    for _ in range(256):
        prompts.append(rng.randint(100, 1024))
        for _ in range(prompts[-1]):
            rng.randint(0, 10000)
    yield "mixed", prompts, [1124 - n for n in prompts], 1
    yield "uniform", prompts, [rng.randint(100, 1024) for _ in prompts], 1


@torch.inference_mode()
def seconds(model, prompts, new_tokens, completions):
    width, device = max(prompts), model.device
    tokens = torch.randint(model.config.vocab_size, (len(prompts), width), device=device)
    lengths = torch.tensor(prompts, device=device)
    mask = (torch.arange(width, device=device) >= width - lengths[:, None]).long()
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    out = model.generate(tokens, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, use_cache=True,
                         min_new_tokens=new_tokens, max_new_tokens=new_tokens, num_return_sequences=completions,
                         pad_token_id=0)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert out.shape == (len(prompts) * completions, width + new_tokens), out.shape
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", action="extend", help="names or prefixes of workloads")
    only = parser.parse_args().only
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE), dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to("cuda").eval()
    for name, prompts, lengths, completions in workloads():
        if not (name.startswith(tuple(only)) if only else name in DEFAULT):
            continue
        for _ in range(2):
            measured = seconds(model, prompts, max(lengths), completions)
        requested = sum(lengths) * completions
        print(f"{name:18s} seconds {measured:.6g} tokens_per_second {requested / measured:.6g}", flush=True)


if __name__ == "__main__":
    main()

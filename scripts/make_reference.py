#!/usr/bin/env python3
"""Writes tests/reference/*.safetensors: reference results of PyTorch for two tiny models in float64.

Each file contains, for a packed batch of three sequences: parameters, logits, the mean cross-entropy
with all gradients, ten losses of AdamW training, and a GRPO loss (two aggregations) with all
gradients. The metadata contain the model's config.json and the hyperparameters. The script shares
neither code nor layout with the library: sequences run one by one, attention is a dense softmax,
gradients come from torch.autograd. Needs only PyTorch 1.13 or newer.

usage: make_reference.py [OUTPUT_FOLDER]      (default: tests/reference of this source tree)
"""
import json
import math
import pathlib
import random
import struct
import sys

import torch

LLAMA = {
    "model_type": "cohort", "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 20, "max_position_embeddings": 16,
    "vocab_size": 23, "norm_type": "rms_norm", "rms_norm_eps": 1e-5, "position_type": "rope",
    "rope_theta": 500.0, "hidden_act": "swiglu", "attention_bias": False,
    "tie_word_embeddings": False, "qk_norm": True, "dropout": 0.0, "initializer_range": 0.3,
}
GPT2 = dict(
    LLAMA, hidden_size=10, num_attention_heads=2, num_key_value_heads=2, head_dim=5,
    intermediate_size=24, vocab_size=19, norm_type="layer_norm", position_type="learned",
    hidden_act="gelu_tanh", attention_bias=True, tie_word_embeddings=True, qk_norm=False)
ADAMW = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "steps": 10}
GRPO = {"temperature": 0.9, "epsilon_low": 0.2, "epsilon_high": 0.28, "beta": 0.04}
LENGTHS = [7, 1, 9]  # the sequence of one token attends only to itself


def write_safetensors(path, tensors, metadata):
    """u64 header length, JSON header padded with spaces to 8 bytes, little-endian data."""
    names = {torch.float64: "F64", torch.int32: "I32", torch.int64: "I64"}
    header, blobs, offset = {"__metadata__": metadata}, [], 0
    for name, tensor in tensors.items():
        blob = tensor.detach().contiguous().numpy().tobytes()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + len(blob)]}
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def make_parameters(config, rng):
    """Every parameter under its Hugging Face name, in the library's order."""
    c, params = config, {}
    d, head_dim = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim

    def add(name, shape, mean=0.0, std=c["initializer_range"]):
        values = [rng.gauss(mean, std) for _ in range(math.prod(shape))]
        params[name] = torch.tensor(values, dtype=torch.float64).reshape(shape).requires_grad_()

    def linear(name, out, inputs):
        add(name + ".weight", (out, inputs))
        if c["attention_bias"]:
            add(name + ".bias", (out,), std=0.1)

    def norm(name, size, bias=c["norm_type"] == "layer_norm" and c["attention_bias"]):
        add(name + ".weight", (size,), mean=1.0, std=0.1)
        if bias:
            add(name + ".bias", (size,), std=0.1)

    add("model.embed_tokens.weight", (c["vocab_size"], d))
    if c["position_type"] == "learned":
        add("model.embed_positions.weight", (c["max_position_embeddings"], d))
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        norm(p + "input_layernorm", d)
        linear(p + "self_attn.q_proj", q, d)
        linear(p + "self_attn.k_proj", kv, d)
        linear(p + "self_attn.v_proj", kv, d)
        linear(p + "self_attn.o_proj", d, q)
        if c["qk_norm"]:
            norm(p + "self_attn.q_norm", head_dim, bias=False)
            norm(p + "self_attn.k_norm", head_dim, bias=False)
        norm(p + "post_attention_layernorm", d)
        if c["hidden_act"] == "swiglu":
            linear(p + "mlp.gate_proj", c["intermediate_size"], d)
        linear(p + "mlp.up_proj", c["intermediate_size"], d)
        linear(p + "mlp.down_proj", d, c["intermediate_size"])
    norm("model.norm", d)
    if not c["tie_word_embeddings"]:
        add("lm_head.weight", (c["vocab_size"], d))
    return params


def rms_norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x, positions, theta):
    """x: [T, H, D]; rotates pairs (i, i + D/2) by position theta^(-2i/D)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) * 2 / x.shape[-1])
    angle = positions.double()[:, None, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def logits_of_sequence(config, params, tokens):
    """[T, V] for one sequence of token ids."""
    c, T = config, len(tokens)
    positions = torch.arange(T)

    def linear(x, name):
        return x @ params[name + ".weight"].T + params.get(name + ".bias", 0.0)

    def norm(x, name):
        weight, eps = params[name + ".weight"], c["rms_norm_eps"]
        if c["norm_type"] == "rms_norm":
            return rms_norm(x, weight, eps)
        centred = x - x.mean(-1, keepdim=True)
        variance = (centred * centred).mean(-1, keepdim=True)
        return centred / torch.sqrt(variance + eps) * weight + params.get(name + ".bias", 0.0)

    def attention(x, prefix):
        heads, kv_heads, D = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        q = linear(x, prefix + "q_proj").reshape(T, heads, D)
        k = linear(x, prefix + "k_proj").reshape(T, kv_heads, D)
        v = linear(x, prefix + "v_proj").reshape(T, kv_heads, D)
        if c["qk_norm"]:
            q = rms_norm(q, params[prefix + "q_norm.weight"], c["rms_norm_eps"])
            k = rms_norm(k, params[prefix + "k_norm.weight"], c["rms_norm_eps"])
        if c["position_type"] == "rope":
            q = rotate(q, positions, c["rope_theta"])
            k = rotate(k, positions, c["rope_theta"])
        future = torch.ones(T, T).triu(1).bool()
        out = []
        for h in range(heads):
            shared = h // (heads // kv_heads)
            scores = q[:, h] @ k[:, shared].T / math.sqrt(D)
            out.append(torch.softmax(scores.masked_fill(future, -math.inf), -1) @ v[:, shared])
        return linear(torch.cat(out, -1), prefix + "o_proj")

    def mlp(x, prefix):
        up = linear(x, prefix + "up_proj")
        if c["hidden_act"] == "swiglu":
            gate = linear(x, prefix + "gate_proj")
            return linear(gate * torch.sigmoid(gate) * up, prefix + "down_proj")
        inner = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
        return linear(0.5 * up * (1 + torch.tanh(inner)), prefix + "down_proj")

    x = params["model.embed_tokens.weight"][tokens.long()]
    if c["position_type"] == "learned":
        x = x + params["model.embed_positions.weight"][:T]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        x = x + attention(norm(x, p + "input_layernorm"), p + "self_attn.")
        x = x + mlp(norm(x, p + "post_attention_layernorm"), p + "mlp.")
    head = params.get("lm_head.weight", params["model.embed_tokens.weight"])
    return norm(x, "model.norm") @ head.T


def make_batch(config, rng):
    """Packed tokens; the targets of prompt tokens are -1."""
    vocab = config["vocab_size"]
    tokens = [rng.randrange(vocab) for _ in range(sum(LENGTHS))]
    targets = [rng.randrange(vocab) for _ in range(sum(LENGTHS))]
    for t in (0, 1, 8, 9):  # the first tokens of the two longer sequences are prompts
        targets[t] = -1
    positions = [p for n in LENGTHS for p in range(n)]
    sequences = [s for s, n in enumerate(LENGTHS) for _ in range(n)]
    starts = [sum(LENGTHS[:s]) for s in range(len(LENGTHS) + 1)]
    i32 = lambda values: torch.tensor(values, dtype=torch.int32)
    return {"tokens": i32(tokens), "targets": i32(targets), "positions": i32(positions),
            "sequences": torch.tensor(sequences), "cu_seqlens": i32(starts)}


def packed_logits(config, params, batch):
    parts = batch["tokens"].split(LENGTHS)
    return torch.cat([logits_of_sequence(config, params, part) for part in parts])


def chosen_log_probs(logits, targets):
    loss_mask = targets >= 0
    log_probs = torch.log_softmax(logits, -1)
    return log_probs.gather(1, targets.clamp(min=0).long()[:, None])[:, 0] * loss_mask, loss_mask


def cross_entropy(config, params, batch):
    log_probs, loss_mask = chosen_log_probs(packed_logits(config, params, batch), batch["targets"])
    return -log_probs.sum() / loss_mask.sum()


def gradients(loss, params):
    """Gradients of the loss; zeros for parameters that it does not depend on."""
    grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g
            for (n, p), g in zip(params.items(), grads)}


def adamw_losses(config, start, batch):
    """The loss before each step; weight decay applies to matrices only, not to norms and biases."""
    params = {n: p.detach().clone().requires_grad_() for n, p in start.items()}
    groups = [{"params": [p for p in params.values() if p.dim() > 1],
               "weight_decay": ADAMW["weight_decay"]},
              {"params": [p for p in params.values() if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=ADAMW["lr"], eps=ADAMW["eps"],
                                  betas=(ADAMW["beta1"], ADAMW["beta2"]))
    losses = []
    for _ in range(ADAMW["steps"]):
        optimizer.zero_grad()
        loss = cross_entropy(config, params, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def grpo_inputs(config, params, batch, rng):
    """Old and reference log-probs near the current ones, so that some tokens clip on each side."""
    logits = packed_logits(config, params, batch) / GRPO["temperature"]
    log_probs, loss_mask = chosen_log_probs(logits.detach(), batch["targets"])
    near = lambda std: torch.tensor([v + rng.gauss(0, std) for v in log_probs.tolist()],
                                    dtype=torch.float64) * loss_mask
    old, reference = near(0.4), near(0.3)
    per_sequence = [0.8, -1.3, -0.5]
    advantage = torch.tensor([per_sequence[s] for s in batch["sequences"].tolist()],
                             dtype=torch.float64)
    counts = [int(part.sum()) for part in loss_mask.split(LENGTHS)]
    per_token = torch.tensor([1 / counts[s] for s in batch["sequences"].tolist()],
                             dtype=torch.float64)
    weights = {"dapo": loss_mask / loss_mask.sum().double(),  # equal weight per token
               "grpo": loss_mask * per_token / len(LENGTHS)}  # equal weight per sequence
    return old, reference, advantage, weights


def grpo_loss(config, params, batch, old, reference, advantage, weight):
    logits = packed_logits(config, params, batch) / GRPO["temperature"]
    log_probs, loss_mask = chosen_log_probs(logits, batch["targets"])
    ratio = torch.exp(log_probs - old)
    low, high = 1 - GRPO["epsilon_low"], 1 + GRPO["epsilon_high"]
    kinks = torch.minimum((ratio - low).abs(), (ratio - high).abs())[loss_mask]
    assert kinks.min() > 1e-3, "a ratio is at a clipping bound: use another seed"
    for side in (ratio < low, ratio > high):
        assert (side & loss_mask & (advantage > 0)).any() and (side & loss_mask & (advantage < 0)).any()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    difference = reference - log_probs
    k3 = torch.exp(difference) - difference - 1
    return ((GRPO["beta"] * k3 - surrogate) * weight).sum()


def make_model(config, seed):
    rng = random.Random(seed)
    params, batch = make_parameters(config, rng), make_batch(config, rng)
    tensors = {f"param.{n}": p for n, p in params.items()}
    tensors.update({f"batch.{n}": t for n, t in batch.items()})
    tensors["logits"] = packed_logits(config, params, batch)
    loss = cross_entropy(config, params, batch)
    tensors["loss"] = loss.reshape(1)
    tensors.update({f"grad.{n}": g for n, g in gradients(loss, params).items()})
    tensors["adamw.losses"] = adamw_losses(config, params, batch)
    old, reference, advantage, weights = grpo_inputs(config, params, batch, rng)
    tensors.update({"grpo.old_logprob": old, "grpo.ref_logprob": reference,
                    "grpo.advantage": advantage})
    for kind, weight in weights.items():
        loss = grpo_loss(config, params, batch, old, reference, advantage, weight)
        tensors.update({f"grpo.{kind}.weight": weight, f"grpo.{kind}.loss": loss.reshape(1)})
        tensors.update({f"grpo.{kind}.grad.{n}": g for n, g in gradients(loss, params).items()})
    metadata = {"config": json.dumps(config), "adamw": json.dumps(ADAMW), "grpo": json.dumps(GRPO)}
    return tensors, metadata


def main():
    default = pathlib.Path(__file__).resolve().parent.parent / "tests" / "reference"
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
    folder.mkdir(parents=True, exist_ok=True)
    for name, config, seed in (("llama", LLAMA, 1), ("gpt2", GPT2, 2)):
        path = folder / f"{name}.safetensors"
        tensors, metadata = make_model(config, seed)
        write_safetensors(path, tensors, metadata)
        print(f"{path}: {len(tensors)} tensors, {path.stat().st_size} bytes, "
              f"loss {tensors['loss'].item():.6f} -> {tensors['adamw.losses'][-1].item():.6f}")


if __name__ == "__main__":
    main()

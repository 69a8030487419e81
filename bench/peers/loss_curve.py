"""Compares loss curves of Cohort and PyTorch: runs of `cohort train` on text against PyTorch runs from the same weights on
the same data, in f32 and in bf16 autocast over f32 weights. Prints, for each run, the RMS distance from the losses of
PyTorch in f32 over steps 200 and later, of Cohort and of PyTorch in bf16; then the medians over the runs.

  for seed in 1 2 3; do
    build/cuda/cohort train configs/shakespeare_char_gpu.yaml data.text=input.txt steps=1000 model.dropout=0 log_every=1 \\
      checkpoint.keep_last=9 seed=$seed output_dir=curve-$seed
  done
  python3 bench/peers/loss_curve.py curve-1 curve-2 curve-3

The runs must use a character model with layer norms, learned positions and GELU, as in that configuration, on one GPU.
On the CPU (device: cpu) PyTorch runs in f32 only.
"""
import json
import math
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file

FIRST_STEP = 200
WORD = (1 << 64) - 1


def philox(seed, stream, index):
    """Philox4x32-10, as core/rng.h."""
    c = [index & 0xFFFFFFFF, index >> 32, stream & 0xFFFFFFFF, stream >> 32]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def rng_stream(*words):
    x = 0
    for word in words:
        x = ((x ^ word) + 0x9E3779B97F4A7C15) & WORD
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
        x ^= x >> 31
    return x


def window_begin(size, window, seed, i):
    """random_window() of data/loader.cpp."""
    w = philox(seed, rng_stream(2, i, 1), 0)
    return ((w[0] << 32 | w[1]) * (size - window + 1)) >> 64


class Run:
    """The output directory of `cohort train`."""

    def __init__(self, path):
        self.path = Path(path)
        self.config = yaml.safe_load((self.path / "config.yaml").read_text())["stages"][0]
        for key in ("learning_rate", "min_learning_rate", "adam_eps"):
            self.config[key] = float(self.config[key])  # YAML 1.1 parses 1e-08 as a string
        self.config["model"]["norm_eps"] = float(self.config["model"]["norm_eps"])
        start = self.path / "checkpoints/step-00000000"
        self.weights = load_file(start / "model.safetensors")
        characters = json.loads((start / "tokenizer.json").read_text())["characters"]
        ids = {c: i for i, c in enumerate(characters)}
        path = self.config["data"]["text"]
        text = Path(path if isinstance(path, str) else path[0]).read_bytes()
        train_bytes = math.floor(len(text) * (1 - self.config["data"]["held_out_fraction"]))
        self.tokens = torch.tensor([ids[c] for c in text[:train_bytes].decode()])
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        self.losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]

    def batch(self, step):
        size, context = self.config["batch_size"], self.config["model"]["context"]
        begins = [window_begin(len(self.tokens), context + 1, self.config["seed"], step * size + i) for i in range(size)]
        return torch.stack([self.tokens[b:b + context + 1] for b in begins])

    def learning_rate(self, step):
        c = self.config
        peak, last, warmup = c["learning_rate"], c["min_learning_rate"], c["warmup_steps"]
        if step < warmup:
            return peak * (step + 1) / (warmup + 1)
        progress = (step - warmup) / (c["steps"] - warmup)
        return last + (peak - last) * 0.5 * (1 + math.cos(math.pi * progress))


def forward(w, run, x):
    """The logits of tokens x [B, T]."""
    c = run.config["model"]
    hidden = w["model.embed_tokens.weight"][x] + w["model.embed_positions.weight"][:x.shape[1]]
    norm = lambda x, name: F.layer_norm(x, x.shape[-1:], w[name + ".weight"], w.get(name + ".bias"), c["norm_eps"])
    linear = lambda x, name: F.linear(x, w[name + ".weight"], w.get(name + ".bias"))
    for i in range(c["num_layers"]):
        layer = f"model.layers.{i}."
        y = norm(hidden, layer + "input_layernorm")
        q, k, v = (linear(y, f"{layer}self_attn.{p}_proj").unflatten(-1, (c["num_heads"], -1)).transpose(1, 2) for p in "qkv")
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + linear(y, layer + "self_attn.o_proj")
        y = F.gelu(linear(norm(hidden, layer + "post_attention_layernorm"), layer + "mlp.up_proj"))
        hidden = hidden + linear(y, layer + "mlp.down_proj")
    return F.linear(norm(hidden, "model.norm"), w["model.embed_tokens.weight"])


def train(run, device, bf16):
    """The loss of each step."""
    c = run.config
    w = {name: value.float().to(device).requires_grad_() for name, value in run.weights.items()}
    matrices = [v for v in w.values() if v.dim() > 1]
    vectors = [v for v in w.values() if v.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": c["weight_decay"]}, {"params": vectors, "weight_decay": 0}],
        betas=(c["adam_beta1"], c["adam_beta2"]), eps=c["adam_eps"])
    losses = []
    for step in range(len(run.losses)):
        tokens = run.batch(step).to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=bf16):
            logits = forward(w, run, tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if c["max_grad_norm"] > 0:
            torch.nn.utils.clip_grad_norm_(w.values(), c["max_grad_norm"])
        for group in optimizer.param_groups:
            group["lr"] = run.learning_rate(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


def distance(a, b):
    first = FIRST_STEP if len(a) > FIRST_STEP else 0
    return math.sqrt(statistics.fmean((x - y) ** 2 for x, y in zip(a[first:], b[first:])))


def main():
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    torch.set_float32_matmul_precision("highest")
    cohort_distances, bf16_distances = [], []
    for path in sys.argv[1:]:
        run = Run(path)
        device = "cuda" if run.config["device"] != "cpu" else "cpu"
        exact = train(run, device, bf16=False)
        cohort_distances.append(distance(run.losses, exact))
        line = (f"{path}: {len(run.losses)} steps, {run.config['dtype']}: "
                f"RMS distance to PyTorch's f32 {cohort_distances[-1]:.3e}")
        if device == "cuda":
            bf16_distances.append(distance(train(run, device, bf16=True), exact))
            line += f", of its bf16 {bf16_distances[-1]:.3e}"
        print(f"{line}; last losses {run.losses[-1]:.4f} and {exact[-1]:.4f}", flush=True)
    if bf16_distances:
        a, b = statistics.median(cohort_distances), statistics.median(bf16_distances)
        print(f"medians {a:.3e} and {b:.3e}: {a / b:.2f}x")


if __name__ == "__main__":
    main()

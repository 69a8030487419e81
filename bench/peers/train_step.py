"""The peer of cohort_bench_step: the same model in plain PyTorch with SDPA and fused AdamW, one training step on random
tokens. On CUDA compiled, in bf16 autocast over f32 weights; on the CPU in f32, not compiled. Prints tokens/s and, on CUDA, peak
memory. Encoders are those of transformers with SDPA and without dropout; 15 % of the tokens have a target.

  python3 bench/peers/train_step.py gpt2_124m | qwen2_0_5b | qwen2_1_5b     CUDA
  python3 bench/peers/train_step.py bert_base [--eager] [--heads targets]   CUDA; logits of all tokens, as transformers has them, or
                                                                            of the targets alone
  python3 bench/peers/train_step.py vit_b16 [--eager]                       CUDA
  python3 bench/peers/train_step.py char_128 | char_384                     CPU, with OMP_NUM_THREADS threads
"""
import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

SHAPES = {
    "gpt2_124m": dict(layers=12, d=768, heads=12, kv=12, ff=3072, context=1024, batch=32, vocab=50304, gpt=True),
    "qwen2_0_5b": dict(layers=24, d=896, heads=14, kv=2, ff=4864, context=2048, batch=8, vocab=151936, gpt=False),
    "qwen2_1_5b": dict(layers=28, d=1536, heads=12, kv=2, ff=8960, context=4096, batch=4, vocab=151936, gpt=False),
    # configs/shakespeare_char.yaml; configs/shakespeare_char_gpu.yaml with batch_size=8 model.dropout=0
    "char_128": dict(layers=4, d=128, heads=4, kv=4, ff=512, context=64, batch=12, vocab=66, gpt=True, cpu=True),
    "char_384": dict(layers=6, d=384, heads=6, kv=6, ff=1536, context=256, batch=8, vocab=66, gpt=True, cpu=True),
    "bert_base": dict(layers=12, d=768, heads=12, ff=3072, context=512, batch=64, vocab=30522),
    "vit_b16": dict(layers=12, d=768, heads=12, ff=3072, context=197, batch=256, image=224, patch=16, classes=1000),
    "bert_tiny": dict(layers=2, d=32, heads=2, ff=64, context=32, batch=4, vocab=100, cpu=True),  # to try this program
    "vit_tiny": dict(layers=2, d=32, heads=2, ff=64, context=17, batch=4, image=16, patch=4, classes=10, cpu=True),
}


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s, self.hd = s, s["d"] // s["heads"]
        norm = (lambda: nn.LayerNorm(s["d"], bias=not s.get("cpu"))) if s["gpt"] else (lambda: nn.RMSNorm(s["d"], eps=1e-6))
        self.n1, self.n2 = norm(), norm()
        bias = s["gpt"] and not s.get("cpu")
        self.qkv = nn.Linear(s["d"], (s["heads"] + 2 * s["kv"]) * self.hd, bias=bias)
        self.o = nn.Linear(s["d"], s["d"], bias=bias)
        self.up = nn.Linear(s["d"], s["ff"] * (1 if s["gpt"] else 2), bias=bias)
        self.down = nn.Linear(s["ff"], s["d"], bias=bias)

    def forward(self, x, cos, sin):
        s, (b, t, _) = self.s, x.shape
        q, k, v = self.qkv(self.n1(x)).split([s["heads"] * self.hd, s["kv"] * self.hd, s["kv"] * self.hd], dim=-1)
        q, k, v = (y.view(b, t, -1, self.hd).transpose(1, 2) for y in (q, k, v))
        if not s["gpt"]:
            q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s["kv"] != s["heads"])
        x = x + self.o(y.transpose(1, 2).reshape(b, t, -1))
        h = self.up(self.n2(x))
        if s["gpt"]:
            h = F.gelu(h, approximate="none" if s.get("cpu") else "tanh")
        else:
            gate, up = h.chunk(2, dim=-1)
            h = F.silu(gate) * up
        return x + self.down(h)


class Model(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s = s
        self.embed = nn.Embedding(s["vocab"], s["d"])
        self.position = nn.Embedding(s["context"], s["d"]) if s["gpt"] else None
        self.blocks = nn.ModuleList(Block(s) for _ in range(s["layers"]))
        self.norm = nn.LayerNorm(s["d"]) if s["gpt"] else nn.RMSNorm(s["d"], eps=1e-6)
        hd = s["d"] // s["heads"]
        angle = torch.outer(torch.arange(s["context"]).float(), 1e6 ** (-torch.arange(0, hd, 2).float() / hd))
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        if self.position is not None:
            x = x + self.position.weight
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.view(-1))


def encoder_config(s):
    return dict(hidden_size=s["d"], num_hidden_layers=s["layers"], num_attention_heads=s["heads"], intermediate_size=s["ff"],
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa")


class MaskedLM(nn.Module):
    """Takes tokens, indices of targets and their labels; with `all_heads` labels of all tokens, -100 for none."""

    def __init__(self, s, all_heads):
        from transformers import BertConfig, BertForMaskedLM
        super().__init__()
        self.all_heads = all_heads
        self.model = BertForMaskedLM(
            BertConfig(vocab_size=s["vocab"], max_position_embeddings=s["context"], **encoder_config(s)))

    def forward(self, tokens, rows, targets):
        if self.all_heads:
            logits = self.model(tokens).logits
        else:
            hidden = self.model.bert(tokens).last_hidden_state
            logits = self.model.cls(hidden.reshape(-1, hidden.size(-1))[rows])
        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets)


class Images(nn.Module):
    def __init__(self, s):
        from transformers import ViTConfig, ViTForImageClassification
        super().__init__()
        self.model = ViTForImageClassification(
            ViTConfig(image_size=s["image"], patch_size=s["patch"], num_labels=s["classes"], **encoder_config(s)))

    def forward(self, pixels, targets):
        return F.cross_entropy(self.model(pixel_values=pixels).logits.float(), targets)


def make(s, device, all_heads):
    """The model and its inputs."""
    batch, length = s["batch"], s["context"]
    if "image" in s:
        pixels = torch.rand(batch, 3, s["image"], s["image"], device=device) * 2 - 1
        return Images(s), (pixels, torch.randint(s["classes"], (batch,), device=device))
    if "gpt" in s:
        tokens = torch.randint(s["vocab"], (batch, length + 1), device=device)
        return Model(s), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    tokens = torch.randint(s["vocab"], (batch, length), device=device)
    rows = torch.randperm(batch * length, device=device)[: int(0.15 * batch * length)].sort().values
    targets = torch.randint(s["vocab"], rows.shape, device=device)
    if all_heads:
        targets = torch.full((batch * length,), -100, device=device).scatter(0, rows, targets)
    return MaskedLM(s, all_heads), (tokens, rows, targets)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--heads", choices=["all", "targets"], default="all")
    args = parser.parse_args()
    name, s = args.name, SHAPES[args.name]
    cpu = s.get("cpu", False)
    device = "cpu" if cpu else "cuda"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest" if cpu else "high")
    model, inputs = make(s, device, args.heads == "all")
    model.to(device)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    step_model = model if cpu or args.eager else torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        with torch.autocast(device, dtype=torch.bfloat16, enabled=not cpu):
            loss = step_model(*inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for _ in range(5):
        step()
    if not cpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        step().item()
        times.append(time.perf_counter() - begin)
    seconds = sorted(times)[len(times) // 2]
    n = s["batch"] * s["context"]
    memory = "" if cpu else (
        f", peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB allocated, "
        f"{torch.cuda.max_memory_reserved() / 1e9:.2f} GB reserved")
    images = f", {s['batch'] / seconds:.1f} images/s" if "image" in s else ""
    kind = (", eager" if args.eager else "") + (", heads of targets" if args.heads == "targets" else "")
    print(f"pytorch {name}{kind}: {seconds * 1e3:.2f} ms, {n / seconds:.0f} tokens/s{images}{memory}")


if __name__ == "__main__":
    main()

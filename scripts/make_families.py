#!/usr/bin/env python3
"""Writes tests/reference/families: a small model of every family of nn/families/ with random weights,
saved by transformers, with its logits, loss and gradients computed in f64.

  scripts/make_families.py [OUT]

Needs PyTorch and transformers 5. Every option that changes the maths has a model.
"""
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

SMALL = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.2, bos_token_id=1,
             eos_token_id=2, pad_token_id=0)
GPT2 = dict(vocab_size=32, n_positions=32, n_embd=16, n_layer=2, n_head=4, initializer_range=0.2, bos_token_id=1,
            eos_token_id=2)


def rope(kind, **fields):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=10000.0, **fields))


def qwen3_5(**fields):
    return hf.Qwen3_5TextConfig(**{**SMALL, "max_position_embeddings": 80, "head_dim": 8, "linear_num_key_heads": 2,
                                   "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
                                   **rope("default", partial_rotary_factor=0.5), **fields})


LONGROPE = rope("longrope", short_factor=[1.0, 1.3], long_factor=[2.0, 2.5], original_max_position_embeddings=16)
MODELS = {
    "llama": hf.LlamaConfig(**SMALL),
    "llama_biases_tied": hf.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama_one_kv_head": hf.LlamaConfig(**{**SMALL, "num_key_value_heads": 1}, head_dim=6, rms_norm_eps=1e-3),
    "llama_gelu": hf.LlamaConfig(**SMALL, hidden_act="gelu"),
    "llama_linear": hf.LlamaConfig(**SMALL, **rope("linear", factor=4.0)),
    "llama_dynamic": hf.LlamaConfig(**SMALL, **rope("dynamic", factor=2.0)),
    "llama_llama3": hf.LlamaConfig(**SMALL, head_dim=16, **rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)),
    "llama_yarn": hf.LlamaConfig(**SMALL, head_dim=16, **rope(
        "yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama_yarn_mscale": hf.LlamaConfig(**SMALL, head_dim=16, **rope(
        "yarn", factor=4.0, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=0.7, beta_fast=8.0,
        truncate=False)),
    "mistral": hf.MistralConfig(**SMALL, sliding_window=5),
    "mistral_no_window": hf.MistralConfig(**SMALL, sliding_window=None, head_dim=6),
    "qwen2": hf.Qwen2Config(**SMALL),
    "qwen2_window": hf.Qwen2Config(**{**SMALL, "num_hidden_layers": 3}, use_sliding_window=True, sliding_window=4,
                                   max_window_layers=1, tie_word_embeddings=True),
    "qwen3": hf.Qwen3Config(**SMALL, head_dim=6),
    "qwen3_bias": hf.Qwen3Config(**SMALL, head_dim=4, attention_bias=True, tie_word_embeddings=True),
    "qwen3_5_text": qwen3_5(num_hidden_layers=4, head_dim=16, **rope("default", partial_rotary_factor=0.25)),
    "qwen3_5_text_tied": qwen3_5(layer_types=["linear_attention", "full_attention"], tie_word_embeddings=True,
                                 linear_num_value_heads=2, attention_bias=True),
    "qwen3_5_text_delta": qwen3_5(layer_types=["linear_attention"] * 2, linear_num_key_heads=1,
                                  linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8),
    "qwen3_5_text_attention": qwen3_5(layer_types=["full_attention"] * 2, **rope(
        "yarn", factor=4.0, original_max_position_embeddings=20, partial_rotary_factor=0.5)),
    "smollm3": hf.SmolLM3Config(**{**SMALL, "num_hidden_layers": 3}, no_rope_layer_interval=2),
    "gemma": hf.GemmaConfig(**SMALL, head_dim=6),
    "phi3": hf.Phi3Config(**SMALL),
    "phi3_longrope": hf.Phi3Config(**SMALL, original_max_position_embeddings=16, **LONGROPE),
    "olmo2": hf.Olmo2Config(**SMALL),
    "gpt2": hf.GPT2Config(**GPT2),
    "gpt2_gelu": hf.GPT2Config(**GPT2, n_inner=24, activation_function="gelu", tie_word_embeddings=False),
}


# A model with an image encoder; also in tests/reference.
WITH_IMAGES = hf.Qwen3_5Config(
    text_config=qwen3_5(layer_types=["linear_attention", "full_attention"]).to_dict(),
    vision_config=dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, patch_size=2, out_hidden_size=16,
                       num_position_embeddings=4))


def randomize(model):
    """Perturbs vectors, whose constant initial values would hide mix-ups."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += torch.randn_like(parameter) * 0.2
            if name.endswith("A_log"):  # decays that f32 can tell apart over a chunk
                parameter -= 3


class F64:
    """torch for the code of Qwen3.5, which computes the delta rule and its gates in f32 whatever the dtype is, and adds
    errors of 1e-4 to gradients: here in f64."""
    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)

    def __enter__(self):
        self.code, self.cast = hf.models.qwen3_5.modeling_qwen3_5, torch.Tensor.float
        self.code.torch, torch.Tensor.float = self, torch.Tensor.double

    def __exit__(self, *error):
        self.code.torch, torch.Tensor.float = torch, self.cast


def write(out, name, config, auto=hf.AutoModelForCausalLM):
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = auto.from_config(config).float().eval()
    randomize(model)
    folder = out / name
    model.save_pretrained(folder)
    model = model.double()
    ids = torch.randint(3, 32, (1, 70 if config.model_type.startswith("qwen3_5") else 12))
    with F64() if config.model_type.startswith("qwen3_5") else nullcontext():
        result = model(ids, labels=ids, use_cache=False)
        result.loss.backward()
    golden = {"ids": ids[0].int(), "logits": result.logits[0].float(), "loss": result.loss.float().reshape(1)}
    for parameter, value in model.named_parameters():
        if value.grad is not None:
            golden["grad." + parameter] = value.grad.float()
    save_file({k: v.detach().contiguous().clone() for k, v in golden.items()}, folder / "golden.safetensors")
    config = json.loads((folder / "config.json").read_text())
    print(f"{name}: {config['model_type']}, loss {float(result.loss):.4f}")


def main():
    root = Path(__file__).resolve().parent.parent
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else root / "tests/reference/families"
    for name, config in MODELS.items():
        write(out, name, config)
    write(out.parent, "qwen3_5", WITH_IMAGES, hf.AutoModelForImageTextToText)
    # transformers has no module for these tensors of the published folders.
    weights = out.parent / "qwen3_5/model.safetensors"
    save_file(load_file(weights) | {"mtp.fc.weight": torch.ones(16, 32)}, weights, metadata={"format": "pt"})


if __name__ == "__main__":
    main()

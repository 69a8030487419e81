#!/usr/bin/env python3
"""Makes the folders of tests/reference/quantized: a tiny random Qwen2 as bitsandbytes and transformers quantise and save it, and
golden.json, a hash of each linear layer's values in bf16. Also prints the hashes of tests/kernels/quantized_weight_test.cpp.

  pip install torch transformers accelerate bitsandbytes; python3 scripts/make_quantized.py
"""
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from bitsandbytes import functional as bnb
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen2Config, Qwen2ForCausalLM

OUTPUT = Path(__file__).resolve().parents[1] / "tests/reference/quantized"
FORMATS = {"nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
           "nf4_single": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
           "int8": {"load_in_8bit": True}}


def fnv(tensor):
    """FNV-1a, 64 bits, of the bytes."""
    h = 0xcbf29ce484222325
    for byte in bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes()):
        h = (h ^ byte) * 0x100000001b3 % 2**64
    return f"{h:016x}"


def matrix(rows, columns):
    """Numbers with few bits, of magnitudes that differ from block to block."""
    i = np.arange(rows * columns, dtype=np.int64)
    x = ((i * 7919 % 1009) - 504) * np.exp2(-9.0 - i // 64 * 5 % 7)
    return torch.from_numpy(x.astype(np.float32).reshape(rows, columns))


def values(layer):
    """The layer's weight in bf16."""
    if isinstance(layer, Linear4bit):
        return bnb.dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(torch.bfloat16)
    # One rounding: bitsandbytes computes (value * SCB) * (1 / 127).
    return (layer.weight.data.float() * (layer.weight.SCB.float() / 127).view(-1, 1)).to(torch.bfloat16)


def main():
    for rows, columns in ((8, 128), (96, 512)):
        for double in (False, True):
            codes, state = bnb.quantize_4bit(matrix(rows, columns), blocksize=64, quant_type="nf4", compress_statistics=double)
            scales = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset if double else state.absmax
            print(rows, columns, double, fnv(codes), fnv(scales), fnv(bnb.dequantize_4bit(codes, state).to(torch.bfloat16)))
    torch.manual_seed(1)
    config = Qwen2Config(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                         vocab_size=24, max_position_embeddings=32, tie_word_embeddings=True)
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(value)
    for name, settings in FORMATS.items():
        with tempfile.TemporaryDirectory() as plain:
            model.save_pretrained(plain)
            quantized = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16, device_map="cpu",
                                                             quantization_config=BitsAndBytesConfig(**settings))
        folder = OUTPUT / name
        shutil.rmtree(folder, ignore_errors=True)
        quantized.save_pretrained(folder)
        golden = {layer + ".weight": fnv(values(module)) for layer, module in quantized.named_modules()
                  if isinstance(module, (Linear4bit, Linear8bitLt))}
        (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes tests/reference/lora: adapters made by PEFT on models of tests/reference/families, with the logits, and with
the losses, the first gradients and the adapters of three steps of AdamW, computed in f64.

  scripts/make_lora.py [OUT]

Needs PyTorch, transformers 5 and peft.
"""
import json
import sys
from pathlib import Path

import peft
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent / "tests/reference"
RATE, STEPS, EPS = 1e-3, 3, 1e-8
# Options of LoraConfig for each folder, by the model's.
ADAPTERS = {
    "llama": ("llama", dict(target_modules="all-linear", r=3, lora_alpha=7)),
    "llama_biases": ("llama_biases_tied", dict(target_modules=["k_proj"], r=2, lora_alpha=2, use_rslora=True)),
    "qwen2": ("qwen2", dict(target_modules=["q_proj", "v_proj", "down_proj"], r=4, lora_alpha=8, use_rslora=True)),
    "phi3": ("phi3", dict(target_modules=["qkv_proj", "gate_up_proj"], r=3, lora_alpha=6)),
    "phi3_all": ("phi3", dict(target_modules="all-linear", r=2, lora_alpha=3.5, use_rslora=True)),
    "gpt2": ("gpt2", dict(target_modules=["c_attn", "mlp.c_proj"], r=3, lora_alpha=6, fan_in_fan_out=True)),
    "gpt2_all": ("gpt2", dict(target_modules=["c_attn", "c_proj", "c_fc"], r=2, lora_alpha=2, fan_in_fan_out=True)),
}


def adapters(model):
    """The adapters' parameters by the names of adapter_model.safetensors."""
    return {name.replace(".default.", "."): p for name, p in model.named_parameters() if p.requires_grad}


def losses(model, sequences):
    """Sum over all next tokens, divided by their number."""
    total, count = 0, 0
    for ids in sequences:
        logits = model(ids[None]).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
        count += len(ids) - 1
    return total / count


def make_adapter(base, options):
    """A model in f64 whose adapters are random, on the model in a folder."""
    model = hf.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.05, **options)).eval()
    with torch.no_grad():
        for p in adapters(model).values():
            p.copy_(torch.randn_like(p) * 0.3)
    return model


def save(model, folder, base):
    """Saves the adapter without what differs from one machine or call to the next."""
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = base
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write(out, name, family, options):
    torch.manual_seed(0)
    folder = out / name
    model = make_adapter(ROOT / "families" / family, options)
    save(model, folder, family)
    saved = load_file(folder / "adapter_model.safetensors")
    model = model.double()
    sequences = [torch.randint(3, 32, (n,)) for n in (12, 7)]
    golden = {f"ids.{i}": ids.int() for i, ids in enumerate(sequences)}
    golden["logits"] = model(sequences[0][None]).logits[0].float()
    parameters = adapters(model)
    assert sorted(parameters) == sorted(saved)
    optimizer = torch.optim.AdamW(parameters.values(), lr=RATE, betas=(0.9, 0.999), eps=EPS, weight_decay=0)
    values = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = losses(model, sequences)
        loss.backward()
        if step == 0:
            golden |= {"grad." + key: p.grad.float() for key, p in parameters.items()}
        optimizer.step()
        values.append(float(loss.detach()))
    golden |= {"change." + key: (p.detach() - saved[key].double()).float() for key, p in parameters.items()}
    golden["losses"] = torch.tensor(values)
    save_file({k: v.detach().contiguous().clone() for k, v in golden.items()}, folder / "golden.safetensors")
    print(f"{name}: {len(parameters)} tensors, losses {values}")


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "lora"
    for name, (family, options) in ADAPTERS.items():
        write(out, name, family, options)


if __name__ == "__main__":
    main()

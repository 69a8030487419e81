#!/usr/bin/env python3
"""Round trip with PEFT, for models of tests/reference/families and several sets of targets: an adapter that PEFT made
gives the same log-probs in `cohort logprobs`; PEFT loads what `cohort export` makes of it, and what `cohort train`
trains from it or anew, with the same log-probs; and `cohort export --merged` writes the weights of merge_and_unload().

  scripts/check_peft.py COHORT

COHORT is the binary. Needs PyTorch, transformers 5 and peft.
"""
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file

from check_transformers import FAMILIES, letters

TOLERANCE = 1e-5
TEXT = "ab cd xyz"
ALL = "all-linear"
GPT2 = ["c_attn", "c_proj", "c_fc"]
# Family, target modules of PEFT, and the keys of Cohort for them.
CASES = [
    ("llama", ALL, ""),
    ("llama", ["k_proj"], "k_proj"),
    ("llama_biases_tied", ["o_proj", "gate_proj"], "o_proj,gate_proj"),
    ("qwen2", ["q_proj", "v_proj"], "q_proj,v_proj"),
    ("qwen2_window", ALL, ""),
    ("qwen3", ["down_proj"], "down_proj"),
    ("qwen3_5_text", ALL, ""),
    ("qwen3_5_text", ["in_proj_qkv", "q_proj"], "in_proj_qkv,q_proj"),
    ("qwen3_5_text_delta", ALL, ""),
    ("mistral", ALL, ""),
    ("smollm3", ALL, ""),
    ("gemma", ALL, ""),
    ("olmo2", ALL, ""),
    ("phi3", ALL, ""),
    ("phi3", ["qkv_proj"], "qkv_proj"),
    ("phi3", ["gate_up_proj", "o_proj"], "gate_up_proj,o_proj"),
    ("gpt2", GPT2, ""),
    ("gpt2", ["c_proj"], "c_proj"),
    ("gpt2", ["attn.c_proj"], "attn.c_proj"),
    ("gpt2_gelu", ["mlp.c_proj", "c_attn"], "mlp.c_proj,c_attn"),
]
CONFIG = """trainer: sft
steps: 3
batch_size: 4
learning_rate: 1e-2
dtype: f32
data: {jsonl: {path: train.jsonl, held_out_fraction: 0.2}}
rewards: [{name: exact_match}]
eval: {size: 4}
max_completion_length: 4
"""


def run(*arguments):
    result = subprocess.run([str(a) for a in arguments], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, arguments))}: {result.stderr.strip()}")
    return result.stdout


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def make_base(folder, family):
    load(FAMILIES / family).save_pretrained(folder)
    letters().save_pretrained(folder)


def make_adapter(base, folder, targets, rslora, rank=3):
    """Saves an adapter with random A and B."""
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=5, target_modules=targets, use_rslora=rslora,
                             lora_dropout=0.1, fan_in_fan_out="gpt2" in base.name)
    model = peft.get_peft_model(load(base), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)


def log_probs(model):
    """Log-probs of the tokens of TEXT behind the first one."""
    ids = letters()(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        values = torch.log_softmax(model.eval()(ids, use_cache=False).logits[0].double(), -1)
    return [float(values[i, ids[0, i + 1]]) for i in range(ids.shape[1] - 1)]


def our_log_probs(cohort, folder, *options):
    return json.loads(run(cohort, "logprobs", folder, TEXT, *options))["logprobs"][1:]


def peft_model(base, adapter):
    """The model that PEFT loads, and its complaints."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", category=FutureWarning)
        model = peft.PeftModel.from_pretrained(load(base), str(adapter))
    loaded = {n.replace(".default.", ".") for n, _ in model.named_parameters() if ".lora_" in n}
    complaints = [str(w.message) for w in caught]
    if loaded != set(load_file(adapter / "adapter_model.safetensors")):
        complaints.append("PEFT adapts other modules than the file has")
    return model, complaints


def difference(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def compare_merged(cohort, base, adapter, folder):
    run(cohort, "export", adapter, folder, "--merged")
    model, _ = peft_model(base, adapter)
    model = model.merge_and_unload()
    ours = load(folder)
    theirs = dict(model.named_parameters())
    weights = max(float((value - theirs[name]).detach().abs().max()) for name, value in ours.named_parameters())
    return max(weights, difference(log_probs(ours), log_probs(model)),
               difference(log_probs(ours), our_log_probs(cohort, folder)))


def train(cohort, folder, start, lora):
    with open(folder / "train.jsonl", "w") as lines:
        for i in range(40):
            lines.write(json.dumps({"prompt": "ab c" + chr(97 + i % 26), "answer": "xyz."[: 1 + i % 3]}) + "\n")
    (folder / "config.yaml").write_text(CONFIG)
    output = folder / ("run-" + start.name)
    run(cohort, "train", folder / "config.yaml", f"output_dir={output}", f"init_from={start}", *lora)
    return output / "checkpoints/step-00000003"


def check(cohort, root, family, targets, ours, rslora):
    """Returns the largest difference of every comparison, and complaints."""
    base, adapter = root / f"base-{family}", root / "adapter"
    make_base(base, family)
    make_adapter(base, adapter, targets, rslora)
    model, complaints = peft_model(base, adapter)
    expected = log_probs(model)
    errors = {"load": difference(our_log_probs(cohort, adapter), expected)}
    run(cohort, "export", adapter, root / "exported")
    again, more = peft_model(base, root / "exported")
    errors["export"] = difference(log_probs(again), expected)
    errors["merge"] = compare_merged(cohort, base, adapter, root / "merged")
    lora = ["lora.rank=3", "lora.alpha=5", f"lora.rslora={str(rslora).lower()}", f"lora.targets=[{ours}]"]
    for start in (adapter, base):
        trained = train(cohort, root, start, lora)
        loaded, others = peft_model(base, trained)
        errors["train " + start.name.split("-")[0]] = difference(
            log_probs(loaded), our_log_probs(cohort, trained))
        errors["merge trained " + start.name.split("-")[0]] = compare_merged(
            cohort, base, trained, root / ("merged-" + start.name))
        more += others
    return errors, complaints + more


def main():
    cohort = Path(sys.argv[1]).resolve()
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    failed = 0
    for i, (family, targets, ours) in enumerate(CASES):
        with tempfile.TemporaryDirectory() as root:
            errors, complaints = check(cohort, Path(root), family, targets, ours, i % 2 == 1)
        bad = complaints or max(errors.values()) > TOLERANCE
        failed += bool(bad)
        text = ", ".join(f"{name} {error:.0e}" for name, error in errors.items())
        print(f"{family} {targets}: {text} {'FAILED ' + '; '.join(complaints) if bad else ''}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

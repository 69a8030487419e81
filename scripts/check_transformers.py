#!/usr/bin/env python3
"""Round trip with transformers: `cohort train` trains a model saved by transformers, for every model of
tests/reference/families, and models from nothing, with tokenizers of bytes and of characters. transformers
must load the resulting checkpoints and exports without warnings, compute the same log-probs as `cohort logprobs`, and
continue a text with the same tokens as `cohort generate`.

  scripts/check_transformers.py COHORT [--device cuda]

COHORT is the binary. Needs PyTorch and transformers 5.
"""
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

FAMILIES = Path(__file__).resolve().parent.parent / "tests/reference/families"
TOLERANCE = 1e-4
CONFIG = """trainer: sft
steps: 3
batch_size: 4
learning_rate: 1e-2
model: {path: .}
data: {jsonl: {path: train.jsonl}}
rewards: [{name: exact_match}]
eval: {size: 4}
max_completion_length: 4
"""

# Keys of models made here, by the architecture that they are saved as.
MADE_HERE = {
    "LlamaForCausalLM": ["model.num_kv_heads=2", "model.bias=true"],
    "Qwen3ForCausalLM": ["model.qk_norm=true", "model.tie_embeddings=true"],
    "Qwen3_5ForCausalLM": ["model.qk_norm=true", "model.attention_gate=true", "model.rotary_fraction=0.5",
                           "model.delta.full_every=2", "model.delta.key_heads=2", "model.delta.value_heads=4",
                           "model.delta.key_dim=8", "model.delta.value_dim=8"],
    "GPT2LMHeadModel": ["model.norm=layer_norm", "model.position=learned", "model.mlp=gelu_tanh", "model.bias=true"],
}
MADE_HERE_CONFIG = """trainer: pretrain
steps: 40
batch_size: 8
learning_rate: 1e-2
model: {num_layers: 2, d_model: 32, num_heads: 4, context: 64}
data: {text: train.txt}
"""


def letters():
    """A tokenizer of letters with the models' vocabulary size of 32."""
    names = ["<pad>", "<s>", "</s>"] + list("abcdefghijklmnopqrstuvwxyz") + ["\u0120", "."]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(names[:3])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", pad_token="<pad>")


def train(cohort, name, folder, options):
    model = transformers.AutoModelForCausalLM.from_pretrained(FAMILIES / name, dtype=torch.float32)
    model.save_pretrained(folder)
    letters().save_pretrained(folder)
    with open(folder / "train.jsonl", "w") as lines:
        for i in range(40):
            lines.write(json.dumps({"prompt": "ab c" + chr(97 + i % 26), "answer": "xyz."[: 1 + i % 3]}) + "\n")
    (folder / "config.yaml").write_text(CONFIG)
    subprocess.run([cohort, "train", folder / "config.yaml", f"output_dir={folder}/run"] + options, check=True,
                   capture_output=True)
    return folder / "run/checkpoints/step-00000003"


def make(cohort, tokenizer, folder, options):
    (folder / "train.txt").write_text("ab cd xyz. é, €😀\n" * 400)
    (folder / "config.yaml").write_text(MADE_HERE_CONFIG)
    subprocess.run([cohort, "train", folder / "config.yaml", f"data.tokenizer={tokenizer}",
                    f"output_dir={folder}/run"] + options, check=True, capture_output=True)
    return folder / "run/checkpoints/step-00000040"


def compare_greedy(cohort, checkpoint, options, architecture):
    """Returns what differs in the tokens after a prompt and in the architecture."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    prompt, complaints = "ab cd", []
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)[0]
    out = subprocess.run([cohort, "generate", checkpoint, prompt, "--temperature", "0", "--max-tokens", "20", "--json"]
                         + options, check=True, capture_output=True, text=True)
    ours = json.loads(out.stdout)
    if ours["ids"] != expected.tolist():
        complaints.append(f"greedy ids {ours['ids']}, expected {expected.tolist()}")
    if ours["completion"] != tokenizer.decode(expected[ids.shape[1]:], skip_special_tokens=True):
        complaints.append(f"greedy text {ours['completion']!r}")
    if type(model).__name__ != architecture:
        complaints.append(f"loaded as {type(model).__name__}")
    return complaints


def compare(cohort, checkpoint, options):
    """Returns the largest difference of a log-prob, and the warnings of transformers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, output_loading_info=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    complaints = [str(w.message) for w in caught] + [f"{key}: {value}" for key, value in info.items() if value]
    text = "ab cd xyz"
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        expected = torch.log_softmax(model(ids, use_cache=False).logits[0].double(), -1)
    out = subprocess.run([cohort, "logprobs", checkpoint, text] + options, check=True, capture_output=True, text=True)
    ours = json.loads(out.stdout)
    if ours["ids"] != ids[0].tolist():
        complaints.append(f"ids {ours['ids']}, expected {ids[0].tolist()}")
    pairs = zip(ours["logprobs"][1:], (expected[i, ids[0, i + 1]] for i in range(ids.shape[1] - 1)))
    return max(abs(a - float(b)) for a, b in pairs), complaints


def compare_both(cohort, checkpoint, options):
    """compare() of a checkpoint and of the folder that `cohort export` makes of it."""
    exported = checkpoint.parents[1] / "exported"
    subprocess.run([cohort, "export", checkpoint, exported], check=True, capture_output=True)
    results = [compare(cohort, folder, options) for folder in (checkpoint, exported)]
    return max(error for error, _ in results), sum((complaints for _, complaints in results), [])


def report(name, error, complaints):
    """Prints a line. Returns 1 for a failure."""
    bad = error > TOLERANCE or complaints
    print(f"{name}: largest difference {error:.1e} {'FAILED ' + '; '.join(complaints) if bad else ''}")
    return int(bool(bad))


def main():
    cohort, device = sys.argv[1], sys.argv[3] if len(sys.argv) > 3 else "cpu"
    failed = 0
    for architecture, keys in MADE_HERE.items():
        for tokenizer in ("byte", "char"):
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = make(cohort, tokenizer, Path(folder), [f"device={device}"] + keys)
                error, complaints = compare_both(cohort, checkpoint, ["--device", device])
                complaints += compare_greedy(cohort, checkpoint, ["--device", device], architecture)
            failed += report(f"{architecture} made here, {tokenizer}", error, complaints)
    for name in sorted(path.name for path in FAMILIES.iterdir()):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = train(cohort, name, Path(folder), [f"device={device}"])
            error, complaints = compare_both(cohort, checkpoint, ["--device", device])
        failed += report(name, error, complaints)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

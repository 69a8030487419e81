#!/usr/bin/env python3
"""Round trip with transformers: `cohort train` trains a model saved by transformers. For every model of
tests/reference/families, transformers must load the resulting checkpoint without warnings and compute
the same log-probs as `cohort logprobs`.

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
        expected = torch.log_softmax(model(ids).logits[0].double(), -1)
    out = subprocess.run([cohort, "logprobs", checkpoint, text] + options, check=True, capture_output=True, text=True)
    ours = json.loads(out.stdout)
    if ours["ids"] != ids[0].tolist():
        complaints.append(f"ids {ours['ids']}, expected {ids[0].tolist()}")
    pairs = zip(ours["logprobs"][1:], (expected[i, ids[0, i + 1]] for i in range(ids.shape[1] - 1)))
    return max(abs(a - float(b)) for a, b in pairs), complaints


def main():
    cohort, device = sys.argv[1], sys.argv[3] if len(sys.argv) > 3 else "cpu"
    failed = 0
    for name in sorted(path.name for path in FAMILIES.iterdir()):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = train(cohort, name, Path(folder), [f"device={device}"])
            error, complaints = compare(cohort, checkpoint, ["--device", device])
        bad = error > TOLERANCE or complaints
        failed += bool(bad)
        print(f"{name}: largest difference {error:.1e} {'FAILED ' + '; '.join(complaints) if bad else ''}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

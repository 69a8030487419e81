"""Fixtures: a small configuration, a model that has learned it, and the folder of shared data."""
import copy
import json
import os
import pathlib
import signal

import pytest

import cohort

# A shell that starts a command in the background may let it ignore interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

SMALL = {
    "name": "small",
    "model": {"num_layers": 1, "d_model": 16, "num_heads": 2, "context": 16, "init_std": 0.1},
    "num_threads": 1, "learning_rate": 1e-2, "eval": {"size": 8, "every": 0}, "max_completion_length": 4,
    "data": {"task": "addition", "task_sizes": {"max_size": 2}},
}


@pytest.fixture
def small(tmp_path):
    """small(trainer, **keys): a configuration of a few steps whose run is in a folder of its own."""
    def make(trainer, **keys):
        config = copy.deepcopy(SMALL) | {"trainer": trainer, "steps": 4, "output_dir": str(tmp_path / "run")}
        if trainer == "grpo":
            config |= {"prompts_per_step": 4, "num_generations": 6, "lr_schedule": "constant"}
        return config | keys
    return make


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "run"
    config = copy.deepcopy(SMALL) | {"trainer": "sft", "steps": 40, "batch_size": 16, "output_dir": str(folder)}
    return cohort.Model(cohort.train(config, progress=False).dir, device="cpu")


@pytest.fixture(scope="session")
def shared_data():
    """The folder of shared data; a test that needs it is skipped where there is none, unless COHORT_REQUIRE has "data"."""
    root = pathlib.Path(__file__).parents[2]
    folder = pathlib.Path(os.environ.get("COHORT_TEST_DATA", root.parent / "shared" / "data"))
    if not folder.is_dir():
        assert "data" not in os.environ.get("COHORT_REQUIRE", ""), f"{folder} is missing"
        pytest.skip(f"no shared data in {folder}; hint: set COHORT_TEST_DATA to their folder")
    return folder


CHAT_TEMPLATE = ("{{ tone }}{% if tools %}tools {{ tools | length }}<|end|>{% endif %}{% for m in messages %}{{ m.role }}: "
                 "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")


@pytest.fixture(scope="session")
def chat_run(tmp_path_factory):
    """A run on conversations, with a system message, a variable of the template, and keys of sampling."""
    folder = tmp_path_factory.mktemp("chat")
    letters = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))]
    vocab = letters + [chr(256 + i) for i in range(256 - len(letters))] + ["<|endoftext|>", "<|end|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocab)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"eos_token": "<|endoftext|>", "additional_special_tokens": ["<|end|>"], "chat_template": CHAT_TEMPLATE}))
    config = copy.deepcopy(SMALL) | {"trainer": "sft", "steps": 30, "batch_size": 8, "output_dir": str(folder / "run"),
                                     "temperature": 0.5, "top_k": 7, "max_completion_length": 3}
    config["model"]["context"] = 128
    config["data"] |= {"tokenizer_path": str(folder), "chat": True, "system": "be brief",
                       "chat_template_kwargs": {"tone": "kindly "}}
    return cohort.train(config, progress=False).dir

"""Model.embed() gives what `cohort embed` writes, to the bit."""
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import cohort
import numpy as np
import pytest

# 40 tokens, the vocabulary of encoders/bert_model.
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(97, 123)), *(f"##{letter}" for letter in "abcdefgh"), ":"]


def folder_of(shared_data, into, **files):
    """A BERT of 2 layers with a folder's files of sentence-transformers, some of them replaced."""
    source = shared_data / "encoder"
    shutil.copytree(source / "encoders" / "bert_model", into, copy_function=shutil.copyfile)
    into.chmod(0o755)
    (into / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
    for name in ("modules.json", "1_Pooling/config.json", "2_Normalize/config.json"):
        (into / name).parent.mkdir(exist_ok=True)
        (into / name).write_text((source / "sentence_transformers_6" / name).read_text())
    (into / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    (into / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q: "}}')
    for name, value in files.items():
        (into / f"{name}.json").write_text(json.dumps(value))
    return into


@pytest.fixture(scope="module")
def folder(shared_data, tmp_path_factory):
    return folder_of(shared_data, tmp_path_factory.mktemp("encoder") / "model")


@pytest.fixture(scope="module")
def encoder(folder):
    return cohort.Model(folder, device="cpu")


def texts_of(count):
    rng = random.Random(3)
    return ["".join(rng.choices("abcdefgh  xyz\n", k=rng.randint(0, 40))) for _ in range(count)]


def command(path, texts, output, *options):
    """The matrix that the command writes."""
    lines = "".join(json.dumps(text) + "\n" for text in texts)
    subprocess.run([sys.executable, "-I", "-m", "cohort", "embed", path, "--json-input", "--output", output, *options], input=lines,
                   text=True, check=True, capture_output=True)
    return np.load(output)


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("options", [{}, {"pooling": "cls"}, {"pooling": "last", "normalize": False}, {"prompt": "query"}])
def test_embeddings_are_those_of_the_command_to_the_bit(encoder, folder, tmp_path, options):
    texts = texts_of(2500)  # more than two blocks
    flags = [text for name, value in options.items()
             for text in (["--no-normalize"] if name == "normalize" else [f"--{name}", value])]
    expected = command(folder, texts, tmp_path / "out.npy", *flags)
    rows = encoder.embed(texts, **options)
    assert (rows.shape, rows.dtype, rows.device) == ((2500, 16), "float32", "cpu")
    assert same_bits(rows, expected)
    is_plain = not options
    assert same_bits(rows, encoder.embed(texts)) == is_plain
    lengths = np.linalg.norm(expected, axis=1)
    assert np.allclose(lengths, 1, atol=1e-6) == options.get("normalize", True)  # f32 rounds 16 squares


def test_a_text_has_the_same_bits_alone_and_in_any_sequence(encoder):
    texts = texts_of(300)
    rows = encoder.embed(texts).numpy()
    assert same_bits(encoder.embed(texts[::-1]), rows[::-1])
    for i in range(0, 300, 25):
        assert same_bits(encoder.embed(texts[i]), rows[i])
        assert same_bits(encoder.embed([texts[i]]), rows[i:i + 1])
    assert same_bits(encoder.embed(tuple(texts[:5])), rows[:5])
    assert same_bits(encoder.embed(np.array(texts[:5])), rows[:5])
    assert encoder.embed([]).numpy().shape == (0, 16)


def test_long_texts_are_cut_with_a_note(encoder, caplog):
    with caplog.at_level("INFO", logger="cohort"):
        rows = encoder.embed(["a", "a " * 30, "a " * 40]).numpy()
    assert [r.getMessage() for r in caplog.records] == ["texts[1] is cut to 12 tokens; others are without a note"]
    assert same_bits(rows[1], rows[2]) and same_bits(rows[1], encoder.embed("a " * 10))


def test_the_model_may_lie_in_a_folder_of_its_module(shared_data, tmp_path, monkeypatch):
    modules = [{"path": "0_Transformer", "type": "sentence_transformers.models.Transformer"},
               {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    inner = folder_of(shared_data, tmp_path / "inner")
    outer = tmp_path / "outer"
    (outer / "1_Pooling").mkdir(parents=True)
    (outer / "modules.json").write_text(json.dumps(modules))
    (outer / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    inner.rename(outer / "0_Transformer")
    monkeypatch.chdir(tmp_path)
    model = cohort.Model("outer", device="cpu")
    monkeypatch.chdir(outer)
    expected = command(outer, ["a b", "c"], tmp_path / "out.npy")
    assert same_bits(model.embed(["a b", "c"]), expected)
    assert same_bits(model.embed("c", pooling="cls", normalize=False), expected[1])


def test_a_decoder_embeds_by_its_last_token(model, tmp_path):
    run = pathlib.Path(model.folder).parents[1]
    expected = command(run, ["1+1=", "2"], tmp_path / "out.npy")
    assert same_bits(cohort.Model(run, device="cpu").embed(["1+1=", "2"]), expected)
    assert same_bits(model.embed(["1+1=", "2"], pooling="last"), expected)
    with pytest.raises(cohort.InputError, match=r"texts\[1\]: has no tokens; hint: leave empty texts out"):
        model.embed(["1", ""])


def test_wrong_arguments_are_named(encoder, shared_data, tmp_path):
    for texts, message in ((3, "texts: expected a text or a list of texts, got 3"), (None, "texts: "), ({"a": 1}, "texts: "),
                           (["a", 3], r"texts\[1\]: expected a text, got 3"), (b"a", r"texts\[0\]: expected a text, got 97"),
                           ([["a"]], r"texts\[0\]: "), (["a", "\ud800"], r"texts\[1\]: .*surrogates")):
        with pytest.raises(cohort.InputError, match=f"^{message}"):
            encoder.embed(texts)
    with pytest.raises(cohort.InputError, match="^pooling: expected mean, cls or last, got 'max'"):
        encoder.embed("a", pooling="max")
    with pytest.raises(cohort.InputError, match="^prompt: .* has no prompt 'quer'; hint: its prompts are"):
        encoder.embed("a", prompt="quer")
    for options in ({"pooling": 3}, {"normalize": "no"}, {"prompt": None}):
        with pytest.raises(cohort.InputError, match="^embed: pooling and prompt are names, normalize is True or False, got"):
            encoder.embed("a", **options)
    images = cohort.Model(shared_data / "encoder" / "encoders" / "vit_model", device="cpu")
    with pytest.raises(cohort.InputError, match=r"^texts\[0\]: .*vit_model: the model reads images, not texts"):
        images.embed("a")
    refused = folder_of(shared_data, tmp_path / "refused", modules=[{"path": "", "type": "sentence_transformers.models.Dense"}])
    other = cohort.Model(refused, device="cpu")  # which can be used otherwise
    with pytest.raises(cohort.InputError, match="modules.json: module 0 is 'sentence_transformers.models.Dense'"):
        other.embed("a")


def test_what_is_not_finite_is_an_error(folder):
    model = cohort.Model(folder, device="cpu")
    for weight in model.parameters().values():
        weight.numpy()[:] = np.finfo(np.float32).max
    with pytest.raises(cohort.Error, match=r"texts\[0\]: what the weights of .* compute is not finite"):
        model.embed(["a"])


def test_an_interrupt_ends_it_while_other_threads_run(encoder):
    texts = texts_of(200) * 5000  # most of a minute on two cores
    ticks = []

    def interrupt():
        for _ in range(20):
            time.sleep(0.1)
            ticks.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        encoder.embed(texts)
    assert time.monotonic() < ticks[-1] + 10
    thread.join()
    assert len(ticks) == 20
    assert encoder.embed("a").shape == (16,)

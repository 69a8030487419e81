"""cohort.Model and Engine: texts, streams, log-probs and rollouts agree with each other."""
import gc
import logging
import os
import signal
import threading
import time
import weakref

import cohort
import numpy as np
import pytest

PROMPTS = ["1+1=", "12+7=", "9+9=", "3+40="]


def test_generate_is_the_text_of_a_rollout_and_of_the_stream(model):
    for seed in range(3):
        text = model.generate("12+7=", seed=seed, max_completion_length=8)
        assert text == cohort.Engine(model).rollouts(["12+7="], seed=seed, max_completion_length=8).texts[0]
        pieces = list(model.stream("12+7=", seed=seed, max_completion_length=8))
        assert "".join(pieces) == text
        assert len(pieces) <= 8
    assert len({model.generate("1+1=", seed=seed, max_completion_length=8, temperature=2.0) for seed in range(20)}) > 3


def test_greedy_completions_do_not_depend_on_seed_or_companions(model):
    alone = [model.generate(p, temperature=0, seed=i) for i, p in enumerate(PROMPTS)]
    assert cohort.Engine(model).rollouts(PROMPTS, temperature=0).texts == alone
    assert cohort.Engine(model, max_concurrent=1).rollouts(PROMPTS, temperature=0).texts == alone


def test_rollouts_are_arrays_whose_logprobs_are_those_of_the_model(model):
    r = cohort.Engine(model).rollouts(PROMPTS, 3, seed=5, max_completion_length=6)
    tokens, mask, logprobs = np.from_dlpack(r.tokens), r.loss_mask.numpy(), r.logprobs.numpy()
    assert tokens.dtype == np.int32 and tokens.shape == mask.shape == logprobs.shape and len(tokens) == 12
    assert len(r.texts) == len(r.stop_reasons) == 12
    for i in range(12):
        length, prompt = int(r.lengths.numpy()[i]), int(r.prompt_lengths.numpy()[i])
        ids = tokens[i, :length].tolist()
        assert ids[:prompt] == model.encode(PROMPTS[i // 3])
        assert not mask[i, :prompt].any() and mask[i, prompt:length].all() and not mask[i, length:].any()
        assert model.decode(ids[prompt:]) == r.texts[i]
        expected = model.logprobs(ids).numpy()[prompt - 1:]
        # The same bits: the sampler computes on the weights as training does.
        np.testing.assert_array_equal(logprobs[i, prompt:length].astype(np.float32), expected)
        assert (r.entropies.numpy()[i, prompt:length] >= 0).all()
        if r.stop_reasons[i] == "stop_token":
            assert model.decode(ids[-1:]) == ""
        else:
            assert r.stop_reasons[i] == "length" and length - prompt == 6


def test_restricted_sampling_reports_the_distribution_that_was_sampled(model):
    r = cohort.Engine(model).rollouts(PROMPTS, 4, top_k=1, max_completion_length=4)
    mask = r.loss_mask.numpy() == 1
    np.testing.assert_allclose(r.sampling_logprobs.numpy()[mask], 0, atol=1e-6)
    assert (r.logprobs.numpy()[mask] < 0).all()


def test_logprobs_of_a_text_sum_to_one_over_the_next_token(model):
    ids = model.encode("1+1=")
    vocab = model.config["vocab_size"]
    total = sum(np.exp(float(model.logprobs([*ids, token]).numpy()[-1])) for token in range(vocab))
    assert abs(total - 1) < 1e-5
    np.testing.assert_array_equal(model.logprobs("1+1=").numpy(), model.logprobs(ids).numpy())
    halved = model.logprobs("1+1=", temperature=2.0).numpy()
    assert not np.array_equal(halved, model.logprobs("1+1=").numpy())


def test_parameters_share_the_memory_of_the_model(tmp_path, small):
    config = small("sft", batch_size=4, steps=1)
    model = cohort.Model(cohort.train(config, progress=False).dir, device="cpu")
    before = model.logprobs("1+1=").numpy().copy()
    for tensor in model.parameters().values():
        np.from_dlpack(tensor)[...] *= 0
    after = model.logprobs("1+1=").numpy()
    assert not np.array_equal(before, after)
    assert np.ptp(after) < 1e-6  # all tokens are equally likely


def test_wrong_arguments_are_named(model, tmp_path):
    with pytest.raises(cohort.InputError, match="no_model"):
        cohort.Model(tmp_path / "no_model", device="cpu")
    for dtype in ("float16", "bfloat16", "int32", "half"):
        with pytest.raises(cohort.InputError, match=f"dtype: expected .*{dtype}"):
            cohort.Model(model.folder, device="cpu", dtype=dtype)
    with pytest.raises(cohort.InputError, match="tpu"):
        cohort.Model(model.folder, device="tpu")
    with pytest.raises(cohort.InputError, match="temprature"):
        model.generate("1+1=", temprature=1)
    with pytest.raises(cohort.InputError, match="top_p"):
        model.generate("1+1=", top_p=-1)
    with pytest.raises(cohort.InputError, match="prompt"):
        model.generate("1+1=" * 50)
    with pytest.raises(cohort.InputError, match="chat template"):
        model.generate([{"role": "user", "content": "1+1="}])
    with pytest.raises(cohort.InputError, match="tokens"):
        model.logprobs([1])
    with pytest.raises(cohort.Error):
        model.logprobs([1, 10**6])
    with pytest.raises(cohort.InputError, match="memory_fraction"):
        cohort.Engine(model, memory_fraction=7)
    with pytest.raises(cohort.InputError, match="rollouts"):
        model.generate(["not", "one prompt"])
    with pytest.raises(UnicodeEncodeError):
        model.generate("1+1=", stop_strings=["\ud800"])
    assert model.generate("1+1=")


def test_a_text_is_one_prompt_and_tokens_can_be_ruled_out(model):
    engine = cohort.Engine(model)
    assert engine.rollouts("1+1=", 2, seed=4).texts == engine.rollouts(["1+1="], 2, seed=4).texts
    rest = [f"{token}:-100" for token in set(model.encode("0123456789+=")) - set(model.encode("7"))]
    r = engine.rollouts("1+1=", 8, logit_bias=rest, temperature=2.0)
    assert set("".join(r.texts)) == {"7"}


def test_a_stream_can_be_closed_and_its_error_is_raised(model):
    stream = model.stream("1+1=", temperature=2.0, max_completion_length=8)
    next(stream)
    stream.close()
    with pytest.raises(cohort.InputError, match="top_k"):
        next(model.stream("1+1=", top_k=-2))
    assert model.generate("1+1=")


def test_threads_share_an_engine(model):
    alone = [model.generate(p, seed=3) for p in PROMPTS]
    results = {}
    threads = [threading.Thread(target=lambda p=p: results.update({p: model.generate(p, seed=3)})) for p in PROMPTS * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[p] for p in PROMPTS] == alone


def test_an_interrupt_ends_sampling(model):
    def interrupt():
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    start = time.monotonic()
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        for seed in range(10**6):
            cohort.Engine(model).rollouts(PROMPTS * 64, 32, seed=seed)
            assert time.monotonic() < start + 60
    thread.join()
    assert model.generate("1+1=")


def test_models_are_freed(model):
    other = cohort.Model(model.folder, device="cpu")
    other.generate("1+1=")
    reference = weakref.ref(other)
    del other
    gc.collect()
    assert reference() is None


def test_a_model_of_a_run_is_asked_as_in_its_run(chat_run):
    model, question = cohort.Model(chat_run, device="cpu"), [{"role": "user", "content": "1+1="}]
    prompt = model.chat_prompt(question)
    assert prompt == "kindly system: be brief<|end|>user: 1+1=<|end|>assistant: "
    own = [{"role": "system", "content": "be long"}, *question]
    assert model.chat_prompt(own, chat_template_kwargs={"tone": ""}, tools=[{"name": "f"}]) == \
        "tools 1<|end|>system: be long<|end|>user: 1+1=<|end|>assistant: "
    with pytest.raises(cohort.InputError, match="role"):
        model.chat_prompt([{"content": "no role"}])
    default = cohort.Engine(model).rollouts([question], 20)
    explicit = cohort.Engine(model).rollouts([question], 20, temperature=0.5, top_k=7, max_completion_length=3)
    assert default.texts == explicit.texts and len(set(default.texts)) > 1
    assert all(default.lengths.numpy() - default.prompt_lengths.numpy() <= 3)
    ids = default.tokens.numpy()[0, :default.prompt_lengths.numpy()[0]].tolist()
    assert model.decode(ids) == prompt.replace("<|end|>", "")
    for seed in range(5):
        options = {"seed": seed, "max_completion_length": 30, "temperature": 1, "top_k": 0}
        text = model.generate(question, **options)
        assert text == model.generate(prompt, **options) == model.generate(ids, **options) == "".join(model.stream(ids, **options))
    other = {"chat_template_kwargs": {"tone": "x "}, "tools": [{"name": "f"}]}
    assert model.generate(question, **other) == model.generate(model.chat_prompt(question, **other))


def test_wrong_token_ids_are_refused(model):
    for ids, text in (([], "got none"), ([1, 10**6], "1000000 is outside"), ([-1], "-1 is outside")):
        with pytest.raises(cohort.InputError, match=text):
            model.generate(ids)


def test_sampling_options_have_the_names_of_other_libraries(model):
    engine = cohort.Engine(model)
    ours = engine.rollouts(PROMPTS, 3, seed=2, max_completion_length=5, stop_strings=["3"]).texts
    assert engine.rollouts(PROMPTS, n=3, seed=2, max_tokens=5, stop=["3"]).texts == ours
    assert engine.rollouts(PROMPTS, num_return_sequences=3, seed=2, max_new_tokens=5, stop="3").texts == ours
    assert model.generate("1+1=", do_sample=False) == model.generate("1+1=", temperature=0)
    assert model.generate("1+1=", do_sample=np.bool_(False), temperature=9) == model.generate("1+1=", temperature=0)
    assert "".join(model.stream("1+1=", do_sample=False, max_tokens=4)) == model.generate("1+1=", temperature=0, max_tokens=4)
    with pytest.raises(cohort.InputError, match="max_new_tokens is max_completion_length here, which is given too"):
        model.generate("1+1=", max_completion_length=3, max_new_tokens=4)


def test_dtypes_have_the_names_of_configurations_too(model):
    assert cohort.Model(model.folder, device="cpu", dtype="f64").parameters()["lm_head.weight"].dtype == "float64"
    with pytest.raises(cohort.InputError, match="float32 or float64 on a CPU"):
        cohort.Model(model.folder, device="cpu", dtype="bf16")


def test_logprobs_of_many_texts_are_those_of_each(model, chat_run):
    texts = ["1+1=2", model.encode("12+7=19"), "9+9=", np.array(model.encode("3+40=43"))]
    alone = [model.logprobs(text, temperature=0.5) for text in texts]
    assert [len(x) for x in alone] == [len(model.encode(text)) - 1 if isinstance(text, str) else len(text) - 1 for text in texts]
    together = model.logprobs(texts, temperature=0.5)
    assert all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(alone, together, strict=True))
    assert model.logprobs([]) == []
    ids = cohort.Engine(model).rollouts(["1+1="], max_completion_length=2).tokens[0]
    assert model.logprobs(ids).tolist() == model.logprobs(ids.tolist()).tolist() == model.logprobs([ids])[0].tolist()
    for wrong in ([5], [2**40, 1], "\ud800", [[1, 10**6]], [["1+1="]], [None], None, {"role": "user"}):
        with pytest.raises(cohort.InputError):
            model.logprobs(wrong)
    chat = cohort.Model(chat_run, device="cpu")
    conversation = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    whole = chat.chat_prompt(conversation[:1]) + "2<|end|>"
    ids = [token for piece in whole.split("<|end|>")[:-1] for token in [*chat.encode(piece), 257]]
    assert chat.logprobs(conversation).tolist() == chat.logprobs(ids).tolist()
    assert chat.logprobs([conversation, ids])[0].tolist() == chat.logprobs(ids).tolist()


def test_a_model_is_evaluated_in_memory(small, tmp_path):
    config = small("sft", steps=40, batch_size=16, eval={"size": 40, "every": 0})
    result = cohort.train(config, progress=False)
    other = cohort.Model(result.dir, device="cpu")
    scores = other.evaluate()
    assert scores["pass@1"] == result.after and scores["held_out"] == 40 and scores["correct"] == "task >= 1"
    assert 0 < scores["val_loss"] < 2 and other.evaluate(overrides={"eval.size": 10})["held_out"] == 10
    judged = []

    def mine(completions, answers, **fields):
        judged.extend(completions)
        return [1.0] * len(completions)
    by_function = config | {"rewards": [{"name": "mine"}], "eval": {"size": 40, "correct": {"reward": "mine"}}}
    assert other.evaluate(by_function, rewards={"mine": mine})["pass@1"] == 1 and len(judged) == 40
    other.parameters()["lm_head.weight"].numpy()[:] = 0
    # The weights in memory, not those in the folder.
    assert other.evaluate()["val_loss"] == pytest.approx(np.log(other.config["vocab_size"]), rel=1e-6)
    other.export(tmp_path / "exported")
    with pytest.raises(cohort.InputError, match="belongs to no run; hint: give a configuration"):
        cohort.Model(str(tmp_path / "exported"), device="cpu").evaluate()
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    with pytest.raises(cohort.InputError, match="nothing is held out"):
        other.evaluate(config | {"data": {"jsonl": {"path": rows}, "held_out_fraction": 0}})


def test_a_model_is_exported_as_it_is_in_memory(model, small, tmp_path):
    other = cohort.Model(model.folder, device="cpu")
    other.parameters()["lm_head.weight"].numpy()[0] = 7
    other.export(tmp_path / "whole")
    again = cohort.Model(str(tmp_path / "whole"), device="cpu")
    for name, value in other.parameters().items():
        np.testing.assert_array_equal(value.numpy(), again.parameters()[name].numpy())
    options = {"temperature": 0, "max_completion_length": 6}
    assert again.generate("1+1=", **options) == other.generate("1+1=", **options)
    with pytest.raises(cohort.InputError, match="whole"):
        other.export(tmp_path / "whole")
    with pytest.raises(cohort.InputError, match="merged: .* has no adapter"):
        other.export(tmp_path / "merged", merged=True)
    other.export(tmp_path / "half", dtype="bf16")
    assert (tmp_path / "half/model.safetensors").stat().st_size < 0.6 * (tmp_path / "whole/model.safetensors").stat().st_size
    adapted = cohort.Model(cohort.train(small("sft", init_from=str(tmp_path / "whole"), lora={"rank": 2}, learning_rate=0.1),
                                        progress=False).dir, device="cpu")
    adapted.export(tmp_path / "adapter")
    assert (tmp_path / "adapter/adapter_model.safetensors").exists()
    adapted.export(tmp_path / "half_adapter", dtype="bf16")
    sizes = [(tmp_path / name / "adapter_model.safetensors").stat().st_size for name in ("half_adapter", "adapter")]
    assert sizes[0] < 0.8 * sizes[1]
    for wrong in ("int8", 5):
        with pytest.raises(cohort.InputError, match="int8|name of a dtype"):
            adapted.export(tmp_path / "wrong", dtype=wrong)
    adapted.export(tmp_path / "merged", merged=True)
    expected = adapted.logprobs("12+7=19").numpy()
    for folder, base in (("adapter", str(tmp_path / "whole")), ("merged", "")):
        found = cohort.Model(str(tmp_path / folder), device="cpu", base=base)
        np.testing.assert_allclose(found.logprobs("12+7=19").numpy(), expected, atol=1e-5)
    assert np.abs(expected - again.logprobs("12+7=19").numpy()).max() > 1e-3


def test_weights_in_fewer_bits_are_the_numbers_of_an_exported_folder(model, tmp_path):
    text = "0101="
    plain = model.logprobs(text).numpy()
    for weights in ("int8", "nf4", "nf4_single"):
        small = cohort.Model(model.folder, device="cpu", weights=weights)
        assert all("_proj" not in name for name in small.parameters())
        small.export(tmp_path / weights, dtype="float32")
        whole = cohort.Model(tmp_path / weights, device="cpu")
        np.testing.assert_array_equal(small.logprobs(text).numpy(), whole.logprobs(text).numpy())
        assert np.abs(small.logprobs(text).numpy() - plain).max() > 0
    with pytest.raises(cohort.InputError, match='weights: expected "bf16", "int8", "nf4" or "nf4_single", got "fp4"'):
        cohort.Model(model.folder, device="cpu", weights="fp4")


def test_an_exported_adapter_keeps_its_precision(model, small, tmp_path):
    adapted = cohort.Model(cohort.train(small("sft", init_from=model.folder, lora={"rank": 2}, precision={"cache": "fp8"}),
                                        progress=False).dir, device="cpu")
    adapted.export(tmp_path / "adapter")
    assert (tmp_path / "adapter/precision.json").read_text() == '{"cache": "fp8"}\n'
    found = cohort.Model(str(tmp_path / "adapter"), device="cpu", base=model.folder)
    np.testing.assert_array_equal(found.logprobs("12+7=19").numpy(), adapted.logprobs("12+7=19").numpy())


def test_settings_are_read_while_others_log(model, tmp_path, caplog):
    """A message of the first use, whose handler lets other threads run, does not stop them."""
    caplog.set_level(logging.INFO, logger="cohort")
    model.export(tmp_path / "noted")
    (tmp_path / "noted/generation_config.json").write_text('{"num_beams": 4, "max_new_tokens": 3}')
    noted = cohort.Model(tmp_path / "noted", device="cpu")

    class Sleeps(logging.Handler):
        def emit(self, record):
            time.sleep(0.2)
    handler = Sleeps()
    logging.getLogger("cohort").addHandler(handler)
    try:
        threads = [threading.Thread(target=noted.generate, args=("1+1=",), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads) and "num_beams" in caplog.text
    finally:
        logging.getLogger("cohort").removeHandler(handler)


def test_one_completion_is_generated(model):
    for option in ("n", "num_return_sequences", "num_generations"):
        assert model.generate("1+1=", **{option: 1}) == model.generate("1+1=")
        with pytest.raises(cohort.InputError, match=r"one completion; hint: Engine\(model\).rollouts"):
            model.generate("1+1=", **{option: 2})


def test_arguments_of_other_types_are_named(model):
    engine = cohort.Engine(model)
    for call in (lambda: engine.rollouts(PROMPTS, seed=-1), lambda: engine.rollouts(PROMPTS, "2"),
                 lambda: model.generate("1+1=", step=1.5)):
        with pytest.raises(cohort.InputError, match="num_generations, seed and step are whole numbers from 0, got"):
            call()
    for call in (lambda: cohort.Engine("folder"), lambda: cohort.Engine(model, max_concurrent="2")):
        with pytest.raises(cohort.InputError, match="Engine: expected a cohort.Model and numbers, got"):
            call()
    with pytest.raises(cohort.InputError, match="memory_fraction"):
        cohort.Engine(model, memory_fraction="all")

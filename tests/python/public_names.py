"""Every public name as typed code uses it. test_typing.py checks this file with mypy --strict; it is never executed."""
import pathlib
from collections.abc import Iterator
from typing import Any

import cohort
import cohort.torch
import numpy as np
import numpy.typing as npt
from cohort import ops

Array = npt.NDArray[np.float64]


def tensors(x: Array, t: cohort.Tensor) -> Array:
    shared: cohort.Tensor = cohort.from_dlpack(x, copy=True)
    shape: tuple[int, ...] = t.shape + t.strides
    texts: list[str] = [t.dtype, t.device]
    t.requires_grad = t.data_ptr > 0
    t.backward(grad=x)
    grad: cohort.Tensor | None = t.grad
    t.zero_grad()
    row: cohort.Tensor = t.detach().to("cpu")[0, ..., 1:3][np.int64(0)][...]
    rows: list[cohort.Tensor] = list(t)
    sums: cohort.Tensor = -t + 1 - 2.5 * row / t * np.float32(3) / rows[len(t) - 1]
    reflected: cohort.Tensor = 1 / t
    exported: npt.NDArray[Any] = np.from_dlpack(t) + np.asarray(t) + np.exp(t.numpy())
    value: float = sums.item() + reflected.tolist()[0]
    cohort.synchronize("cpu")
    print(shared, shape, texts, grad, value, cohort.cuda_device_count(), cohort.__version__, bool(t[0]))
    array: npt.NDArray[Any] = t.numpy()
    print(array.shape, {t: exported}, t == t, t in rows)
    return exported


def differentiable(x: Array, w: cohort.Tensor, ids: Any) -> Iterator[cohort.Tensor]:
    for unary in (ops.neg, ops.exp, ops.log, ops.sqrt, ops.square, ops.tanh, ops.sigmoid, ops.relu, ops.silu, ops.gelu,
                  ops.gelu_tanh, ops.swiglu, ops.geglu, ops.geglu_tanh, ops.sum):
        yield unary(x)
    for binary in (ops.add, ops.sub, ops.mul, ops.div, ops.sigmoid_gate):
        yield binary(x, w)
    yield ops.flash_attention(x, x, x, causal=False, window=3, window_right=1, soft_cap=2.0, scale=0.5, slopes=w, bias=w, sinks=w,
                              prefix_lm=ids, tiles=ops.tile_mask(ids), cu_seqlens=ids, precision="fp8", scales=w, k_mean=w)
    yield ops.layer_norm(ops.rms_norm(x, w, eps=1e-6, weight_offset=1.0), w, bias=None, eps=1e-6)
    yield ops.linear(ops.embedding(w, ids), w, bias=w)
    yield from ops.token_log_probs(x, w, ids, temperature=0.5)
    values, scales = ops.quantize(x, "e4m3", blocks=True, transpose=True)
    yield ops.dequantize(values, scales, "float64", blocks=True)
    tokens, log_probs = ops.sample(x, temperature=1.0, top_k=1, top_p=0.5, min_p=0.1, seed=3)
    yield ops.reshape(ops.scale(tokens, 2.0), log_probs.shape)


def torch_functions(x: Any) -> Any:
    return cohort.torch.flash_attention(x, x, x, window=3), cohort.torch.rms_norm(x, x), cohort.torch.swiglu(x)


def models(path: str) -> list[str]:
    model = cohort.Model(path, device="cpu", dtype="float32", base="", context=16)
    conversation = [{"role": "user", "content": model.decode(model.encode(model.folder))}]
    text: str = model.generate(conversation, temperature=0.5) + model.chat_prompt(conversation)
    text += model.chat_text(conversation, None, None)
    pieces: list[str] = list(model.stream(text, seed=1, step=2))
    engine = cohort.Engine(model, max_concurrent=2, memory_fraction=0.25, max_cache_tokens=1000)
    rollouts: cohort.Rollouts = engine.rollouts(pieces, num_generations=2, seed=1, step=3, top_k=2)
    engine.release_cache()
    weights: dict[str, cohort.Tensor] = model.parameters()
    config: dict[str, Any] = model.config
    logprobs: cohort.Tensor = model.logprobs(text, temperature=0.5)
    each: list[cohort.Tensor] = model.logprobs([text, text]) + model.logprobs([[1, 2]]) + model.logprobs([conversation])
    rows: cohort.Tensor = model.embed([text, text], pooling="mean", normalize=False, prompt="query") / model.embed(text).item()
    scores: dict[str, Any] = model.evaluate({"steps": 1}, rewards={"length": length_reward}, environments={}, overrides={"eval.size": 5})
    model.export(pathlib.Path("out"), dtype="bf16", merged=False)
    cohort.set_log_level("warning")
    print(weights, config, logprobs, each, rows, scores, rollouts.tokens, rollouts.loss_mask, rollouts.logprobs,
          rollouts.sampling_logprobs, rollouts.entropies, rollouts.lengths, rollouts.prompt_lengths)
    return rollouts.texts + rollouts.stop_reasons


class Stops(cohort.Callback):
    def on_stage(self, name: str, step: int, steps: int) -> None:
        print(name, step, steps)

    def on_step(self, metrics: dict[str, Any]) -> bool | None:
        return bool(metrics["loss"] < 0.1)

    def on_completion(self, record: dict[str, Any]) -> None:
        print(record)

    def on_message(self, text: str) -> None:
        print(text)

    def on_end(self) -> None:
        print("ended")


def length_reward(completions: list[str], **fields: Any) -> list[float | None]:
    return [float(len(completion)) or None for completion in completions]


@cohort.conversational
def turns_reward(completions: list[list[dict[str, str]]], **fields: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def runs(config: dict[str, Any]) -> float:
    try:
        result: cohort.TrainResult = cohort.train(config, data=[{"prompt": "a"}], callbacks=[Stops()],
                                                  rewards={"length": length_reward, "turns": turns_reward}, gpus=2, progress=False)
        for metrics in cohort.train_steps(resume=result.dir, callbacks=[cohort.Progress()], overrides={"steps": 5}):
            print(metrics["loss"], result.metrics[0], result.measure, result.finished)
    except cohort.InputError as error:
        raise cohort.Error(str(error)) from None
    return result.after - result.before


def followers(run: pathlib.Path) -> cohort.Follow:
    cohort.Follow("trackio", project="mine").until_end(run)
    return cohort.Follow("wandb", offline=True)

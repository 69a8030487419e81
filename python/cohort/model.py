"""Trained models: `Model` loads one and generates texts, `Engine` samples rollouts as arrays."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any, SupportsIndex, Union, overload

from . import _cohort
from ._background import Background
from ._cohort import Tensor
from .training import Config, request_of

__all__ = ["ChatPrompt", "Engine", "Model", "Prompt", "Rollouts"]

Prompt = Union[str, list[int], list[dict[str, Any]]]


class ChatPrompt(str):
    """A conversation that the chat template has rendered: a prompt to which no special tokens are added."""


@dataclass(frozen=True, eq=False)
class Rollouts:
    """N = prompts x num_generations sampled completions, those of a prompt one after the other. max_length: tokens of
    the longest, with its prompt."""
    tokens: Tensor  # [N, max_length] int32: prompt and completion, then the end of sequence
    loss_mask: Tensor  # [N, max_length] uint8: 1 for sampled tokens
    logprobs: Tensor  # [N, max_length] float64: of the sampled tokens under the model, at the temperature
    sampling_logprobs: Tensor  # [N, max_length] float64: under the distribution that they were drawn from
    entropies: Tensor  # [N, max_length] float64, in nats
    lengths: Tensor  # [N] int64: tokens of prompt and completion
    prompt_lengths: Tensor  # [N] int64
    texts: list[str]  # the completions
    stop_reasons: list[str]  # "stop_token", "stop_string", "length" or "context"


@contextmanager
def _typed(message: str) -> Iterator[None]:
    """InputError in place of the signatures that the extension module lists for arguments of other types."""
    try:
        yield
    except TypeError as error:
        if "incompatible function arguments" not in str(error):
            raise
        raise _cohort.InputError(f"{message}, got {str(error).rpartition('Invoked with types: ')[2]}") from None


def _items(value: Any) -> list[Any] | None:
    """The items of a list or an array; None for other values."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return None if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable) else list(value)


def _is_id(item: Any) -> bool:
    return isinstance(item, SupportsIndex) and not isinstance(item, Iterable)


def _text(text: str, name: str) -> str:
    """A text that UTF-8 can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _cohort.InputError(f"{name}: {error}") from None
    return text


def _plain(prompt: Any) -> Any:
    """A prompt as Engine.rollout_arrays() takes it."""
    if isinstance(prompt, ChatPrompt):
        return {"rendered": str(prompt)}
    if isinstance(prompt, str):
        return _text(prompt, "prompt")
    items = _items(prompt)
    if items is not None and all(map(_is_id, items)):
        ids = [index(item) for item in items]
        if not all(-2**31 <= token < 2**31 for token in ids):
            raise _cohort.InputError(f"prompt: token ids {str(ids)[:60]} are outside of the vocabulary")
        return ids
    if items is not None and all(isinstance(item, Mapping) for item in items):
        return [dict(item) for item in items]
    raise _cohort.InputError(
        "prompt: expected a text, token ids, or a conversation as a list of {\"role\", \"content\"}, got "
        f"{str(prompt)[:60]}; hint: Engine.rollouts() takes several prompts: rollouts([conversation])")


# Names of transformers, TRL and vLLM.
_NAMES = {"max_new_tokens": "max_completion_length", "max_tokens": "max_completion_length", "stop": "stop_strings",
          "stop_token_ids": "stop_tokens", "n": "num_generations", "num_return_sequences": "num_generations"}


def _translated(options: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if not options.pop("do_sample", True):
        options = options | {"temperature": 0}
    for name, value in options.items():
        own = _NAMES.get(name, name)
        if own in out and own != "num_generations":
            raise _cohort.InputError(f"{name} is {own} here, which is given too; hint: leave one of them out")
        out[own] = value
    return out


def _of_one(options: dict[str, Any]) -> dict[str, Any]:
    options = _translated(options)
    if options.pop("num_generations", 1) != 1:
        raise _cohort.InputError("generate: it samples one completion; hint: Engine(model).rollouts(prompts, num_generations)")
    return options


class Engine(_cohort.Engine):
    """Samples completions by continuous batching over a paged cache of keys and values, which is kept between calls. Calls from
    several threads run one after the other.

    max_concurrent: sequences that are computed at a time, 0: as many as fit. memory_fraction: upper limit of the cache, relative
    to the free memory. max_cache_tokens: its limit in tokens, 0: none. InputError for other values.
    """

    def __init__(self, model: _cohort.LoadedModel, *, max_concurrent: int = 0, memory_fraction: float = 0.5,
                 max_cache_tokens: int = 0) -> None:
        with _typed("Engine: expected a cohort.Model and numbers"):
            super().__init__(model, max_concurrent=max_concurrent, memory_fraction=memory_fraction,
                             max_cache_tokens=max_cache_tokens)

    def rollouts(self, prompts: str | Sequence[Prompt], num_generations: int = 1, *, seed: int = 0, step: int = 0,
                 chat_template_kwargs: Mapping[str, Any] | None = None, tools: Sequence[Mapping[str, Any]] | None = None,
                 **sampling: Any) -> Rollouts:
        """Samples `num_generations` completions of a text, or of each prompt of a list: a text, token ids, or a conversation, a
        list of {"role", "content"}, that the chat template renders as Model.chat_prompt() does. The tokens depend on (seed,
        step), the prompt, its position and the weights only.

        sampling: temperature (1; 0: greedy), top_k, top_p, min_p, max_completion_length (64), repetition_penalty,
        presence_penalty, frequency_penalty, logit_bias (["ID:BIAS"]), stop_tokens, stop_strings; by default as in the model's
        run, else in its generation_config.json. InputError names a wrong key or value, or the prompt that does not fit into
        the context.
        """
        return Rollouts(**self._arrays([prompts] if isinstance(prompts, str) else prompts, num_generations, seed, step, None,
                                       chat_template_kwargs, tools, **sampling))

    def _arrays(self, prompts: Sequence[Prompt], count: int, *arguments: Any, **sampling: Any) -> dict[str, Any]:
        sampling = _translated({"num_generations": count} | sampling)
        every = [_plain(prompt) for prompt in prompts]
        with _typed("rollouts: num_generations, seed and step are whole numbers from 0"):
            return self.rollout_arrays(every, sampling.pop("num_generations"), *arguments, **sampling)


_DTYPES = {"f32": "float32", "f64": "float64", "bf16": "bfloat16", "f16": "float16"}  # the names in configurations


class Model(_cohort.LoadedModel):
    """A model from a folder in Hugging Face's format, a run, or one of its checkpoints.

    device: "cpu" or "cuda:N"; default: a GPU if there is one. dtype: "float32" (default on CPUs), "bfloat16" (default on
    GPUs) or "float64"; also "f32", "bf16" and "f64". base: the folder of an adapter's base model. context: at least this many
    tokens, where the model may be extended. weights: of the linear layers, "int8", "nf4" or "nf4_single" (frozen), or "bf16"
    (dtype); default: as trained or stored. InputError if there is no usable model.
    """

    def __init__(self, path: str | os.PathLike[str], *, device: str | None = None, dtype: str | None = None, base: str = "",
                 context: int = 0, weights: str = "") -> None:
        device = device or ("cuda:0" if _cohort.cuda_device_count() > 0 else "cpu")
        dtype = _DTYPES.get(dtype, dtype) if dtype else "float32" if device == "cpu" else "bfloat16"
        path = os.path.abspath(path) if os.path.exists(path) else os.fspath(path)  # a later chdir() changes nothing
        super().__init__(path, device, dtype, base, context, weights)

    @cached_property
    def _engine(self) -> Engine:
        return Engine(self)

    def chat_prompt(self, messages: list[dict[str, Any]], *, chat_template_kwargs: Mapping[str, Any] | None = None,
                    tools: Sequence[Mapping[str, Any]] | None = None) -> ChatPrompt:
        """The text of a conversation, a list of {"role", "content"}, up to the assistant's next turn. The system message, the
        template's variables and the tools are those of the model's run, unless they are given. InputError without a chat
        template, or if it rejects the messages."""
        return ChatPrompt(self.chat_text(messages, chat_template_kwargs, tools))

    def generate(self, prompt: Prompt, **options: Any) -> str:
        """The completion of a text, token ids or a conversation; options as in Engine.rollouts(): seed=0 by default, so that
        equal calls give equal texts."""
        return self._engine.rollouts([prompt], **_of_one(options)).texts[0]

    def stream(self, prompt: Prompt, *, seed: int = 0, step: int = 0, chat_template_kwargs: Mapping[str, Any] | None = None,
               tools: Sequence[Mapping[str, Any]] | None = None, **sampling: Any) -> Iterator[str]:
        """The same completion in pieces, as its tokens are sampled. Closing the iterator ends it."""
        is_open = [True]

        def run(put: Any) -> None:
            def on_text(_: int, piece: str) -> bool:
                put(piece)
                return bool(is_open)
            self._engine._arrays([prompt], 1, seed, step, on_text, chat_template_kwargs, tools, **_of_one(sampling))
        return Background().begin(run, stop=is_open.clear)

    @overload
    def logprobs(self, text: Prompt, *, temperature: float = 1.0) -> Tensor: ...
    @overload
    def logprobs(self, text: list[str] | list[list[int]] | list[list[dict[str, Any]]] | list[Prompt], *,
                 temperature: float = 1.0) -> list[Tensor]: ...

    def logprobs(self, text: Any, *, temperature: float = 1.0) -> Tensor | list[Tensor]:
        """[T - 1]: log-probs of the T tokens of a text, token ids or a whole conversation, each given those before it. A list of
        these for a list of texts, which are computed together, to the same bits. InputError for fewer than 2 tokens or more than
        the context holds."""
        items = _items(text)
        if items is not None and not any(isinstance(item, Mapping) or _is_id(item) for item in items):
            return self.each_logprobs([_plain(item) for item in items], float(temperature))
        return self.each_logprobs([_plain(text)], float(temperature))[0]

    def embed(self, texts: str | Sequence[str], *, pooling: str | None = None, normalize: bool = True, prompt: str = "") -> Tensor:
        """[N, d_model] float32: the embeddings of N texts as `cohort embed` computes them, to its bits; of one text, [d_model].
        They do not depend on the other texts. pooling: "mean", "cls" or "last", by default as a folder of sentence-transformers
        says, else the mean, or last of a decoder. normalize=False: not divided by their length. prompt: the name of one of the
        folder, put before texts. InputError for a model of images, and naming the text that has no tokens."""
        items = [texts] if isinstance(texts, str) else _items(texts)
        if items is None:
            raise _cohort.InputError(f"texts: expected a text or a list of texts, got {str(texts)[:60]}")
        for i, item in enumerate(items):
            if not isinstance(item, str):
                raise _cohort.InputError(f"texts[{i}]: expected a text, got {str(item)[:60]}")
            _text(item, f"texts[{i}]")
        with _typed("embed: pooling and prompt are names, normalize is True or False"):
            rows = self.each_embedding(items, prompt, pooling or "", normalize)
        return rows[0] if isinstance(texts, str) else rows

    def evaluate(self, config: Config | None = None, *, rewards: Mapping[str, Callable[..., Any]] | None = None,
                 environments: Mapping[str, Callable[..., Any]] | None = None,
                 overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The scores of `cohort eval`: pass@1 and others on held-out problems and sets, or "val_loss" on text, by name; None for
        what cannot be measured. config: the one with the data and the rewards, by default that of the model's run; functions and
        overrides as in train(). InputError if nothing is held out."""
        steps = Background()
        training = _cohort.Training(**request_of(steps, config, rewards, environments, overrides=overrides))
        try:
            next(steps.begin(lambda put: training.evaluate(self), training.stop))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        raise AssertionError("an evaluation yields nothing")

    def export(self, folder: str | os.PathLike[str], *, dtype: str | None = None, merged: bool = False) -> None:
        """Writes the model as it is in memory into a new folder in Hugging Face's format; an adapter alone in PEFT's, unless
        `merged`, which writes the whole model. dtype: as in Model(), or "float16"; by default that of the model."""
        dtype = dtype or next(iter(self.parameters().values())).dtype
        with _typed("export: expected a folder, and the name of a dtype"):
            self.export_folder(os.fspath(folder), _DTYPES.get(dtype, dtype), merged)

"""10,000 calls of the public functions with arguments of random types: only exceptions, no crash."""
import inspect
import random

import cohort
import numpy as np
import pytest
from cohort import ops

try:
    import cohort.torch as cohort_torch
    import torch
except ImportError:
    torch = None

CALLS = 10_000


def arrays(rng):
    """An array of a random dtype, shape and layout; most of them small and plausible."""
    shape = [rng.choice([0, 1, 2, 3, 4, 8]) for _ in range(rng.randint(0, 5))]
    x = np.asarray(rng.choice([-1, 0, 1, 2.5, 1e30, float("nan")]) * np.ones(shape))
    with np.errstate(all="ignore"):
        x = x.astype(rng.choice([np.float64] * 4 + [np.float32] * 3 + [np.int32, np.int64, np.uint8, np.float16, bool]))
    layout = rng.randrange(5)
    if layout == 1 and x.ndim:
        x = x[::rng.choice([-1, 2])]
    if layout == 2:
        x = x.T
    if layout == 3:
        x.flags.writeable = False
    return x


def make_argument(rng):
    kind = rng.randrange(12)
    if kind < 5:
        x = arrays(rng)
        if torch and rng.random() < 0.5 and all(step >= 0 for step in x.strides) and x.flags.writeable:
            return torch.from_numpy(x).requires_grad_(x.dtype.kind == "f" and rng.random() < 0.5)
        return x
    if kind < 8:
        try:
            t = cohort.from_dlpack(arrays(rng), copy=rng.random() < 0.5)
            t.requires_grad = rng.random() < 0.7
            return t
        except cohort.Error:
            return None
    return rng.choice([None, True, False, 0, 1, -1, 3, 2**31, 2**63, -2**70, 0.5, -1e300, float("nan"), float("inf"), "cpu",
                       "cuda:7", "float32", "\0", b"x", [], [1, -1], [2, 3, None], (1, 0), (1, 1), {}, {"a": 1}, object(),
                       object, len, cohort.Tensor, lambda *a, **k: 0])


def methods(model):
    return [model.generate, model.logprobs, model.embed, model.encode, model.decode, model.chat_prompt, model.parameters,
            lambda *a, **k: list(model.stream(*a, **k)), cohort.Engine(model).rollouts, lambda *a, **k: cohort.Engine(model, *a, **k),
            cohort.Engine(model).release_cache]


def functions():
    names = [(ops, n) for n in ops.__all__] + [(cohort, n) for n in cohort.__all__]
    names += [(cohort_torch, n) for n in cohort_torch.__all__] if torch else []
    return [getattr(m, n) for m, n in names if callable(getattr(m, n)) and not inspect.isclass(getattr(m, n))]


MEMBERS = [n for n in dir(cohort.Tensor) if not n.startswith("_")] + [
    "__dlpack__", "__dlpack_device__", "__repr__", "__array__", "__getitem__", "__len__", "__iter__", "__bool__", "__add__",
    "__rtruediv__", "__neg__", "__eq__", "__lt__"]
KEYWORDS = ["causal", "window", "window_right", "soft_cap", "scale", "slopes", "bias", "sinks", "prefix_lm", "cu_seqlens",
            "eps", "weight_offset", "copy", "stream", "max_version", "dl_device", "temperature", "top_k",
            "top_p", "min_p", "seed", "tiles", "max_completion_length", "num_generations", "max_concurrent",
            "max_cache_tokens", "pooling", "normalize", "prompt", "nonsense"]


def use(rng, result):
    """What callers do with results: more calls, and a backward."""
    for t in result if isinstance(result, tuple) else [result]:
        if isinstance(t, cohort.Tensor) and t.requires_grad and rng.random() < 0.5:
            t.backward(np.ones(t.shape, t.dtype) if t.dtype != "bfloat16" else None)


@pytest.mark.filterwarnings("ignore:Converting a tensor")
def test_calls_with_random_arguments(model):
    rng = random.Random(20)
    targets = {f"{f.__module__}.{f.__name__}": f for f in functions()} | {f"method {i}": f for i, f in enumerate(methods(model))}
    succeeded = dict.fromkeys(targets, 0)
    for call in range(CALLS):
        arguments = [make_argument(rng) for _ in range(rng.randint(0, 4))]
        keywords = {k: make_argument(rng) for k in rng.sample(KEYWORDS, rng.choice([0, 0, 0, 1, 2]))}
        if rng.random() < 0.3:  # attention and norms need shapes that agree
            shape = [rng.choice([1, 2, 4]) for _ in range(rng.randint(1, 4))]
            x = np.ones(shape, rng.choice([np.float32, np.float64]))
            if torch and rng.random() < 0.5:
                x = torch.from_numpy(x)
            arguments = rng.choice([[x, x, x], [x, x], [x, x[0]], [x], ["1+1="], [["1+1=", "2"]], [[5, 6]], []])
        try:
            if call % 5 == 0:
                t = cohort.from_dlpack(arrays(rng), copy=True)
                name = rng.choice(MEMBERS)
                value = getattr(t, name)
                if callable(value):
                    value(*arguments[:rng.randint(0, 2)], **keywords)
                else:
                    setattr(t, name, make_argument(rng))
            else:
                name = rng.choice(list(targets))
                result = targets[name](*arguments, **keywords)
                succeeded[name] += 1
                use(rng, result)
        except (cohort.Error, TypeError, ValueError, AttributeError, BufferError, OverflowError, IndexError, RuntimeError):
            pass
    # The test is about arguments that reach the code, too.
    reached = [name for name, count in succeeded.items() if count > 0]
    assert len(reached) > 0.8 * len(succeeded), sorted(set(succeeded) - set(reached))

"""Kernels as functions of torch tensors, with gradients: `flash_attention`, `rms_norm`, `swiglu`.

Work is enqueued on torch's current stream, and torch allocates the outputs. An eager call is a torch.autograd.Function;
torch.compile traces the custom ops `torch.ops.cohort.*`. There are no second derivatives. Needs torch 2.10 or newer.
"""
import math

import torch
from torch import Tensor, library

from . import _cohort

if not hasattr(Tensor, "__dlpack_c_exchange_api__"):
    raise ImportError(f"cohort.torch needs torch 2.10 or newer, this is {torch.__version__}; hint: upgrade torch")

__all__ = ["flash_attention", "rms_norm", "swiglu"]


def _like(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _statistics(x):
    return torch.float32 if x.dtype == torch.bfloat16 else x.dtype


def _empty(x, *shape):  # faster than x.new_empty()
    return torch.empty(shape, dtype=_statistics(x), device=x.device)


def _cast(x, dtype):
    return x if x is None else x.to(dtype).contiguous()


def _define(name, schema, outputs, gradients, first_saved=1, result="(Tensor, Tensor)"):
    """A function of arguments with this schema, tensors first. outputs(*arguments): memory for the result and for what
    else the kernel writes; those from first_saved on are kept. gradients: functions that make the memory of the gradients
    of the first arguments, each of its argument. The kernels take (*outputs, *arguments) and (*gradients, dy, *kept,
    *arguments), with None for absent tensors."""
    run, run_backward = getattr(_cohort, f"raw_{name}_forward"), getattr(_cohort, f"raw_{name}_backward")
    kinds = [kind.split()[0] for kind in schema.split(", ")]
    tensors, count = sum(kind.startswith("Tensor") for kind in kinds), len(gradients)

    def compute(*arguments):
        out = outputs(*arguments)
        run(*out, *arguments)
        return out

    def compute_backward(dy, kept, *arguments):
        grads = [x if x is None else make(x) for make, x in zip(gradients, arguments)]
        run_backward(*grads, dy.contiguous(), *kept, *arguments)
        return [g if g is None else g.to(x.dtype) for g, x in zip(grads, arguments)]

    def one_or_all(out):
        return out if len(out) > 1 else out[0]

    op = library.custom_op(f"cohort::{name}", lambda *arguments: one_or_all(compute(*arguments)), mutates_args=(),
                           schema=f"({schema}) -> {result}")
    op.register_fake(lambda *arguments: one_or_all(outputs(*arguments)))
    op_backward = library.custom_op(
        f"cohort::{name}_backward", lambda *arguments: [g for g in compute_backward(*arguments) if g is not None],
        mutates_args=(), schema=f"(Tensor dy, Tensor[] kept, {schema}) -> Tensor[]")
    op_backward.register_fake(
        lambda dy, kept, *arguments: [_like(x) for x in arguments[:count] if x is not None])

    def keep(ctx, inputs, output):
        out = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*out[1:])
        ctx.save_for_backward(*inputs[:tensors], *out[first_saved:])
        ctx.rules = inputs[tensors:]

    def op_gradients(ctx, dy, *_):
        saved = ctx.saved_tensors
        grads = iter(op_backward(dy, list(saved[tensors:]), *saved[:tensors], *ctx.rules))
        return (*[x if x is None else next(grads) for x in saved[:count]], *[None] * (len(kinds) - count))
    op.register_autograd(op_gradients, setup_context=keep)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rest, *inputs):  # each argument, a second output and a setup_context() cost time per call
            out = compute(*inputs, *rest)
            ctx.save_for_backward(*inputs, *out[first_saved:])
            ctx.rest = rest
            return out[0]

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dy):
            saved = ctx.saved_tensors  # once: torch.utils.checkpoint recomputes them at the first access
            return None, *compute_backward(dy, saved[count:], *saved[:count], *ctx.rest)

    def call(*arguments):
        if torch.compiler.is_compiling():
            out = op(*arguments)
            return out[0] if isinstance(out, tuple) else out
        return Function.apply(arguments[count:], *arguments[:count])
    return call


_attention = _define(
    "attention", "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, Tensor? cu_seqlens, Tensor? slopes, "
    "Tensor? prefix_lm, Tensor? tiles, bool causal, int window, int window_right, float soft_cap, float scale",
    lambda q, *_: (_like(q), _empty(q, q.shape[-2], math.prod(q.shape[:-2]))), [_like] * 5, first_saved=0)
_rms_norm = _define("rms_norm", "Tensor x, Tensor w, float eps",
                    lambda x, *_: (_like(x), _empty(x, math.prod(x.shape[:-1]))), [_like, lambda w: _empty(w, *w.shape)])
_swiglu = _define("swiglu", "Tensor x", lambda x: (x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),), [_like],
                  result="Tensor")


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, window: int = 0, window_right: int = -1,
                    soft_cap: float = 0.0, scale: float = 0.0, bias: Tensor | None = None, sinks: Tensor | None = None,
                    slopes: Tensor | None = None, prefix_lm: Tensor | None = None, tiles: Tensor | None = None,
                    cu_seqlens: Tensor | None = None) -> Tensor:
    """Attention as `cohort.ops.flash_attention` defines it. q: [B, T, H, D], or packed [T, H, D] with cu_seqlens [S + 1];
    k, v: with Hkv heads, of which H is a multiple; any strides -> the shape of q. bias [H, 2 R + 1] and sinks [H] are
    differentiable, slopes [H] is not; tiles: of `cohort.ops.tile_mask`."""
    f, i = _statistics(q), torch.int32
    return _attention(q, k, v, _cast(bias, f), _cast(sinks, f), _cast(cu_seqlens, i), _cast(slopes, f), _cast(prefix_lm, i),
                      _cast(tiles, i), causal, window, window_right, float(soft_cap), float(scale))


def rms_norm(x: Tensor, w: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * w over the last dimension. x: [..., C], w: [C]."""
    return _rms_norm(x.contiguous(), w.contiguous(), float(eps))


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up -> [..., F]. x: [..., 2 F], gate | up side by side."""
    return _swiglu(x.contiguous())

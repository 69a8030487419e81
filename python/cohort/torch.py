"""Kernels as functions of torch tensors, with gradients: `flash_attention`, `rms_norm`, `swiglu`.

Work is enqueued on torch's current stream, and torch allocates the outputs. An eager call is a torch.autograd.Function;
torch.compile traces the custom ops `torch.ops.cohort.*`. There are no second derivatives. Needs torch 2.4 or newer.
"""
import torch
from torch import Tensor, library
from torch.utils.dlpack import to_dlpack

from . import _cohort

__all__ = ["flash_attention", "rms_norm", "swiglu"]


def _call(kernel, *arguments):
    device = arguments[0].device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    kernel(stream, *[to_dlpack(a) if isinstance(a, Tensor) else a for a in arguments])


def _like(x):
    return x.new_empty(x.shape)


def _statistic(x, shape):
    return x.new_empty(shape, dtype=torch.float32 if x.dtype == torch.bfloat16 else x.dtype)


def _define(name, schema, outputs, gradients, first_saved=1, result="(Tensor, Tensor)"):
    """A function of arguments with this schema, tensors first. outputs(*arguments): memory for the result and for what
    else the kernel writes; those from first_saved on are kept. gradients(*arguments): memory for the gradients of the
    first arguments. The kernels take (stream, *outputs, *arguments) and (stream, *gradients, dy, *kept, *arguments)."""
    run, run_backward = getattr(_cohort, f"raw_{name}_forward"), getattr(_cohort, f"raw_{name}_backward")
    kinds = [kind.split()[0] for kind in schema.split(", ")]
    tensors = sum(kind.startswith("Tensor") for kind in kinds)

    def fake(*arguments):
        out = outputs(*arguments)
        return out if len(out) > 1 else out[0]

    def forward(*arguments):
        out = fake(*arguments)
        _call(run, *(out if isinstance(out, tuple) else (out,)), *arguments)
        return out

    def fake_backward(dy, kept, *arguments):
        return [_like(x) for x in arguments[:len(gradients(*arguments))]]

    def backward(dy, kept, *arguments):
        grads = gradients(*arguments)
        _call(run_backward, *grads, dy.contiguous(), *kept, *arguments)
        return [g.to(x.dtype) for g, x in zip(grads, arguments)]

    def keep(ctx, inputs, output):
        out = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*out[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:tensors], *out[first_saved:])
        ctx.rules = inputs[tensors:]

    def differentiate(step):
        def of_result(ctx, dy, *_):
            if dy is None:
                return (None,) * len(kinds)
            saved = ctx.saved_tensors
            grads = step(dy, list(saved[tensors:]), *saved[:tensors], *ctx.rules)
            return (*grads, *[None] * (len(kinds) - len(grads)))
        return of_result

    op = library.custom_op(f"cohort::{name}", forward, mutates_args=(), schema=f"({schema}) -> {result}")
    op.register_fake(fake)
    op_backward = library.custom_op(f"cohort::{name}_backward", backward, mutates_args=(),
                                          schema=f"(Tensor dy, Tensor[] kept, {schema}) -> Tensor[]")
    op_backward.register_fake(fake_backward)
    op.register_autograd(differentiate(op_backward), setup_context=keep)

    def forward_with_context(ctx, *arguments):  # a setup_context() would cost more per call
        out = forward(*arguments)
        keep(ctx, arguments, out)
        return out

    function = type(name, (torch.autograd.Function,), {
        "forward": staticmethod(forward_with_context),
        "backward": staticmethod(torch.autograd.function.once_differentiable(differentiate(backward)))})

    def call(*arguments):
        out = (op if torch.compiler.is_compiling() else function.apply)(*arguments)
        return out[0] if isinstance(out, tuple) else out
    return call


_attention = _define(
    "attention", "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, bool causal, int window, int window_right, "
    "float soft_cap, float scale", lambda q, *_: (_like(q), _statistic(q, (q.shape[-2], q.shape[:-2].numel()))),
    lambda q, k, v, *_: (_like(q), _like(k), _like(v)), first_saved=0)
_rms_norm = _define("rms_norm", "Tensor x, Tensor w, float eps",
                    lambda x, *_: (_like(x), _statistic(x, (x.shape[:-1].numel(),))),
                    lambda x, w, _: (_like(x), _statistic(w, w.shape)))
_swiglu = _define("swiglu", "Tensor x", lambda x: (x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),),
                  lambda x: (_like(x),), result="Tensor")


def flash_attention(q, k, v, *, causal=True, window=0, window_right=-1, soft_cap=0.0, scale=0.0, cu_seqlens=None):
    """Attention as `cohort.ops.flash_attention` defines it. q: [B, T, H, D], or packed [T, H, D] with cu_seqlens [S + 1]
    int32; k, v: with Hkv heads, of which H is a multiple; any strides -> the shape of q."""
    return _attention(q, k, v, cu_seqlens, causal, window, window_right, float(soft_cap), float(scale))


def rms_norm(x, w, eps=1e-5):
    """x / sqrt(mean(x^2) + eps) * w over the last dimension. x: [..., C], w: [C]."""
    return _rms_norm(x.contiguous(), w.contiguous(), float(eps))


def swiglu(x):
    """silu(gate) * up -> [..., F]. x: [..., 2 F], gate | up side by side."""
    return _swiglu(x.contiguous())

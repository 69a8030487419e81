"""Kernels as functions of torch, with gradients: `flash_attention`, `rms_norm`, `swiglu`.

Work is enqueued on torch's current stream and outputs are allocated by torch. An eager call is a torch.autograd.Function;
torch.compile sees the custom ops `torch.ops.cohort.*`, which have fake implementations. Gradients of gradients are not
available. Needs torch 2.4 or newer; InputError and cohort.Error as in `cohort.ops`.
"""
from typing import List, Optional, Tuple

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from ._cohort import raw

__all__ = ["flash_attention", "rms_norm", "swiglu"]


def _call(kernel, *arguments):
    """The kernel on the current stream of the first tensor's device; the tensors are shared as DLPack capsules."""
    device = arguments[0].device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    kernel(stream, *[to_dlpack(a.detach()) if isinstance(a, Tensor) else a for a in arguments])


def _statistic(x, shape):
    return x.new_empty(shape, dtype=torch.float32 if x.dtype == torch.bfloat16 else x.dtype)


def _like(x, columns=None):
    return x.new_empty(x.shape if columns is None else (*x.shape[:-1], columns))


# Each op: outputs (the first is the result, the others are kept), and how to run it and its backward, whose first
# arguments are its outputs and gradients.
def _attention_outputs(q, k, v, *_):
    return _like(q), _statistic(q, (q.shape[-2], q.shape[:-2].numel()))

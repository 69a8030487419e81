"""Cohort: kernels and trainers for language models, on CPUs and NVIDIA GPUs.

`ops` has differentiable ops on `Tensor`s, which share memory with other libraries by DLPack; `cohort.torch` the same as
functions of torch, imported separately. CUDA work of cohort is enqueued on a stream of its own.
"""
from . import ops
from ._cohort import Error, InputError, Tensor, cuda_device_count, from_dlpack, synchronize
from ._cohort import version as __version__

__all__ = ["Error", "InputError", "Tensor", "__version__", "cuda_device_count", "from_dlpack", "ops", "synchronize"]

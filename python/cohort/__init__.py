"""Cohort: kernels and trainers for language models, on CPUs and NVIDIA GPUs.

`ops` has differentiable ops on `Tensor`s, which share memory with other libraries by DLPack; `cohort.torch` the same as
functions of torch, imported separately. `Model` and `Engine` sample from trained models, `train` trains. CUDA work of cohort
is enqueued on a stream of its own.
"""
try:
    from . import ops
except ImportError as error:
    raise ImportError(f"{error}; hint: a CUDA build needs the packages nvidia-cublas and nvidia-nccl-cu13") from None
from ._cohort import Error, InputError, Tensor, cuda_device_count, from_dlpack, synchronize
from ._cohort import version as __version__
from ._follow import Follow
from ._log import set_log_level
from .cohort_reward import conversational
from .model import Engine, Model, Rollouts
from .training import Callback, Progress, TrainResult, train, train_steps

__all__ = ["Callback", "Engine", "Error", "Follow", "InputError", "Model", "Progress", "Rollouts", "Tensor", "TrainResult", "__version__",
           "conversational", "cuda_device_count", "from_dlpack", "ops", "set_log_level", "synchronize", "train", "train_steps"]

"""Differentiable ops. An argument is a Tensor, or any array with `__dlpack__`, which is a constant."""
from ._cohort import ops as _ops
from ._cohort.ops import *  # noqa: F403

__all__ = [name for name in dir(_ops) if not name.startswith("_")]

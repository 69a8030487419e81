"""Differentiable ops. An argument is a Tensor, or any array with `__dlpack__`, which is a constant."""
from ._cohort.ops import *

__all__ = [name for name in dir() if not name.startswith("_")]

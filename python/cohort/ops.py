"""Differentiable ops. An argument is a Tensor, or any array with `__dlpack__`, which is a constant."""
from ._cohort import (add, div, embedding, exp, flash_attention, geglu, geglu_tanh, gelu, gelu_tanh, layer_norm, linear,
                          log, mul, neg, relu, reshape, rms_norm, sample, scale, sigmoid, silu, sqrt, square, sub, sum,
                          swiglu, tanh, tile_mask, token_log_probs)

__all__ = [name for name in dir() if not name.startswith("_")]

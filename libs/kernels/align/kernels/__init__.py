"""The few GPU operations that training and sampling stand on, each with its torch reference. Triton is imported at first GPU use."""

from align.kernels._decode_attention import decode_attention, rope_decode_attention
from align.kernels._gemv import gemv
from align.kernels._invariant_attention import invariant_attention, invariant_decode
from align.kernels._invariant_linear import invariant_linear
from align.kernels._linear_loss import linear_cross_entropy, linear_logprob, logprob
from align.kernels._rms_norm import add_rms_norm, rms_norm
from align.kernels._rope import rope, rope_qkv
from align.kernels._rope_cache import rope_to_cache
from align.kernels._runtime import KernelError
from align.kernels._sampling import sample
from align.kernels._step_linear import gated_linear, normed_vector, residual_vector, split_linear, sum_rms_norm
from align.kernels._swiglu import swiglu, swiglu_packed

__all__ = [
    "KernelError",
    "add_rms_norm",
    "decode_attention",
    "gated_linear",
    "gemv",
    "invariant_attention",
    "invariant_decode",
    "invariant_linear",
    "linear_cross_entropy",
    "linear_logprob",
    "logprob",
    "normed_vector",
    "residual_vector",
    "rms_norm",
    "rope",
    "rope_decode_attention",
    "rope_qkv",
    "rope_to_cache",
    "sample",
    "split_linear",
    "sum_rms_norm",
    "swiglu",
    "swiglu_packed",
]

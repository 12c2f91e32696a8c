"""How far a result may be from the float64 oracle on the same inputs, from the dtype's rounding alone."""

from __future__ import annotations

import torch

from nki_parallel_attn.validation.tolerance import FUSED_EXP_ERROR, attention_tolerance

__all__ = ["attention_tolerance", "log_sum_exp_tolerance"]


def log_sum_exp_tolerance(dtype: torch.dtype) -> float:
    """Largest allowed absolute deviation of a log-sum-exp of scores up to about 16 in magnitude."""
    if dtype.itemsize == 2:
        return FUSED_EXP_ERROR
    return 1e-12 if dtype == torch.float64 else 2.0**-18

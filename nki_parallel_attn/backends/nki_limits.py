"""What the NKI kernels cannot do and the torch twins can."""

from __future__ import annotations

import torch
from torch import Tensor

from nki_parallel_attn.errors import UnsupportedFeatureError


def refuse_what_nki_lacks(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise UnsupportedFeatureError for float64, and where a gradient is asked for."""
    if q.dtype == torch.float64:
        raise UnsupportedFeatureError("q is float64, which NKI does not have; use backend='torch'")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k_cache, v_cache)):
        raise UnsupportedFeatureError("the NKI kernel has no gradient; use backend='torch'")

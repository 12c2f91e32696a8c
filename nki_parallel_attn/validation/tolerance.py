"""How far an attention output may be from the float64 oracle on the same inputs, from the dtype's rounding alone."""

from __future__ import annotations

import torch
from torch import Tensor

# torch's fused CPU attention takes a cheaper exponential for 16-bit inputs: relative error up to 3.3e-4, found by
# sweeping scores from 0 to -20 in torch 2.13. About one rounding of float16, a twelfth of one of bfloat16.
FUSED_EXP_ERROR = 2.0**-11


def attention_tolerance(dtype: torch.dtype, values: Tensor, head_dim: int) -> float:
    """Largest allowed absolute deviation of an attention output.

    The output is a convex combination of values, so errors scale with max|v|. Roundings to the dtype (unit roundoff u):
    the exponentials before the product with V, the partial output, the merged output: 3u, of which the first averages
    out over the keys but is counted whole. Scores are accumulated in float32: each relative weight is off by at most
    2 * head_dim * u32 * |score|, counted for scores up to 16 in magnitude. 16-bit weights carry the fused exponential's
    error on top.
    """
    unit = torch.finfo(dtype).eps / 2
    accumulation = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
    exponential = FUSED_EXP_ERROR if dtype.itemsize == 2 else 0.0
    return float(values.abs().max()) * (3 * unit + 32 * head_dim * accumulation + exponential)

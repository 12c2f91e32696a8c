"""What one call of output_projection_cte was given, checked, with the page's defaults filled in.

The operation fills it; a backend reads it and checks nothing again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nki_parallel_attn.topology.types import DtypeMode, OProjAttentionLayout, QuantizationType


@dataclass(frozen=True, kw_only=True)
class ProjectionArguments:
    """The page's parameters; shapes are in the operation's docstring.

    Attributes:
        output_dtype, attention_layout: never None.
        batch, heads, head_dim, length, hidden: B, N, D, S and H.
        lnc, target: of the device.
    """

    attention: Tensor
    weight: Tensor
    bias: Tensor | None
    quantization_type: QuantizationType
    input_scales: Tensor | None
    weight_scales: Tensor | None
    output_dtype: torch.dtype
    dtype_mode: DtypeMode
    compact_weight_scales: bool
    attention_layout: OProjAttentionLayout
    out: Tensor | None
    out_s_offset: int
    batch: int
    heads: int
    head_dim: int
    length: int
    hidden: int
    lnc: int
    target: str


def kernel_arguments(args: ProjectionArguments) -> tuple[object, ...]:
    """The reference page's parameters in order, as the NKI kernel takes them."""
    return (
        args.attention,
        args.weight,
        args.bias,
        args.quantization_type,
        args.input_scales,
        args.weight_scales,
        args.output_dtype,
        args.dtype_mode,
        args.compact_weight_scales,
        args.attention_layout,
        args.out,
        args.out_s_offset,
    )

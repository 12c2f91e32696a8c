"""What the quantisation types of attention_block_tkg ask of the two projections' weights and scales."""

from __future__ import annotations

import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError, UnsupportedFeatureError
from nki_parallel_attn.kernels.attention_block_tkg_arguments import BlockArguments
from nki_parallel_attn.ops.validation import check_tensor
from nki_parallel_attn.topology.types import QuantizationType

FP8 = torch.float8_e4m3fn
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MX_TYPES = (QuantizationType.MX, QuantizationType.STATIC_MX, QuantizationType.ROW_MX)


def check_qkv_quantization(args: BlockArguments) -> None:
    """Check W_qkv's dtype and its scales: STATIC [1 or 128, 3] and an input scale, ROW [1 or 128, columns]."""
    kind = args.quantization_type_qkv
    if kind in MX_TYPES:
        if not args.is_h_transposed_by_4:
            raise ArgumentError("is_h_transposed_by_4", False, f"True with quantization_type_qkv={kind.name}")
        if args.target != "trn3":
            raise ArgumentError("quantization_type_qkv", kind.name, "NONE, STATIC or ROW on trn2")
        raise UnsupportedFeatureError(f"quantization_type_qkv: {kind.name} is not supported yet; use ROW or STATIC")
    _check_weight(args, "qkv", kind, 3 if kind is QuantizationType.STATIC else args.W_qkv.shape[1])


def check_out_quantization(args: BlockArguments, hidden: int) -> None:
    """Check W_out's dtype and its scales: STATIC [128, 1] each, ROW [128, H]."""
    kind = args.quantization_type_out
    if kind in MX_TYPES:
        raise ArgumentError("quantization_type_out", kind.name, "NONE, STATIC or ROW")
    _check_weight(args, "out", kind, 1 if kind is QuantizationType.STATIC else hidden)


def _check_weight(args: BlockArguments, which: str, kind: QuantizationType, columns: int) -> None:
    weight: Tensor = getattr(args, f"W_{which}")
    expected = args.X.dtype if kind is QuantizationType.NONE else FP8
    if weight.dtype != expected:
        raise ArgumentTypeError(f"W_{which}", weight.dtype, f"{expected} with quantization_type_{which}={kind.name}")
    wanted = {
        f"weight_dequant_scale_{which}": columns if kind is not QuantizationType.NONE else None,
        f"input_dequant_scale_{which}": 1 if kind is QuantizationType.STATIC else None,
    }
    for name, width in wanted.items():
        scale: Tensor | None = getattr(args, name)
        if width is None:
            if scale is not None:
                raise ArgumentError(name, "a tensor", f"None with quantization_type_{which}={kind.name}")
            continue
        rows = "1" if isinstance(scale, Tensor) and scale.ndim == 2 and scale.shape[0] == 1 else "128"
        check_tensor(name, scale, f"{rows}, {width}", SCALE_DTYPES)
        assert scale is not None
        if not bool((scale == scale[:1]).all() & (scale > 0).all() & scale.isfinite().all()):
            raise ArgumentError(name, "other values", "positive, finite numbers, the same in every row")

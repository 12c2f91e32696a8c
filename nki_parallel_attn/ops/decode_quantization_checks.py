"""What the quantisation types of attention_block_tkg ask of the two projections' weights and scales.

Weights without MX are [K, N]; the MX types' are packed along the contraction, as microscaling_torch.py says. Scales:

    type        weight                weight scales                         input scale
    STATIC      float8 up to max      [1 or 128, 3 for Q, K, V; 1 for out]  [1 or 128, 1]
    ROW         float8 up to max      [1 or 128, N]
    MX          packed float8/float4  [K/32, N] E8M0
    STATIC_MX   packed float8         as STATIC                             as STATIC
    ROW_MX      packed float8         as ROW
"""

from __future__ import annotations

import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError
from nki_parallel_attn.kernels.attention_block_tkg_arguments import BlockArguments
from nki_parallel_attn.kernels.microscaling_torch import BLOCK, ELEMENT_DTYPES, FLOAT4_BYTES, LANES
from nki_parallel_attn.kernels.quantization_torch import FP8, exceeds, fp8_max
from nki_parallel_attn.ops.validation import check_tensor
from nki_parallel_attn.topology.types import QuantizationType

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MX_SCALES = (torch.uint8, torch.float8_e8m0fnu)
MX_INPUTS = (torch.bfloat16, torch.float16)
NONE, STATIC, ROW, MX, STATIC_MX, ROW_MX = QuantizationType
MX_TYPES = (MX, STATIC_MX, ROW_MX)


def check_weight_shape(
    name: str, weight: object, kind: QuantizationType, rows: int, rows_name: str, columns: str
) -> int:
    """Columns of a projection's weight with `rows` rows, plain or packed, after a check of its shape and dtype."""
    if kind not in MX_TYPES:
        return check_tensor(name, weight, f"{rows_name}, {columns}", None, **{rows_name: rows})[1]
    if rows % BLOCK:
        raise ArgumentError(name, f"{rows} rows", f"a multiple of the {BLOCK} rows of an MX block with {kind.name}")
    float4 = kind is MX and isinstance(weight, Tensor) and weight.dtype == FLOAT4_BYTES
    shape = f"{rows_name}/4, {columns}, {LANES // 2 if float4 else LANES}"
    dtypes = ELEMENT_DTYPES if kind is MX else (FP8,)
    return check_tensor(name, weight, shape, dtypes, **{f"{rows_name}/4": rows // LANES})[1]


def check_qkv_quantization(args: BlockArguments, hidden: int) -> None:
    """Check what W_qkv's type asks for; its shape has been checked."""
    kind = args.quantization_type_qkv
    if kind in MX_TYPES and not args.is_h_transposed_by_4:
        raise ArgumentError("is_h_transposed_by_4", False, f"True with quantization_type_qkv={kind.name}")
    _check(args, "qkv", kind, hidden, args.W_qkv.shape[1], 3)


def check_out_quantization(args: BlockArguments, rows: int, hidden: int) -> None:
    """Check what W_out's type asks for; its shape has been checked."""
    _check(args, "out", args.quantization_type_out, rows, hidden, 1)


def _check(args: BlockArguments, which: str, kind: QuantizationType, rows: int, columns: int, static: int) -> None:
    weight: Tensor = getattr(args, f"W_{which}")
    setting = f"quantization_type_{which}"
    if kind in MX_TYPES and args.target != "trn3":
        raise ArgumentError(setting, kind.name, f"NONE, STATIC or ROW with target={args.target!r}; MX is trn3's")
    if kind is MX and args.X.dtype not in MX_INPUTS:
        raise ArgumentTypeError("X", args.X.dtype, f"bfloat16 or float16 with {setting}=MX")
    if kind not in MX_TYPES:
        expected = args.X.dtype if kind is NONE else FP8
        if weight.dtype != expected:
            raise ArgumentTypeError(f"W_{which}", weight.dtype, f"{expected} with {setting}={kind.name}")
        maximum = fp8_max(args.dtype_mode, args.target)
        if kind is not NONE and exceeds(weight, maximum):
            got, expected_range = f"float8 beyond {maximum:g}", f"at most {maximum:g} with {args.dtype_mode}"
            raise ArgumentError(f"W_{which}", got, expected_range, "quantise it to that range, or pass OCP on trn3")
    for name, taken in (
        (f"weight_dequant_scale_{which}", kind is not NONE),
        (f"input_dequant_scale_{which}", kind in (STATIC, STATIC_MX)),
    ):
        scale: Tensor | None = getattr(args, name)
        if not taken:
            if scale is not None:
                raise ArgumentError(name, "a tensor", f"None with {setting}={kind.name}")
            continue
        if kind is MX:
            check_tensor(name, scale, "rows/32, columns", MX_SCALES, **{"rows/32": rows // BLOCK, "columns": columns})
            continue
        width = 1 if name.startswith("input") else static if kind in (STATIC, STATIC_MX) else columns
        repeated = "1" if isinstance(scale, Tensor) and scale.ndim == 2 and scale.shape[0] == 1 else "128"
        check_tensor(name, scale, f"{repeated}, {width}", SCALE_DTYPES)
        assert scale is not None
        if not bool((scale == scale[:1]).all() & (scale > 0).all() & scale.isfinite().all()):
            raise ArgumentError(name, "other values", "positive, finite numbers, the same in every row")

"""output_projection_cte in torch: attention @ weight + bias over the folded (head, head dim) contraction.

The fold is a view of [B, N, D, S], whose product is taken transposed, and of [B, S, N, D]; [B, N, S, D] needs one copy.
Sequences whose tokens do not follow each other as rows are multiplied one by one, short ones several at once after a
copy of these.
Operands that torch multiplies as they are go through one fused product and bias per piece, written in place. All others
(quantised ones, 16-bit ones whose result has another dtype, or on a CPU that has no 16-bit products) are multiplied in
float32, some rows at a time, so that widened activations stay small.

Precision: sums are float32 (float64 for float64 inputs) and rounded to the output's dtype once; torch's own 16-bit
product may round before it adds the bias.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nki_parallel_attn.kernels.microscaling_torch import expand_compact_scales, left_factor, right_factor
from nki_parallel_attn.kernels.output_projection_cte_arguments import ProjectionArguments
from nki_parallel_attn.kernels.quantization_torch import fp8_max, quantize_rows, quantize_static
from nki_parallel_attn.topology.types import OProjAttentionLayout, QuantizationType

# Rows that are widened, or copied from several sequences, at once: 1024 x 1024 of float32 are 4 MiB.
WIDE_ROWS = 1024

# Activations [rows, K] to the left operand of the product, and what the product's rows are multiplied with.
Prepare = Callable[[Tensor], tuple[Tensor, Tensor | None]]


def output_projection_cte(args: ProjectionArguments) -> Tensor:
    """[B, S, H] of args.output_dtype, or args.out with rows out_s_offset to out_s_offset + S - 1 written.

    Differentiable in attention, weight and bias without quantisation.
    """
    x = fold(args.attention, args.attention_layout)
    operands = (args.attention, args.weight, args.bias, args.out)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        result = _recorded(x, args)
        if args.out is None:
            return result
        args.out.narrow(1, args.out_s_offset, args.length).copy_(result)
        return args.out
    with torch.no_grad():
        if args.out is None:
            out = into = x.new_empty(args.batch, args.length, args.hidden, dtype=args.output_dtype)
        else:
            out, into = args.out, args.out.narrow(1, args.out_s_offset, args.length)
        project = _native(args) if _multiplies(args) else _wide(args)
        count = _sequences_at_once(x, into)
        for some, result in zip(torch.split(x, count), torch.split(into, count), strict=True):
            if len(result) == 1 or result.is_contiguous():
                project(some.flatten(0, 1), result.flatten(0, 1))
            else:
                rows = result.new_empty(result.shape).flatten(0, 1)
                project(some.flatten(0, 1), rows)
                result.copy_(rows.view(result.shape))
    return out


def fold(attention: Tensor, layout: OProjAttentionLayout) -> Tensor:
    """[B, S, N*D], a view where the heads of a token can be joined without moving them."""
    if layout is OProjAttentionLayout.BNdS:
        return attention.flatten(1, 2).transpose(1, 2)
    if layout is OProjAttentionLayout.BNSd:
        attention = attention.transpose(1, 2)
    return attention.flatten(2, 3)


def _sequences_at_once(x: Tensor, into: Tensor) -> int:
    """All if the rows of [B, S, n] are evenly spaced in both tensors; else one, but several short ones.

    The weight passes through the caches once for each product, which takes longer than to copy few rows.
    """
    batch, length, _ = x.shape
    return batch if x.is_contiguous() and into.is_contiguous() else max(WIDE_ROWS // length, 1)


def _multiplies(args: ProjectionArguments) -> bool:
    """Whether torch's product of these operands gives the output as it shall be, without being slow."""
    dtype = args.attention.dtype
    if args.quantization_type is not QuantizationType.NONE or dtype != args.output_dtype:
        return False
    if dtype.itemsize > 2 or args.attention.device.type != "cpu":
        return True
    # Elsewhere torch's 16-bit products with a row-major matrix take ten times as long as float32 ones.
    mkldnn = torch.ops.mkldnn
    supported = mkldnn._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else mkldnn._is_mkldnn_fp16_supported()
    return bool(supported)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, into: Tensor | None = None) -> Tensor:
    return torch.mm(x, weight, out=into) if bias is None else torch.addmm(bias, x, weight, out=into)


def _recorded(x: Tensor, args: ProjectionArguments) -> Tensor:
    """The result without quantisation, by operations that have a gradient."""
    dtype = x.dtype if _multiplies(args) else torch.promote_types(x.dtype, torch.float32)
    weight = args.weight.to(dtype)
    bias = None if args.bias is None else args.bias[0].to(dtype)
    pieces = [piece.flatten(0, 1).to(dtype) for piece in torch.split(x, _sequences_at_once(x, x))]
    rows = [_product(piece, weight, bias).to(args.output_dtype) for piece in pieces]
    return (rows[0] if len(rows) == 1 else torch.cat(rows)).view(args.batch, args.length, args.hidden)


def _native(args: ProjectionArguments) -> Callable[[Tensor, Tensor], None]:
    bias = None if args.bias is None else args.bias[0]

    def project(x: Tensor, into: Tensor) -> None:
        _product(x, args.weight, bias, into)

    return project


def _wide(args: ProjectionArguments) -> Callable[[Tensor, Tensor], None]:
    weight, columns, prepare = _widened(args)
    bias = None if args.bias is None else args.bias[0].to(weight.dtype)

    def project(x: Tensor, into: Tensor) -> None:
        for some, result in zip(torch.split(x, WIDE_ROWS), torch.split(into, WIDE_ROWS), strict=True):
            left, row_scales = prepare(some)
            if columns is None:
                product = _product(left, weight, bias)
            else:
                # In float64, for one scale times the product, or times the other, may not fit float32.
                product = (left @ weight).to(torch.float64).mul_(columns)
                if row_scales is not None:
                    product *= row_scales
                if bias is not None:
                    product += bias
            result.copy_(product)

    return project


def _widened(args: ProjectionArguments) -> tuple[Tensor, Tensor | None, Prepare]:
    """The right operand [K, H], what the product's columns are multiplied with, and how the left one is made."""
    dtype = torch.promote_types(args.attention.dtype, torch.float32)
    kind = args.quantization_type
    if kind is QuantizationType.NONE:
        return args.weight.to(dtype), None, lambda x: (x.to(dtype), None)
    assert args.weight_scales is not None
    if kind is QuantizationType.MX:
        scales = expand_compact_scales(args.weight_scales) if args.compact_weight_scales else args.weight_scales
        right = right_factor(args.weight, scales)
        return right, None, lambda x: (left_factor(x, right.dtype), None)
    maximum = fp8_max(args.dtype_mode, args.target)
    weight, columns = args.weight.to(dtype), args.weight_scales[0].to(torch.float64)
    if kind is QuantizationType.STATIC:
        assert args.input_scales is not None
        scale = args.input_scales[0, 0]
        return weight, columns * scale, lambda x: (quantize_static(x, scale, maximum).to(dtype), None)

    def by_row(x: Tensor) -> tuple[Tensor, Tensor | None]:
        elements, row_scales = quantize_rows(x, maximum)
        return elements.to(dtype), row_scales

    return weight, columns, by_row

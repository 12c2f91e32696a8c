"""The projections around decoding attention: X in and its RMSNorm, QKV, and the output projection with its layouts.

Norms are computed in float32 (float64 for float64 inputs) and rounded to X's dtype; so are the projections' results.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nki_parallel_attn.kernels.attention_block_tkg_arguments import BlockArguments, BlockSizes
from nki_parallel_attn.kernels.microscaling_torch import matmul_mx, unpack_x4
from nki_parallel_attn.kernels.online_softmax_torch import stat_dtype
from nki_parallel_attn.kernels.quantization_torch import (
    FLOAT8_E4M3FN_MAX,
    fp8_max,
    quantize_rows,
    quantize_static,
)
from nki_parallel_attn.topology.types import QuantizationType

PARTITIONS = 128
DEFAULT_RMSNORM_X_EPS = 1e-3
# Elements of a weight that are widened at once: 1 MiB of float32.
WEIGHT_CHUNK = 1 << 18


def rms_norm(x: Tensor, gamma: Tensor | None, eps: float, width: int | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gamma over the last dim, in x's dtype.

    Args:
        gamma: [1, n] or None for ones.
        width: what the sum of squares is divided by, when channels of the last dim are padding.
    """
    mean = x.square().sum(-1, keepdim=True) / (width or x.shape[-1])
    normed = x * torch.rsqrt(mean + eps)
    return normed if gamma is None else normed * gamma.to(x.dtype)


def hidden_states(args: BlockArguments, sizes: BlockSizes) -> Tensor:
    """X as [B*S_tkg, H] in the order of W_qkv's rows, normalised if asked, padding channels zero."""
    x, gamma = args.X, args.rmsnorm_X_gamma
    x = from_transposed(x) if args.transposed_in else x.reshape(-1, sizes.hidden)
    if args.is_h_transposed_by_4:
        x = undo_transpose_by_4(x)
        gamma = None if gamma is None else undo_transpose_by_4(gamma)
    actual = args.X_hidden_dim_actual or sizes.hidden
    if actual < sizes.hidden:
        x = torch.nn.functional.pad(x[:, :actual], (0, sizes.hidden - actual))
    if not args.rmsnorm_X_enabled:
        return x
    eps = DEFAULT_RMSNORM_X_EPS if args.rmsnorm_X_eps is None else args.rmsnorm_X_eps
    x = rms_norm(x.to(stat_dtype(args.X.dtype)), gamma, eps, actual).to(args.X.dtype)
    if actual < sizes.hidden:
        x[:, actual:] = 0  # whatever gamma holds there
    return x


def project_qkv(hidden: Tensor, args: BlockArguments, sizes: BlockSizes) -> tuple[Tensor, Tensor, Tensor]:
    """Q [B, q_heads, S_tkg, d], K and V [B, kv_heads, S_tkg, d], in hidden's dtype."""
    qkv = affine(hidden, args.W_qkv, args.bias_qkv, qkv_quantized(args, sizes))
    heads = qkv.view(sizes.batch, sizes.tokens, -1, sizes.head_dim).transpose(1, 2)
    q, k, v = torch.split(heads, [sizes.q_heads, sizes.kv_heads, sizes.kv_heads], 1)
    return q, k, v


def project_out(attention: Tensor, args: BlockArguments, sizes: BlockSizes) -> Tensor | tuple[Tensor, ...]:
    """[B, q_heads, S_tkg, d] to the page's output: projected if W_out is given, in the layout asked for."""
    if args.W_out is None:
        if args.out_in_sb:
            return attention.permute(3, 0, 1, 2).reshape(sizes.head_dim, -1)
        return attention.transpose(2, 3).contiguous()
    flat = attention.transpose(1, 2).reshape(sizes.batch * sizes.tokens, -1)
    out = affine(flat, args.W_out, args.bias_out, out_quantized(args))
    if args.transposed_out:
        transposed = to_transposed(out, args.lnc)
        if not args.out_in_sb:
            return transposed
        cores: tuple[Tensor, ...] = transposed.unbind(1)
    else:
        if not args.out_in_sb:
            return out
        cores = out.chunk(args.lnc, 1)
    return cores[0] if args.lnc == 1 else tuple(core.contiguous() for core in cores)


class Quantized(NamedTuple):
    """How a quantised weight is multiplied.

    Attributes:
        kind: not NONE.
        scales: MX: one byte for each block. Else [n], what each column's product is multiplied with; where there is an
            input scale, it is in there.
        input: STATIC's and STATIC_MX's input scale.
        maximum: largest value of the float8 that activations are quantised to.
    """

    kind: QuantizationType
    scales: Tensor
    input: Tensor | None
    maximum: float


def qkv_quantized(args: BlockArguments, sizes: BlockSizes) -> Quantized | None:
    """None for NONE. The static types have one weight scale each for Q, K and V, the row types one per column."""
    heads = torch.tensor([sizes.q_heads, sizes.kv_heads, sizes.kv_heads])
    given = (args.weight_dequant_scale_qkv, args.input_dequant_scale_qkv)
    return _quantized(args.quantization_type_qkv, *given, heads * sizes.head_dim, args)


def out_quantized(args: BlockArguments) -> Quantized | None:
    """None for NONE. The static types have one weight scale, the row types one per column."""
    given = (args.weight_dequant_scale_out, args.input_dequant_scale_out)
    return _quantized(args.quantization_type_out, *given, None, args)


def _quantized(
    kind: QuantizationType,
    weight_scale: Tensor | None,
    input_scale: Tensor | None,
    widths: Tensor | None,
    args: BlockArguments,
) -> Quantized | None:
    if weight_scale is None:
        return None
    # The MX matrix units know the larger float8 only.
    packed = kind in (QuantizationType.STATIC_MX, QuantizationType.ROW_MX)
    maximum = FLOAT8_E4M3FN_MAX if packed else fp8_max(args.dtype_mode, args.target)
    if kind is QuantizationType.MX:
        return Quantized(kind, weight_scale, None, maximum)
    scales = weight_scale[0].to(stat_dtype(args.X.dtype))
    if input_scale is None:
        return Quantized(kind, scales, None, maximum)
    given = input_scale[0, 0].to(scales.dtype)
    spread = scales if widths is None else scales.repeat_interleave(widths.to(scales.device))
    return Quantized(kind, spread * given, given, maximum)


def affine(x: Tensor, weight: Tensor, bias: Tensor | None, quantized: Quantized | None) -> Tensor:
    """x @ weight + bias, accumulated in float32 (float64 for float64 inputs) and rounded once to x's dtype.

    STATIC and STATIC_MX quantise x by the given scale, ROW_MX each row by its own largest magnitude, MX blocks of 32;
    ROW leaves x as it is. Elements of float8 and their products are exact in float32.
    """
    wide = x.to(stat_dtype(x.dtype))
    if quantized is None:
        out = _product(wide, weight)
    elif quantized.kind is QuantizationType.MX:
        out = matmul_mx(x, weight, quantized.scales)
    else:
        by_row = None
        if quantized.input is not None:
            wide = quantize_static(wide, quantized.input, quantized.maximum).to(wide.dtype)
        elif quantized.kind is QuantizationType.ROW_MX:
            elements, by_row = quantize_rows(wide, quantized.maximum)
            wide = elements.to(wide.dtype)
        out = _product(wide, weight if weight.ndim == 2 else unpack_x4(weight)) * quantized.scales
        if by_row is not None:
            out *= by_row
    return (out if bias is None else out + bias.to(out.dtype)).to(x.dtype)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight in x's dtype.

    The weight is widened a few columns at a time: the copy stays in a core's cache, and torch's own product of a few
    16-bit rows with a row-major matrix takes 40 times as long on CPUs without 16-bit matrix units.
    """
    if weight.dtype == x.dtype:
        return x @ weight
    step = max(1, WEIGHT_CHUNK // len(weight))
    parts = [x @ weight[:, at : at + step].to(x.dtype) for at in range(0, weight.shape[1], step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def from_transposed(x: Tensor) -> Tensor:
    """[128, lnc, H/lnc/128, T] to [T, H]: element [p, c, j, t] is channel c*(H/lnc) + p*(H/lnc/128) + j of token t."""
    return x.permute(3, 1, 0, 2).flatten(1)


def to_transposed(x: Tensor, lnc: int) -> Tensor:
    """The inverse of `from_transposed`."""
    return x.view(len(x), lnc, PARTITIONS, -1).permute(2, 1, 3, 0).contiguous()


def undo_transpose_by_4(x: Tensor) -> Tensor:
    """[n, H] whose channels stand in the order [4, H//512, 128] to the order [H//512, 128, 4]."""
    return x.view(len(x), 4, -1, PARTITIONS).permute(0, 2, 3, 1).flatten(1)

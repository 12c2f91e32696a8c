"""output_projection_cte: attention @ weight + bias over all heads of a prefill's tokens.

The signature and shapes are the reference page's. The checks are in output_projection_cte_checks.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nki_parallel_attn.backends import Backend, backend_name, load_backend
from nki_parallel_attn.ops.output_projection_cte_checks import check_arguments, check_backend
from nki_parallel_attn.topology.types import DtypeMode, OProjAttentionLayout, QuantizationType


def output_projection_cte(
    attention: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    quantization_type: QuantizationType = QuantizationType.NONE,
    input_scales: Tensor | None = None,
    weight_scales: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    dtype_mode: DtypeMode = DtypeMode.NON_OCP,
    compact_weight_scales: bool = False,
    attention_layout: OProjAttentionLayout | None = None,
    out: Tensor | None = None,
    out_s_offset: int = 0,
    *,
    backend: Backend = "auto",
    lnc: int = 1,
    target: str = "trn2",
) -> Tensor:
    """out[b, s] = sum over n, d of attention[b, n, d, s] * weight[n*D + d] + bias, accumulated in float32.

    Differentiable in attention, weight and bias on torch, without quantisation. Under tensor parallelism pass the
    rank's heads and its rows of the weight (`out_rows`), the bias on one rank, and add the ranks' results.

    Args:
        attention: [B, N, D, S], or in the order that `attention_layout` names; D at most 128. bfloat16, float16 or
            float32, on torch also float64; with MX bfloat16 or float16.
        weight: [N*D, H], H at most 32768 and a multiple of lnc. Attention's dtype; STATIC and ROW: float8_e4m3fn, with
            dtype_mode's maximum; MX: packed, [N*D/4, H, 4] of float8_e4m3fn or float8_e5m2, or [N*D/4, H, 2] uint8 for
            float4_e2m1fn, N*D a multiple of 32 (of 128 but on torch). `microscaling_torch` packs and unpacks.
        bias: [1, H] of attention's dtype; added to the dequantised sum.
        quantization_type: NONE; or what activations are quantised to on the way, with elements and scales in float32:
            STATIC  float8, clamp(x / input_scales); the product times input_scales * weight_scales.
            ROW     float8, each token by its own absmax / maximum; the product times that times weight_scales.
            MX      float8_e4m3fn in blocks of 32 along N*D, as nki.isa.quantize_mx does; needs target="trn3".
        input_scales: STATIC: [128, 1] float32, one repeated value of at least 2^-126. Else None.
        weight_scales: STATIC: [128, 1] float32, one repeated value, whose product with input_scales is 0 or a normal
            float32. ROW: [1, H] float32, or [128, H] of equal rows. MX: [N*D/32, H] uint8 or float8_e8m0fnu. NONE:
            None.
        output_dtype: bfloat16, float16, float32, or attention's; None for attention's, for MX bfloat16.
        dtype_mode: STATIC and ROW: float8 ends at 240 (NON_OCP) or at 448 (OCP, trn3 only); AUTO follows `target`.
        compact_weight_scales: MX: weight_scales is [N*D/128, H/128], one for each 128 x 128 weights.
        attention_layout: BNdS, BSNd [B, S, N, D] or BNSd [B, N, S, D]. NONE takes all three, STATIC and MX take BNdS,
            ROW takes BSNd; None is BSNd for ROW and BNdS for the others. All are 4-D, so a wrong one can not be told
            from the shape unless N*D or D gives it away.
        out: [B, S_total, H] of the output's dtype: receives the result in its rows out_s_offset to out_s_offset + S - 1
            and keeps all others. Without quantisation only, and with no memory in common with an operand.
        out_s_offset: first row of `out`.
        backend: "auto" is "neuron" on a Neuron device, else "torch"; NKI_PARALLEL_ATTN_BACKEND overrides "auto".
        lnc: logical core size, 1 or 2: each core computes its part of H.
        target: "trn2" or "trn3".

    Returns:
        [B, S, H], or `out` itself.

    Raises:
        ArgumentError, ArgumentTypeError: a bad argument; `out` is untouched.
        BackendUnavailableError: the backend is not installed.

    Source: API reference page output_projection_cte; what it leaves open is in docs/quantization.md.
    """
    args = check_arguments(
        attention,
        weight,
        bias,
        quantization_type,
        input_scales,
        weight_scales,
        output_dtype,
        dtype_mode,
        compact_weight_scales,
        attention_layout,
        out,
        out_s_offset,
        lnc,
        target,
    )
    name = backend_name(backend, attention)
    module = load_backend(name)
    check_backend(args, name)
    result: Tensor = module.output_projection_cte(args)
    return result

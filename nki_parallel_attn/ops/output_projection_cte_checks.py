"""What output_projection_cte asks of its arguments, and what follows from them."""

from __future__ import annotations

import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError
from nki_parallel_attn.kernels.microscaling_torch import BLOCK, COMPACT_BLOCK, ELEMENT_DTYPES, FLOAT4_BYTES, LANES
from nki_parallel_attn.kernels.output_projection_cte_arguments import ProjectionArguments
from nki_parallel_attn.kernels.quantization_torch import FP8, exceeds, fp8_max
from nki_parallel_attn.ops.validation import (
    check_apart,
    check_bool,
    check_device,
    check_int,
    check_one_of,
    check_repeated_scalar,
    check_tensor,
)
from nki_parallel_attn.topology.types import DtypeMode, OProjAttentionLayout, QuantizationType

HALF = (torch.bfloat16, torch.float16)
KERNEL_DTYPES = (*HALF, torch.float32)
DTYPES = (*KERNEL_DTYPES, torch.float64)
MX_SCALES = (torch.uint8, torch.float8_e8m0fnu)
MAX_HIDDEN = 32768
MAX_HEAD_DIM = 128
# The kernel's MX matmul takes its contraction in multiples of 32 partitions of 4 elements.
KERNEL_MX_CONTRACTION = 128
# The least normal float32. The kernel multiplies by the reciprocal of an input scale, which of a smaller one may be
# infinite, and by the product of both scales, of which a smaller one loses bits.
LEAST_SCALE = 2.0**-126

NONE, STATIC, ROW, MX = (QuantizationType[name] for name in ("NONE", "STATIC", "ROW", "MX"))
BNdS, BSNd, BNSd = OProjAttentionLayout.BNdS, OProjAttentionLayout.BSNd, OProjAttentionLayout.BNSd
# The first is the default.
LAYOUTS = {NONE: (BNdS, BSNd, BNSd), STATIC: (BNdS,), ROW: (BSNd,), MX: (BNdS,)}
DIMS = {BNdS: "B, N, D, S", BSNd: "B, S, N, D", BNSd: "B, N, S, D"}


def check_arguments(
    attention: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    quantization_type: QuantizationType,
    input_scales: Tensor | None,
    weight_scales: Tensor | None,
    output_dtype: torch.dtype | None,
    dtype_mode: DtypeMode,
    compact_weight_scales: bool,
    attention_layout: OProjAttentionLayout | None,
    out: Tensor | None,
    out_s_offset: int,
    lnc: int,
    target: str,
) -> ProjectionArguments:
    """Raise on the first argument that is wrong; the arguments with defaults filled in."""
    check_one_of("lnc", lnc, (1, 2))
    check_one_of("target", target, ("trn2", "trn3"))
    layout = _check_modes(quantization_type, dtype_mode, compact_weight_scales, attention_layout, target)
    dims = DIMS[layout].split(", ")
    dtypes = HALF if quantization_type is MX else DTYPES
    sizes = dict(zip(dims, check_tensor("attention", attention, DIMS[layout], dtypes), strict=True))
    if sizes["D"] > MAX_HEAD_DIM:
        expected = f"a head dim of at most {MAX_HEAD_DIM} in the layout [{DIMS[layout]}]"
        raise ArgumentError("attention", f"D={sizes['D']}", expected)
    contraction = sizes["N"] * sizes["D"]
    hidden = _check_weight(weight, quantization_type, attention.dtype, contraction)
    if hidden > MAX_HIDDEN:
        raise ArgumentError("weight", f"H={hidden}", f"at most {MAX_HIDDEN}")
    if hidden % lnc:
        raise ArgumentError("weight", f"H={hidden}", f"a multiple of lnc={lnc}, for each core has its part of H")
    if bias is not None:
        check_tensor("bias", bias, "1, H", (attention.dtype,), H=hidden)
    _check_scales(quantization_type, input_scales, weight_scales, compact_weight_scales, contraction, hidden)
    operands = {
        "weight": weight,
        "bias": bias,
        "input_scales": input_scales,
        "weight_scales": weight_scales,
    }
    check_device(attention, "attention", **operands, out=out)
    _check_scale_values(quantization_type, input_scales, weight_scales)
    dtype = _output_dtype(output_dtype, quantization_type, attention.dtype)
    _check_out(out, out_s_offset, quantization_type, dtype, sizes["B"], sizes["S"], hidden)
    if out is not None:
        check_apart("out", out.narrow(1, out_s_offset, sizes["S"]), attention=attention, weight=weight, bias=bias)
    if quantization_type in (STATIC, ROW):
        _check_range(weight, dtype_mode, target)
    if quantization_type is not NONE:
        _check_no_gradient(f"quantization_type={quantization_type.name}", attention=attention, **operands)
    return ProjectionArguments(
        attention=attention,
        weight=weight,
        bias=bias,
        quantization_type=quantization_type,
        input_scales=input_scales,
        weight_scales=weight_scales,
        output_dtype=dtype,
        dtype_mode=dtype_mode,
        compact_weight_scales=compact_weight_scales,
        attention_layout=layout,
        out=out,
        out_s_offset=out_s_offset,
        batch=sizes["B"],
        heads=sizes["N"],
        head_dim=sizes["D"],
        length=sizes["S"],
        hidden=hidden,
        lnc=lnc,
        target=target,
    )


def check_backend(args: ProjectionArguments, backend: str) -> None:
    """Raise for what the torch backend takes and the NKI kernel does not."""
    if backend == "torch":
        return
    for name, dtype in (("attention", args.attention.dtype), ("output_dtype", args.output_dtype)):
        if dtype not in KERNEL_DTYPES:
            raise ArgumentTypeError(name, dtype, f"bfloat16, float16 or float32 with backend={backend!r}")
    _check_no_gradient(
        f"backend={backend!r}", attention=args.attention, weight=args.weight, bias=args.bias, out=args.out
    )
    contraction = args.heads * args.head_dim
    if args.quantization_type is MX and contraction % KERNEL_MX_CONTRACTION:
        raise ArgumentError(
            "attention", f"N*D={contraction}", f"a multiple of {KERNEL_MX_CONTRACTION} with MX and backend={backend!r}"
        )


def _check_modes(
    kind: QuantizationType,
    dtype_mode: DtypeMode,
    compact: bool,
    layout: OProjAttentionLayout | None,
    target: str,
) -> OProjAttentionLayout:
    if not isinstance(kind, QuantizationType):
        raise ArgumentTypeError("quantization_type", repr(kind), "a QuantizationType")
    if kind not in LAYOUTS:
        raise ArgumentError("quantization_type", kind.name, "NONE, STATIC, ROW or MX")
    if kind is MX and target != "trn3":
        raise ArgumentError("quantization_type", kind.name, f"NONE, STATIC or ROW with target={target!r}; MX is trn3's")
    if not isinstance(dtype_mode, DtypeMode):
        raise ArgumentTypeError("dtype_mode", repr(dtype_mode), "a DtypeMode")
    if dtype_mode is DtypeMode.OCP and target != "trn3":
        raise ArgumentError("dtype_mode", dtype_mode.name, f"NON_OCP or AUTO with target={target!r}; OCP is trn3's")
    if check_bool("compact_weight_scales", compact) and kind is not MX:
        raise ArgumentError("compact_weight_scales", True, f"False with quantization_type={kind.name}; MX has them")
    if layout is None:
        return LAYOUTS[kind][0]
    if not isinstance(layout, OProjAttentionLayout):
        raise ArgumentTypeError("attention_layout", repr(layout), "an OProjAttentionLayout")
    if layout not in LAYOUTS[kind]:
        allowed = " or ".join(known.name for known in LAYOUTS[kind])
        raise ArgumentError("attention_layout", layout.name, f"{allowed} with quantization_type={kind.name}")
    return layout


def _check_weight(weight: Tensor, kind: QuantizationType, dtype: torch.dtype, contraction: int) -> int:
    """H of a weight whose contraction is as long as attention's."""
    if kind is not MX:
        wanted = (dtype,) if kind is NONE else (FP8,)
        return check_tensor("weight", weight, "N*D, H", wanted, **{"N*D": contraction})[1]
    if contraction % BLOCK:
        raise ArgumentError("attention", f"N*D={contraction}", f"a multiple of {BLOCK} with quantization_type=MX")
    width = LANES // 2 if isinstance(weight, Tensor) and weight.dtype == FLOAT4_BYTES else LANES
    return check_tensor("weight", weight, f"N*D/4, H, {width}", ELEMENT_DTYPES, **{"N*D/4": contraction // LANES})[1]


def _check_scales(
    kind: QuantizationType,
    input_scales: Tensor | None,
    weight_scales: Tensor | None,
    compact: bool,
    contraction: int,
    hidden: int,
) -> None:
    given = {"input_scales": input_scales, "weight_scales": weight_scales}
    taken = {NONE: (), STATIC: ("input_scales", "weight_scales"), ROW: ("weight_scales",), MX: ("weight_scales",)}
    for name, scales in given.items():
        if scales is not None and name not in taken[kind]:
            raise ArgumentError(name, "a tensor", f"None with quantization_type={kind.name}")
    if kind is STATIC:
        for name, scales in given.items():
            check_tensor(name, scales, "128, 1", (torch.float32,))
    elif kind is ROW:
        rows = "1" if isinstance(weight_scales, Tensor) and weight_scales.shape[:1] == (1,) else "128"
        check_tensor("weight_scales", weight_scales, f"{rows}, H", (torch.float32,), H=hidden)
    elif kind is MX:
        block, columns = (COMPACT_BLOCK, hidden // COMPACT_BLOCK) if compact else (BLOCK, hidden)
        if compact and (contraction % COMPACT_BLOCK or hidden % COMPACT_BLOCK):
            got, expected = (
                f"True for N*D={contraction}, H={hidden}",
                f"False unless both are multiples of {COMPACT_BLOCK}",
            )
            raise ArgumentError("compact_weight_scales", got, expected)
        across = f"H/{COMPACT_BLOCK}" if compact else "H"
        wanted = {f"N*D/{block}": contraction // block, across: columns}
        check_tensor("weight_scales", weight_scales, f"N*D/{block}, {across}", MX_SCALES, **wanted)


def _check_scale_values(kind: QuantizationType, input_scales: Tensor | None, weight_scales: Tensor | None) -> None:
    if kind is STATIC:
        assert input_scales is not None and weight_scales is not None
        check_repeated_scalar("input_scales", input_scales.detach())
        check_repeated_scalar("weight_scales", weight_scales.detach())
        scale = float(input_scales[0, 0].detach())
        if scale < LEAST_SCALE:
            raise ArgumentError("input_scales", scale, "a positive number, not below 2^-126")
        product = abs(scale * float(weight_scales[0, 0].detach()))
        if product and not LEAST_SCALE <= product <= torch.finfo(torch.float32).max:
            expected = "0, or a number whose product with input_scales is a normal float32, at least 2^-126"
            raise ArgumentError("weight_scales", float(weight_scales[0, 0].detach()), expected)
    elif kind is ROW:
        assert weight_scales is not None
        if not bool(weight_scales.isfinite().all()):
            raise ArgumentError("weight_scales", "a value that is not finite", "finite numbers")
        if not bool((weight_scales == weight_scales[:1]).all()):
            raise ArgumentError("weight_scales", "rows that differ", "[128, H] with the same numbers in every row")


def _output_dtype(asked: torch.dtype | None, kind: QuantizationType, dtype: torch.dtype) -> torch.dtype:
    if asked is None:
        return torch.bfloat16 if kind is MX else dtype
    if not isinstance(asked, torch.dtype):
        raise ArgumentTypeError("output_dtype", repr(asked), "a torch dtype")
    if asked not in KERNEL_DTYPES and asked != dtype:
        raise ArgumentTypeError("output_dtype", asked, "bfloat16, float16, float32 or attention's dtype")
    return asked


def _check_out(
    out: Tensor | None,
    offset: int,
    kind: QuantizationType,
    dtype: torch.dtype,
    batch: int,
    length: int,
    hidden: int,
) -> None:
    check_int("out_s_offset", offset, minimum=0)
    if out is None:
        if offset:
            raise ArgumentError("out_s_offset", offset, "0 without out")
        return
    if kind is not NONE:
        raise ArgumentError("out", "a tensor", f"None with quantization_type={kind.name}")
    total = check_tensor("out", out, "B, S_total, H", (dtype,), B=batch, H=hidden)[1]
    if offset + length > total:
        raise ArgumentError("out_s_offset", offset, f"at most S_total - S = {total} - {length}")
    if torch.is_grad_enabled() and out.requires_grad and out.is_leaf:
        raise ArgumentError("out", "a leaf that requires grad", "a tensor that can be written in place")


def _check_range(weight: Tensor, dtype_mode: DtypeMode, target: str) -> None:
    """A float8 weight is used as it is: what the chosen format has no number for would be infinity or NaN there."""
    maximum = fp8_max(dtype_mode, target)
    if exceeds(weight, maximum):
        got, expected = f"float8 beyond {maximum:g}", f"at most {maximum:g} with dtype_mode={dtype_mode.name}"
        raise ArgumentError("weight", got, expected, "quantise it to that range, or pass DtypeMode.OCP on trn3")


def _check_no_gradient(where: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if torch.is_grad_enabled() and tensor is not None and tensor.requires_grad:
            raise ArgumentError(name, "requires_grad=True", f"no gradient with {where}")

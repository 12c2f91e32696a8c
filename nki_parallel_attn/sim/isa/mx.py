"""Microscaling (MX): groups of 32 elements share a power-of-two scale. Trn3 and newer.

A group is 8 partitions by 4 packed elements. Its scale, a byte of float8_e8m0fnu, lies in the 32-partition quadrant of
the data: the scales of a quadrant are 4 consecutive partitions, from partition 0, 4, 8 or 12 of the quadrant.

Source: nki/api/nki/isa/__init__.py, quantize_mx and nc_matmul_mx; nki/deep-dives/mxfp-matmul.rst.
"""

from __future__ import annotations

import torch

from ..dtypes import (
    PACKED,
    DType,
    bfloat16,
    float4_e2m1fn_x4,
    float8_e4m3fn,
    float8_e4m3fn_x4,
    float8_e5m2,
    float8_e5m2_x4,
    float8_e8m0fnu,
    float16,
    float32,
    uint8,
)
from ..enums import MemoryRegion, nc_version
from ..enums import engine as Engine
from ..instruction import Call, instruction
from ..operand_checks import check_indirection_start
from ..psum import accumulates, note_matmul, put_product, put_sum
from ..tensor import GatheredTensor, NkiTensor
from .tensor import check_no_tiles, check_sizes, check_tiling

GROUP_PARTITIONS = 8
QUADRANT = 32
SCALE_ROWS = QUADRANT // GROUP_PARTITIONS
SCALE_STARTS = (0, 4, 8, 12)

# Bias of float8_e8m0fnu, and what multiplies the elements of a group for each of its bytes; 255 is NaN.
BIAS = 127
_NAN = 255
_FACTORS64 = torch.cat((2.0 ** (torch.arange(_NAN, dtype=torch.float64) - BIAS), torch.tensor([float("nan")])))
_FACTORS = _FACTORS64.to(torch.float32)
# Above this byte a scaled element may exceed float32, although its product with the other operand does not.
_LAST_IN_FLOAT32 = 238

_ELEMENT = {float8_e5m2_x4: float8_e5m2.precise, float8_e4m3fn_x4: float8_e4m3fn.precise}
_LARGEST_EXPONENT = {float8_e5m2_x4: 15, float8_e4m3fn_x4: 8}
_FLOAT4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_NIBBLES = torch.tensor([0, 4, 8, 12], dtype=torch.int32)[:, None]
# The value of every element code; looking them up is faster than torch's conversions.
_VALUES = {
    float4_e2m1fn_x4: torch.cat((_FLOAT4, -_FLOAT4)),
    **{
        dtype: format.decode(torch.arange(256, dtype=torch.uint8).view(format.torch))
        for dtype, format in _ELEMENT.items()
    },
}


@instruction(engine=Engine.vector, reads=("src",), writes=("dst", "dst_scale"), any_partition=("dst_scale",))
def quantize_mx(call: Call, dst: NkiTensor, src: NkiTensor, dst_scale: NkiTensor, name: str | None = None) -> None:
    """Quantise float16 or bfloat16 to MXFP8 elements and scales, all in SBUF.

    The scale of a group is 2^(floor(log2(largest magnitude)) - (Emax - 1)), Emax = 8 for e4m3fn and 15 for e5m2, and at
    least 2^-127, which a group of zeros gets; elements are divided by it and cannot overflow.

    Args:
        dst: [P, F / 4] of float8_e5m2_x4 or float8_e4m3fn_x4.
        src: [P, F], P a multiple of 32, F of 4.
        dst_scale: float8_e8m0fnu or uint8, [P / 8, F / 4] for P = 32, else up to [P, F / 4], of which the first 4
            partitions of each quadrant, from where it starts, are written.
    """
    call.require_target(nc_version.gen4, "quantize_mx")
    for operand, tensor in (("dst", dst), ("src", src), ("dst_scale", dst_scale)):
        call.require(
            tensor.buffer is MemoryRegion.sbuf, "memory-access", f"{operand} is in {tensor.buffer.value}, expected SBUF"
        )
    _require_dtype(call, "src", src.dtype, (float16, bfloat16))
    _require_dtype(call, "dst", dst.dtype, tuple(_ELEMENT))
    _require_dtype(call, "dst_scale", dst_scale.dtype, (float8_e8m0fnu, uint8))
    partitions, free = src.shape[0], src.free_size
    _require_partitions(call, "src", src)
    if free % 4 or dst.free_size != free // 4 or dst.shape[0] != partitions:
        call.fail(
            "mx-free", f"src is {partitions} x {free}, dst {dst.shape[0]} x {dst.free_size}, expected a quarter as wide"
        )
    scales = _scale_tiles(call, "dst_scale", dst_scale, src, free // 4)
    call.marked = True
    for tensor in (dst, *scales):
        tensor.mark_written()
    if not call.core.computes:
        return
    groups = partitions // GROUP_PARTITIONS
    values = src.f32().reshape(groups, GROUP_PARTITIONS, free).contiguous()
    # The exponent field of the largest magnitude: 0 for zeros and subnormals, whose scale is the least one anyway.
    magnitudes = (values.view(torch.int32) & 0x7FFFFFFF).amax(1).reshape(groups, free // 4, 4).amax(2)
    biased = ((magnitudes >> 23) - (_LARGEST_EXPONENT[dst.dtype] - 1)).clamp_(min=0)
    inverse = _FACTORS[2 * BIAS - biased].repeat_interleave(4, 1)
    elements = _ELEMENT[dst.dtype].encode(values * inverse[:, None, :])
    dst.put_raw(elements.reshape(partitions, free).view(torch.int32))
    for row, scale in enumerate(scales):
        rows = biased[row * SCALE_ROWS : (row + 1) * SCALE_ROWS].to(torch.uint8)
        scale.put_raw(rows.view(scale.format.torch))


@instruction(
    engine=Engine.tensor,
    reads=("stationary", "moving", "stationary_scale", "moving_scale"),
    writes=("dst",),
    any_partition=("stationary_scale", "moving_scale"),
    indirect=("dst", "stationary", "moving", "stationary_scale", "moving_scale"),
    deferred_read=True,
)
def nc_matmul_mx(
    call: Call,
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    stationary_scale: NkiTensor,
    moving_scale: NkiTensor,
    tile_position: tuple[int, ...] | None = None,
    tile_size: tuple[int, ...] | None = None,
    accumulate: bool | None = None,
    name: str | None = None,
) -> None:
    """dst = stationary.T @ moving of MX operands, contracted over partitions and the 4 packed elements, in float32.

    Args:
        dst: PSUM, [M, N], float32 or bfloat16.
        stationary: [P, M] of a packed x4 dtype, P a multiple of 32, M even and at most 128.
        moving: [P, N] of a packed x4 dtype, N at most 4096 into float32 and 8192 into bfloat16.
        stationary_scale, moving_scale: float8_e8m0fnu or uint8, laid out as quantize_mx writes them.
        tile_position, tile_size: rows of the array to use; both or none.
        accumulate: as for nc_matmul.
    """
    call.require_target(nc_version.gen4, "nc_matmul_mx")
    _require_dtype(call, "stationary", stationary.dtype, PACKED)
    _require_dtype(call, "moving", moving.dtype, PACKED)
    _require_dtype(call, "stationary_scale", stationary_scale.dtype, (float8_e8m0fnu, uint8))
    _require_dtype(call, "moving_scale", moving_scale.dtype, (float8_e8m0fnu, uint8))
    _require_dtype(call, "dst", dst.dtype, (float32, bfloat16))
    _require_partitions(call, "stationary", stationary)
    rows, columns = stationary.free_size, moving.free_size
    check_sizes(call, dst, stationary, moving, (rows, columns))
    call.require(rows % 2 == 0, "stationary-limit", f"stationary is {rows} wide, expected an even number")
    if call.core.checking and (tile_position or tile_size):
        position, size = tile_position or (), tile_size or ()
        check_tiling(call, stationary, rows, position, size)
        call.require(
            (position[1], size[1]) == (0, 128), "tile-position", f"nc_matmul_mx tiles rows only, got {position} {size}"
        )
    operands = (("stationary", stationary, stationary_scale), ("moving", moving, moving_scale))
    if any(isinstance(t, GatheredTensor) for t in (dst, stationary, moving, stationary_scale, moving_scale)):
        for name_, data, scale in operands:
            if getattr(data, "offsets", None) is not getattr(scale, "offsets", None):
                call.fail(
                    "indirect-view", f"{name_} and its scale use the same index of tensor indirection, or neither"
                )
            check_indirection_start(call, name_, data, data)
        check_indirection_start(call, "dst", dst, stationary)
        check_no_tiles(call, tile_position or ())
    scales = [_scale_tiles(call, f"{name_}_scale", scale, data, data.free_size) for name_, data, scale in operands]
    if call.core.checks.uninitialised:
        for (name_, data, _), tiles in zip(operands, scales, strict=True):
            call.check_written(name_, data)
            for tile in tiles:
                call.check_written(f"{name_}_scale", tile)
    added = accumulates(call, dst, accumulate)
    call.work = {
        "rows": rows,
        "columns": columns,
        "contraction": 4 * stationary.shape[0],
        "accumulate": added is not False,
    }
    if call.core.computes:
        left_bytes, right_bytes = (_scale_bytes(tiles) for tiles in scales)
        wide = max(_largest(left_bytes), _largest(right_bytes)) > _LAST_IN_FLOAT32
        factors = _FACTORS64 if wide else _FACTORS
        left, right = dequantize(stationary, left_bytes, factors), dequantize(moving, right_bytes, factors)
        if wide:
            put_sum(dst, (left.t() @ right).to(torch.float32), added)
        else:
            put_product(dst, left, right, added)
    note_matmul(dst)


def dequantize(data: NkiTensor, scale_bytes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The values of packed [P, F] data, [4 P, F]: row 4 p + q is element q of partition p, times its group's scale."""
    partitions, free = data.shape[0], data.free_size
    elements = unpack(data).to(factors.dtype).reshape(len(scale_bytes), 4 * GROUP_PARTITIONS, free)
    elements *= factors[scale_bytes.to(torch.int64)][:, None, :]
    return elements.reshape(4 * partitions, free)


def unpack(data: NkiTensor) -> torch.Tensor:
    """Packed [P, F] data as float32 [P, 4, F]; the first element is in the lowest bits."""
    raw = data.raw.reshape(data.shape[0], -1)
    if data.dtype == float4_e2m1fn_x4:
        codes = raw.to(torch.int32)[:, None, :] >> _NIBBLES & 0xF
    else:
        codes = raw.contiguous().view(torch.uint8).reshape(*raw.shape, 4).transpose(1, 2).to(torch.int32).contiguous()
    return _VALUES[data.dtype].index_select(0, codes.reshape(-1)).reshape(codes.shape)


def _scale_bytes(tiles: list[NkiTensor]) -> torch.Tensor:
    return torch.cat([tile.raw.reshape(tile.shape[0], -1).contiguous().view(torch.uint8) for tile in tiles])


def _largest(scale_bytes: torch.Tensor) -> int:
    return int(scale_bytes.masked_fill(scale_bytes == _NAN, 0).max())


def _require_dtype(call: Call, operand: str, dtype: DType, allowed: tuple[DType, ...]) -> None:
    # Without the right dtype there is no meaning to give to the bits, so this cannot be switched off.
    if dtype not in allowed:
        call.fail("operand-dtype", f"{operand} is {dtype}, expected {' or '.join(allowed)}")


def _require_partitions(call: Call, operand: str, data: NkiTensor) -> None:
    if data.shape[0] % QUADRANT or data.shape[0] > 128:
        call.fail("mx-partition", f"{operand} has {data.shape[0]} partitions, expected 32, 64, 96 or 128")


def _scale_tiles(call: Call, operand: str, scale: NkiTensor, data: NkiTensor, free: int) -> list[NkiTensor]:
    """The 4 rows of scales in each quadrant that `data` spans."""
    quadrants = data.shape[0] // QUADRANT
    needed = (quadrants - 1) * QUADRANT + SCALE_ROWS
    if scale.shape[0] < needed or scale.free_size != free:
        expected = f"[{data.shape[0]}, {free}]" if quadrants > 1 else f"[{SCALE_ROWS}, {free}]"
        call.fail(
            "mx-scale-layout",
            f"{operand} is {list(scale.shape)} for {data.shape[0]} partitions of data, expected {expected}",
        )
    start = scale.partition % QUADRANT
    call.require(
        start in SCALE_STARTS,
        "mx-scale-layout",
        f"{operand} starts at partition {start} of a quadrant, expected one of {SCALE_STARTS}",
    )
    if _is_placed(scale) and _is_placed(data):
        call.require(
            scale.partition // QUADRANT == data.partition // QUADRANT,
            "mx-scale-layout",
            f"{operand} starts at partition {scale.partition}, its data at {data.partition}: not the same quadrant",
        )
    return [_rows(scale, q * QUADRANT, SCALE_ROWS) for q in range(quadrants)]


def _rows(tensor: NkiTensor, first: int, count: int) -> NkiTensor:
    """`count` partitions from the one with index `first`, of a tensor that may be gathered."""
    if isinstance(tensor, GatheredTensor):
        index = tensor.index.reshape(tensor.shape[0], -1)[first : first + count]
        return tensor.part(tuple(index.shape), index.reshape(-1))
    return tensor[first : first + count]


def _is_placed(tensor: NkiTensor) -> bool:
    """Whether the start partition is given: by a manual address, or by a size that fits nowhere else."""
    return tensor.address is not None or tensor.storage.shape[0] > 64

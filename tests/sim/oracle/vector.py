"""Vector engine instructions of nki.isa. Tiles are [P, ...]; instructions that reduce flatten the free dims."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .dtypes import MX_LARGEST_EXPONENT, round_to
from .operators import ARITHMETIC, IDENTITY, arithmetic, bitwise, reduce

Array = NDArray[np.float64]
FP32_MIN = -float(np.finfo(np.float32).max)
SENTINEL = -1  # all ones, whatever the width of the index dtype


def _flat(tile: ArrayLike) -> Array:
    array = np.asarray(tile, np.float64)
    return array.reshape(array.shape[0], -1)


def tensor_tensor(data1: ArrayLike, data2: ArrayLike, op: str) -> Array:
    """data1 op data2, element by element, in row-major order of each tile; result in the shape of data1."""
    return arithmetic(op, _flat(data1), _flat(data2)).reshape(np.shape(data1))


def tensor_scalar(
    data: ArrayLike,
    op0: str,
    operand0: ArrayLike | None,
    reverse0: bool = False,
    op1: str | None = None,
    operand1: ArrayLike | None = None,
    reverse1: bool = False,
) -> Array:
    """(data op0 operand0) op1 operand1; operands are scalars or [P, 1]."""
    result = arithmetic(op0, _flat(data), operand0, reverse0)
    if op1 is not None:
        result = arithmetic(op1, result, operand1, reverse1)
    return result.reshape(np.shape(data))


def tensor_scalar_bitwise(
    data: ArrayLike,
    dtype: str,
    op0: str,
    operand0: ArrayLike | None,
    reverse0: bool = False,
    op1: str | None = None,
    operand1: ArrayLike | None = None,
    reverse1: bool = False,
) -> NDArray[np.int64]:
    """tensor_scalar with bitwise operators on an integer dtype."""
    flat = np.asarray(data, np.int64).reshape(np.shape(data)[0], -1)
    result = bitwise(op0, flat, operand0, dtype, reverse0)
    if op1 is not None:
        result = bitwise(op1, result, operand1, dtype, reverse1)
    return result.reshape(np.shape(data))


def tensor_reduce(
    op: str, data: ArrayLike, axis: int | tuple[int, ...], negate: bool = False, keepdims: bool = False
) -> Array:
    """Reduction of free dims, negated on request."""
    result = reduce(op, data, axis, keepdims)
    return -result if negate else result


def tensor_reduce_bitwise(op: str, data: ArrayLike, axis: int | tuple[int, ...]) -> NDArray[np.int64]:
    """Reduction with bitwise_and, bitwise_or or bitwise_xor."""
    function = {"bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor}[op]
    return function.reduce(np.asarray(data, np.int64), axis=axis)


def scalar_tensor_tensor(
    data: ArrayLike,
    op0: str,
    operand0: ArrayLike,
    op1: str,
    operand1: ArrayLike,
    reverse0: bool = False,
    reverse1: bool = False,
) -> Array:
    """(data op0 operand0) op1 operand1, operand1 a tile like data."""
    first = arithmetic(op0, _flat(data), operand0, reverse0)
    return arithmetic(op1, first, _flat(operand1), reverse1).reshape(np.shape(data))


def accumulate(op: str, values: ArrayLike, reduce_cmd: str, initial: ArrayLike | None, registers: ArrayLike) -> Array:
    """[P, 1] Vector accumulators after values [P, ...] under reset_reduce, load_reduce or reduce."""
    flat = _flat(values)
    start = {"reset_reduce": IDENTITY[op], "load_reduce": initial, "reduce": registers}[reduce_cmd]
    result = np.broadcast_to(np.asarray(start, np.float64), (flat.shape[0], 1)).copy()
    for column in range(flat.shape[1]):
        result = ARITHMETIC[op](result, flat[:, column : column + 1])
    return result


def tensor_scalar_reduce(
    data: ArrayLike,
    op0: str,
    operand0: ArrayLike | None,
    reduce_op: str,
    reduce_cmd: str = "reset_reduce",
    reduce_init: ArrayLike | None = None,
    registers: ArrayLike = 0.0,
) -> tuple[Array, Array]:
    """data op0 operand0, and the registers (before `reduce_res_negate`)."""
    result = tensor_scalar(data, op0, operand0)
    return result, accumulate(reduce_op, result, reduce_cmd, reduce_init, registers)


def tensor_scalar_cumulative(
    src: ArrayLike,
    op0: str,
    op1: str,
    imm0: ArrayLike,
    imm1: ArrayLike | None = None,
    reduce_cmd: str = "reset_reduce",
    registers: ArrayLike = 0.0,
) -> tuple[Array, Array]:
    """Running op1(op0(src, imm0), register), written at each element; and the final [P, 1] registers."""
    value = arithmetic(op0, _flat(src), imm0)
    start = {"reset_reduce": IDENTITY[op1], "load_reduce": imm1, "reduce": registers}[reduce_cmd]
    register = np.broadcast_to(np.asarray(start, np.float64), (value.shape[0], 1)).copy()[:, 0]
    result = np.empty_like(value)
    for i in range(value.shape[1]):
        register = ARITHMETIC[op1](value[:, i], register)
        result[:, i] = register
    return result.reshape(np.shape(src)), register[:, None]


def tensor_tensor_scan(
    data0: ArrayLike,
    data1: ArrayLike,
    initial: ArrayLike,
    op0: str,
    op1: str,
    reverse0: bool = False,
    reverse1: bool = False,
) -> Array:
    """result[i] = (data0[i] op0 result[i-1]) op1 data1[i], starting from `initial` (scalar or [P, 1])."""
    x, y = _flat(data0), _flat(data1)
    state = np.broadcast_to(np.asarray(initial, np.float64), (x.shape[0], 1))[:, 0]
    result = np.empty_like(x)
    for i in range(x.shape[1]):
        state = arithmetic(op1, arithmetic(op0, x[:, i], state, reverse0), y[:, i], reverse1)
        result[:, i] = state
    return result.reshape(np.shape(data0))


def tensor_copy_predicated(
    dst: ArrayLike, src: ArrayLike, predicate: ArrayLike, reverse_pred: bool = False
) -> NDArray[np.generic]:
    """dst with src (tile or scalar) where the predicate is nonzero, or zero when reversed."""
    chosen = (np.asarray(predicate) != 0) ^ reverse_pred
    return np.where(chosen, src, dst)


def exponential(
    src: ArrayLike,
    max_value: ArrayLike = 0.0,
    reduce_cmd: str = "idle",
    reduce_init: ArrayLike = 0.0,
    registers: ArrayLike = 0.0,
) -> tuple[Array, Array | None]:
    """exp(src - max_value), and the running sum; None when idle, because the registers are then undefined."""
    with np.errstate(all="ignore"):
        result = np.exp(_flat(src) - np.asarray(max_value, np.float64))
    total = None if reduce_cmd == "idle" else accumulate("add", result, reduce_cmd, reduce_init, registers)
    return result.reshape(np.shape(src)), total


def reciprocal(data: ArrayLike) -> Array:
    """1 / data."""
    with np.errstate(all="ignore"):
        return 1 / np.asarray(data, np.float64)


def select_reduce(
    predicate: ArrayLike,
    on_true: ArrayLike,
    on_false: ArrayLike,
    reverse_pred: bool = False,
    reduce_cmd: str = "idle",
    registers: ArrayLike = 0.0,
) -> tuple[Array, Array | None]:
    """on_true where the predicate holds, else on_false (scalar or [P, 1]); and the running maximum, None when idle."""
    chosen = (_flat(predicate) != 0) ^ reverse_pred
    result = np.where(chosen, _flat(on_true), np.asarray(on_false, np.float64))
    largest = None if reduce_cmd == "idle" else accumulate("maximum", result, reduce_cmd, None, registers)
    return result.reshape(np.shape(on_true)), largest


def range_select(
    on_true: ArrayLike,
    comp_op0: str,
    comp_op1: str,
    bound0: ArrayLike,
    bound1: ArrayLike,
    range_start: int = 0,
    reduce_cmd: str = "reset_reduce",
    registers: ArrayLike = 0.0,
) -> tuple[Array, Array]:
    """on_true where index comp_op0 bound0 and index comp_op1 bound1, else FP32_MIN; and the running maximum [P, 1]."""
    tile = _flat(on_true)
    index = np.broadcast_to(range_start + np.arange(tile.shape[1], dtype=np.float64), tile.shape)
    chosen = (arithmetic(comp_op0, index, bound0) != 0) & (arithmetic(comp_op1, index, bound1) != 0)
    result = np.where(chosen, tile, FP32_MIN)
    return result.reshape(np.shape(on_true)), accumulate("maximum", result, reduce_cmd, None, registers)


def bn_stats(data: ArrayLike) -> Array:
    """[P, 6]: count, mean and variance * count of the even elements, then of the odd ones."""
    tile = _flat(data)
    parts = []
    for half in (tile[:, 0::2], tile[:, 1::2]):
        count = half.shape[1]
        mean = half.mean(1) if count else np.zeros(len(tile))
        parts += [np.full(len(tile), float(count)), mean, ((half - mean[:, None]) ** 2).sum(1)]
    return np.stack(parts, axis=1)


def bn_aggr(data: ArrayLike) -> Array:
    """[P, 2]: mean and (population) variance from (count, mean, variance * count) tuples."""
    tuples = _flat(data).reshape(np.shape(data)[0], -1, 3)
    count, mean, spread = tuples[..., 0], tuples[..., 1], tuples[..., 2]
    total = count.sum(1)
    average = (count * mean).sum(1) / total
    variance = (spread + count * (mean - average[:, None]) ** 2).sum(1) / total
    return np.stack([average, variance], axis=1)


def max8(src: ArrayLike) -> Array:
    """[P, 8]: the largest values, descending."""
    return -np.sort(-_flat(src), axis=1)[:, :8]


def nc_find_index8(data: ArrayLike, vals: ArrayLike) -> NDArray[np.int64]:
    """[P, 8] positions of the values; equal values take successive positions, left to right; -1 where absent."""
    return _match(_flat(data), _flat(vals), range(8))


def nc_match_replace8(data: ArrayLike, vals: ArrayLike, imm: float) -> tuple[Array, NDArray[np.int64]]:
    """data with each value's first unmatched occurrence replaced, values from last to first; and the positions."""
    tile = _flat(data)
    places = _match(tile, _flat(vals), range(7, -1, -1))
    result = tile.copy()
    for row, row_places in enumerate(places):
        result[row, row_places[row_places != SENTINEL]] = imm
    return result.reshape(np.shape(data)), places


def _match(tile: Array, vals: Array, columns: range) -> NDArray[np.int64]:
    places = np.full((tile.shape[0], 8), SENTINEL, np.int64)
    for row in range(tile.shape[0]):
        free = np.ones(tile.shape[1], np.bool_)
        for column in columns:
            hits = np.flatnonzero(free & (tile[row] == vals[row, column]))
            if len(hits):
                places[row, column] = hits[0]
                free[hits[0]] = False
    return places


def nc_stream_shuffle(dst: ArrayLike, src: ArrayLike, shuffle_mask: list[int]) -> NDArray[np.generic]:
    """dst after each quadrant's partition i took partition shuffle_mask[i] of that quadrant of src; 255 keeps dst."""
    source = np.asarray(src)
    result = np.array(dst, dtype=source.dtype)
    for partition in range(result.shape[0]):
        chosen = shuffle_mask[partition % 32]
        if chosen != 255:
            result[partition] = source[partition // 32 * 32 + chosen].reshape(result[partition].shape)
    return result


def quantize_mx(src: ArrayLike, dtype: str) -> tuple[Array, NDArray[np.uint8]]:
    """MX elements [P, F] of `dtype` (float8_e4m3fn or float8_e5m2) and dense e8m0 bytes [P/8, F/4].

    A group is 8 partitions by 4 elements; its scale is 2^(floor(log2 amax) - (Emax - 1)), and 2^-127 when all are zero.
    """
    x = np.asarray(src, np.float64)
    partitions, free = x.shape
    groups = np.abs(x).reshape(partitions // 8, 8, free // 4, 4).max(axis=(1, 3))
    exponent = np.frexp(groups)[1] - 1 - (MX_LARGEST_EXPONENT[dtype] - 1)
    exponent = np.where(groups == 0, -127, np.clip(exponent, -127, 127))
    scale = np.repeat(np.repeat(exponent, 8, axis=0), 4, axis=1)
    return round_to(np.ldexp(x, -scale), dtype), (exponent + 127).astype(np.uint8)


def dropout_is_valid(data: ArrayLike, result: ArrayLike, prob: float) -> bool:
    """Every element is kept or zero; all kept at 0.0, none at 1.0; the share dropped within 6 standard deviations."""
    x, y = np.asarray(data, np.float64), np.asarray(result, np.float64)
    if not np.all((y == x) | (y == 0)):
        return False
    dropped = float(((y == 0) & (x != 0)).sum())
    count = float((x != 0).sum())
    return abs(dropped - count * prob) <= 6 * np.sqrt(count * prob * (1 - prob))

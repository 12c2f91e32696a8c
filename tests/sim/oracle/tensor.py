"""Tensor engine: nki.isa `nc_matmul`, `nc_matmul_mx`, `nc_transpose`."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .dtypes import round_to

Array = NDArray[np.float64]


def nc_matmul(stationary: ArrayLike, moving: ArrayLike, accumulate_on: ArrayLike | None = None) -> Array:
    """stationary.T @ moving of [K, M] and [K, N], free dims flattened, added to `accumulate_on` [M, N] when given.

    Tiling, transposition (an identity as moving operand) and the one/zero hints do not change the result.
    """
    x, y = (np.asarray(v, np.float64).reshape(np.shape(v)[0], -1) for v in (stationary, moving))
    product = x.T @ y
    return product if accumulate_on is None else product + np.asarray(accumulate_on, np.float64).reshape(product.shape)


def nc_matmul_double_row(stationary: ArrayLike, moving: ArrayLike, accumulate_on: ArrayLike | None = None) -> Array:
    """`perf_mode=double_row`: [K, 2, M] and [K, 2, N] contract over K and the 2."""
    x, y = (np.asarray(v, np.float64).reshape(np.shape(v)[0], 2, -1) for v in (stationary, moving))
    product = np.einsum("kdm,kdn->mn", x, y)
    return product if accumulate_on is None else product + np.asarray(accumulate_on, np.float64).reshape(product.shape)


def accumulate_bfloat16(products: list[Array]) -> Array:
    """A bfloat16 PSUM tile after these matmuls: every write rounds (trainium3_arch.rst, "BF16 Matmul Results")."""
    total = round_to(products[0], "bfloat16")
    for product in products[1:]:
        total = round_to(total + product, "bfloat16")
    return total


def nc_matmul_mx(
    stationary: ArrayLike,
    moving: ArrayLike,
    stationary_scale: ArrayLike,
    moving_scale: ArrayLike,
    accumulate_on: ArrayLike | None = None,
) -> Array:
    """MX matmul of unpacked elements [P, M, 4] and [P, N, 4], with e8m0 bytes [P/8, M] and [P/8, N].

    Element (p, m, q) is scaled by 2^(scale[p // 8, m] - 127); the contraction runs over p and q.
    """
    x = _dequantize(stationary, stationary_scale)
    y = _dequantize(moving, moving_scale)
    product = np.einsum("pmq,pnq->mn", x, y)
    return product if accumulate_on is None else product + np.asarray(accumulate_on, np.float64)


def _dequantize(elements: ArrayLike, scale_bytes: ArrayLike) -> Array:
    scale = np.repeat(2.0 ** (np.asarray(scale_bytes, np.float64) - 127), 8, axis=0)
    return np.asarray(elements, np.float64) * scale[:, :, None]


def scatter_scales(scale_bytes: ArrayLike, partitions: int, offset: int = 0) -> NDArray[np.uint8]:
    """Place dense scales [P/8, F] as the hardware wants them: rows `offset` to offset+3 of each 32-partition quadrant.

    Returns [P, F] for more than 32 partitions, [offset + P/8, F] up to 32 (mxfp-matmul.rst, "Scale Tensor").
    """
    dense = np.asarray(scale_bytes, np.uint8)
    rows = np.arange(partitions // 8)
    places = rows // 4 * 32 + rows % 4 + offset
    layout = np.zeros((partitions if partitions > 32 else offset + len(rows), dense.shape[1]), np.uint8)
    layout[places] = dense
    return layout


def nc_transpose(data: ArrayLike) -> NDArray[np.generic]:
    """[P, ...] to [free, P]; values and dtype are kept."""
    array = np.asarray(data)
    return array.reshape(array.shape[0], -1).T

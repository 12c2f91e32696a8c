"""Quantisation of tiles in SBUF: float8 with one scale (STATIC) or one per token (ROW), and microscaling (MX)."""

from __future__ import annotations

from typing import Any

from nki_parallel_attn.kernels.tiling import PARTITIONS
from nki_parallel_attn.nki import nisa, nl
from nki_parallel_attn.topology.types import DtypeMode

LEAST_SCALE = 2.0**-126  # the least normal float32: rows of zeros stay zeros without a case of their own
QUADRANT = 32
MX_GROUP_PARTITIONS = 8
COMPACT_BLOCK = 128

Tensor = Any


def float8_of(mode: DtypeMode) -> Any:
    """The float8 that `mode` means on this device."""
    newest = nisa.get_nc_version() == nisa.nc_version.gen4
    if mode == DtypeMode.OCP or (mode == DtypeMode.AUTO and newest):
        return nl.float8_e4m3fn
    return nl.float8_e4m3


def float8_max(dtype: Any) -> float:
    """Largest finite value of either float8 e4m3."""
    return 448.0 if dtype == nl.float8_e4m3fn else 240.0


def scale_on_scalar_engine(src: Tensor, inverse_scale: Tensor) -> Tensor:
    """src * inverse_scale in float32, inverse_scale [P, 1] float32."""
    scaled = nl.ndarray(src.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=scaled, data=src, op0=nl.multiply, operand0=inverse_scale, engine=nisa.engine.scalar)
    return scaled


def clamp_to_float8(dst: Tensor, src: Tensor) -> None:
    """dst = src in the range of dst's float8, infinity included."""
    most = float8_max(dst.dtype)
    nisa.tensor_scalar(
        dst=dst, data=src, op0=nl.minimum, operand0=most, op1=nl.maximum, operand1=-most, engine=nisa.engine.vector
    )


def quantize_rows(rows: Tensor, float8: Any) -> tuple[Tensor, Tensor]:
    """Each row by its own largest magnitude, which becomes float8's maximum: float8 [rows, K], scales [rows, 1].

    A row that holds NaN or infinity comes out with NaN.
    """
    count, width = rows.shape
    magnitudes = nl.ndarray((count, width), dtype=rows.dtype, buffer=nl.sbuf)
    largest = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar_reduce(
        dst=magnitudes, data=rows, op0=nl.abs, operand0=None, reduce_op=nl.maximum, reduce_res=largest
    )
    scale = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=scale,
        data=largest,
        op0=nl.multiply,
        operand0=1.0 / float8_max(float8),
        op1=nl.maximum,
        operand1=LEAST_SCALE,
        engine=nisa.engine.vector,
    )
    inverse = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=scale)
    quantized = nl.ndarray((count, width), dtype=float8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=quantized, data=rows, op0=nl.multiply, operand0=inverse, engine=nisa.engine.scalar)
    return quantized, scale


class Float8Transposer(nl.NKIObject):  # type: ignore[misc]
    """Transposes float8 tiles on the Tensor Engine, which leaves them 16 bits apart (trainium2_arch.rst)."""

    def __init__(self, dtype: Any) -> None:
        self.banks = []
        for _ in range(2):
            self.banks.append(nl.ndarray((PARTITIONS, 8, PARTITIONS, 2), dtype=dtype, buffer=nl.psum))
        self.turn = 0

    def transpose(self, dst: Tensor, src: Tensor, tiles: list[tuple[int, int]]) -> None:
        """dst[:size, k, :] = src[:, start : start+size].T for the k-th (start, size) of `tiles`."""
        count = src.shape[0]
        first = 0
        while first < len(tiles):
            size = tiles[first][1]
            bank = self.banks[self.turn % 2]
            batch = 0
            while batch < 8 and first + batch < len(tiles) and tiles[first + batch][1] == size:
                start = tiles[first + batch][0]
                nisa.nc_transpose(
                    dst=bank[0:size, batch, 0:count, 0],
                    data=src[:, start : start + size],
                    engine=nisa.engine.tensor,
                )
                batch += 1
            engine = nisa.engine.vector if self.turn % 2 == 0 else nisa.engine.scalar
            nisa.tensor_copy(
                dst=dst[0:size, first : first + batch, :], src=bank[0:size, 0:batch, 0:count, 0], engine=engine
            )
            first += batch
            self.turn += 1


def interleave_lanes(lanes: Tensor) -> Tensor:
    """[P, tokens, 4] from [P, 4, tokens], as quantize_mx wants the four elements of a word."""
    size, count, tokens = lanes.shape
    words = nl.ndarray((size, tokens, count), dtype=lanes.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=words, src=lanes.permute((0, 2, 1)), engine=nisa.engine.scalar)
    return words


def packed(weight: Tensor) -> Tensor:
    """An MX weight as [N * D / 4, H] of a packed dtype, from that or from its bytes."""
    if len(weight.shape) == 2:
        return weight
    dtype = nl.float8_e4m3fn_x4
    if weight.shape[2] == 2:
        dtype = nl.float4_e2m1fn_x4
    elif weight.dtype == nl.float8_e5m2:
        dtype = nl.float8_e5m2_x4
    return weight.view(dtype).squeeze_dim(2)


def load_scales(scales: Tensor, tiles: list[tuple[int, int]], first: int, count: int, compact: bool) -> Tensor:
    """Scales of weight columns first .. first+count-1, [128, tiles, count]: in 4 rows of each quadrant.

    Args:
        scales: dense, [K / 32, H]; compact, [K / 128, H / 128], which are repeated here.
        tiles: (first, partitions) of words.
    """
    scales = scales.view(nl.uint8)
    rows = QUADRANT // MX_GROUP_PARTITIONS
    if not compact:
        dense = nl.ndarray((PARTITIONS, len(tiles), count), dtype=nl.uint8, buffer=nl.sbuf)
        for k in range(len(tiles)):
            start, size = tiles[k]
            for at in range(0, size, QUADRANT):
                group = (start + at) // MX_GROUP_PARTITIONS
                nisa.dma_copy(dst=dense[at : at + rows, k, :], src=scales[group : group + rows, first : first + count])
        return dense
    first_block = first // COMPACT_BLOCK
    blocks = -(-(first + count) // COMPACT_BLOCK) - first_block
    given = nl.ndarray((PARTITIONS, len(tiles), blocks), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.memset(dst=given, value=0, engine=nisa.engine.gpsimd)  # partitions without a scale are copied too
    repeated = nl.ndarray((PARTITIONS, len(tiles), blocks * COMPACT_BLOCK), dtype=nl.uint8, buffer=nl.sbuf)
    for k in range(len(tiles)):
        start, size = tiles[k]
        for at in range(0, size, QUADRANT):
            block = (start + at) // QUADRANT
            source = scales[block : block + 1, first_block : first_block + blocks]
            nisa.dma_copy(dst=given[at : at + rows, k, :], src=source.broadcast(0, rows))
        nisa.tensor_copy(
            dst=repeated[0:size, k, :].reshape_dim(1, (blocks, COMPACT_BLOCK)),
            src=given[0:size, k, :].expand_dim(2).broadcast(2, COMPACT_BLOCK),
            engine=nisa.engine.gpsimd,
        )
    start = first - first_block * COMPACT_BLOCK
    return repeated[:, :, start : start + count]

"""Blocks of the weight's columns in SBUF for output_projection_cte, and their product with a chunk of tokens."""

from __future__ import annotations

from typing import Any

from nki_parallel_attn.kernels.projection_tokens import Activations, Chunk, loaded
from nki_parallel_attn.kernels.quantized_tiles import load_scales, packed
from nki_parallel_attn.kernels.tiling import PARTITIONS, tiles_of
from nki_parallel_attn.nki import nisa, nl
from nki_parallel_attn.topology.types import QuantizationType

# Of a weight tile per partition and transfer: in longer ones the first columns come later. No fewer than 1024 columns,
# for as many are stored at once while weights arrive.
LOADED_BYTES = 2048
LEAST_LOADED_COLUMNS = 1024
SHUFFLED_COLUMNS = 2048

Tensor = Any


class Block(nl.NKIObject):  # type: ignore[misc]
    """Adjacent columns of the weight.

    Attributes:
        tiles: [128, contraction tiles, columns], what matmuls take as moving.
        mx_scales: MX: [128, contraction tiles, columns] uint8.
        sizes: partitions of each contraction tile.
        factors: ROW: [128, columns] float32, what columns are multiplied with.
        bias: [128, columns], what is added after that, or None.
    """

    def __init__(self, first: int, count: int, sizes: list[int]) -> None:
        self.first = first
        self.count = count
        self.sizes = sizes
        self.tiles: Tensor = None
        self.mx_scales: Tensor = None
        self.factors: Tensor = None
        self.bias: Tensor = None


class Weights(nl.NKIObject):  # type: ignore[misc]
    """The weight with what belongs to its columns.

    Attributes:
        scale: STATIC: [128, 1] float32, what products are multiplied with.
        bytes_per_column: of a block, per partition.
        loaded_columns: columns of one transfer.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        weight_scales: Tensor | None,
        input_scales: Tensor | None,
        activations: Activations,
        compact: bool,
    ) -> None:
        quantization = activations.quantization
        self.activations = activations
        self.weight = weight
        self.weight_scales = weight_scales
        self.compact = compact
        self.scale: Tensor = None
        self.bias = bias
        itemsize, scale_size = 4 if activations.attention.dtype == nl.float32 else 2, 0
        if quantization == QuantizationType.MX:
            self.weight = packed(weight)
            itemsize, scale_size = 2 if self.weight.dtype == nl.float4_e2m1fn_x4 else 4, 1
        elif quantization != QuantizationType.NONE:
            self.weight = weight.view(activations.dtype)
            itemsize = 1
        if quantization == QuantizationType.STATIC:
            self.scale = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=self.scale, data1=loaded(input_scales), data2=loaded(weight_scales), op=nl.multiply)
        self.loaded_columns = max(LOADED_BYTES // itemsize, LEAST_LOADED_COLUMNS)
        self.bytes_per_column = len(activations.tiles) * (itemsize + scale_size)
        if quantization == QuantizationType.ROW:
            self.bytes_per_column += 4
        if bias is not None:
            self.bytes_per_column += 4 if bias.dtype == nl.float32 else 2

    def load(self, first: int, count: int) -> Block:
        """Start to load columns first .. first+count-1."""
        tiles = self.activations.tiles
        block = Block(first, count, [size for _, size in tiles])
        block.tiles = nl.ndarray((PARTITIONS, len(tiles), count), dtype=self.weight.dtype, buffer=nl.sbuf)
        # What every result needs first, then the columns in the order in which they are needed.
        if self.activations.quantization == QuantizationType.MX:
            block.mx_scales = load_scales(self.weight_scales, tiles, first, count, self.compact)
        if self.activations.quantization == QuantizationType.ROW:
            block.factors = on_all_partitions(self.weight_scales, first, count)
        if self.bias is not None:
            block.bias = on_all_partitions(self.bias, first, count)
        for column, columns in tiles_of(0, count, self.loaded_columns):
            for k in range(len(tiles)):
                start, size = tiles[k]
                nisa.dma_copy(
                    dst=block.tiles[0:size, k, column : column + columns],
                    src=self.weight[start : start + size, first + column : first + column + columns],
                )
        return block


def part_of(operand: Tensor | None, rows: int, column: int, columns: int) -> Tensor | None:
    """[rows, columns] of what a block has for every column, if it has it."""
    return None if operand is None else operand[0:rows, column : column + columns]


def multiply(dst: Tensor, chunk: Chunk, rows: tuple[int, int], block: Block, columns: tuple[int, int]) -> None:
    """dst[:rows, :columns] = the chunk's rows (first, count) times the block's columns (first, count).

    Full float8 tiles are contracted in pairs, which takes the time of one.
    """
    first_row, row_count = rows
    first_column, column_count = columns
    mx = chunk.mx_scales is not None
    if mx:
        row_count += row_count % 2
    pairs = block.tiles.dtype in (nl.float8_e4m3, nl.float8_e4m3fn)
    here = nl.ds(first_row, row_count)
    there = nl.ds(first_column, column_count)
    product = dst[0:row_count, 0:column_count]
    k = 0
    while k < len(block.sizes):
        size = block.sizes[k]
        if mx:
            nisa.nc_matmul_mx(
                dst=product,
                stationary=chunk.tiles[0:size, k, here],
                moving=block.tiles[0:size, k, there],
                stationary_scale=chunk.mx_scales[0:size, k, here],
                moving_scale=block.mx_scales[0:size, k, there],
                accumulate=k > 0,
            )
        elif pairs and k + 1 < len(block.sizes) and block.sizes[k + 1] == PARTITIONS:
            nisa.nc_matmul(
                dst=product,
                stationary=chunk.tiles[:, k : k + 2, here],
                moving=block.tiles[:, k : k + 2, there],
                accumulate=k > 0,
                perf_mode=nisa.matmul_perf_mode.double_row,
            )
            k += 1
        else:
            nisa.nc_matmul(
                dst=product,
                stationary=chunk.tiles[0:size, k, here],
                moving=block.tiles[0:size, k, there],
                accumulate=k > 0,
            )
        k += 1


def on_all_partitions(row: Tensor, first: int, count: int) -> Tensor:
    """[128, count] from columns first .. first+count-1 of the first row of an HBM tensor.

    DMA brings one row to each quadrant of 32 partitions, whose others a stream shuffle fills.
    """
    tile = nl.ndarray((PARTITIONS, count), dtype=row.dtype, buffer=nl.sbuf)
    for column, columns in tiles_of(0, count, SHUFFLED_COLUMNS):
        given = nl.ndarray((PARTITIONS, columns), dtype=row.dtype, buffer=nl.sbuf)
        nisa.memset(dst=given, value=0.0, engine=nisa.engine.gpsimd)  # the shuffle reads all partitions
        for quadrant in range(0, PARTITIONS, 32):
            nisa.dma_copy(
                dst=given[quadrant : quadrant + 1, :],
                src=row[0:1, first + column : first + column + columns],
            )
        nisa.nc_stream_shuffle(dst=tile[:, column : column + columns], src=given, shuffle_mask=[0] * 32)
    return tile

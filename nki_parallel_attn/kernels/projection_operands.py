"""output_projection_cte's operands in SBUF: chunks of tokens, contraction on partitions; blocks of weight columns."""

from __future__ import annotations

from typing import Any

from nki_parallel_attn.kernels.quantized_tiles import (
    Float8Transposer,
    load_scales,
    packed,
    quantize_rows,
    quantize_static,
    quantize_tokens_mx,
)
from nki_parallel_attn.kernels.tile_transposes import Transposer
from nki_parallel_attn.kernels.tiling import PARTITIONS, sequence_pieces, tiles_of
from nki_parallel_attn.nki import nisa, nl
from nki_parallel_attn.topology.types import OProjAttentionLayout, QuantizationType

LOADED_COLUMNS = 2048  # of a weight tile per transfer
SHUFFLED_COLUMNS = 2048

Tensor = Any


class Chunk(nl.NKIObject):  # type: ignore[misc]
    """Adjacent tokens of the flattened [B, S].

    Attributes:
        length: S.
        tiles: [128, contraction tiles, tokens], what matmuls take as stationary.
        row_scales: ROW: for every 128 tokens what their products are multiplied with, [tokens, 1] float32.
        mx_scales: MX: [128, contraction tiles, tokens] uint8.
    """

    def __init__(self, first: int, count: int, length: int) -> None:
        self.first = first
        self.count = count
        self.length = length
        self.tiles: Tensor = None
        self.row_scales: list[Tensor] = []
        self.mx_scales: Tensor = None


class Activations(nl.NKIObject):  # type: ignore[misc]
    """The attention tensor, and how it is loaded.

    Attributes:
        batch, length: B and S.
        tiles: (first, partitions) of each contraction tile: rows of N * D, with MX words of four rows.
        bytes_per_row: of a chunk, per partition.
    """

    def __init__(
        self,
        attention: Tensor,
        quantization: QuantizationType,
        input_scales: Tensor | None,
        float8: Any,
        layout: OProjAttentionLayout | None,
    ) -> None:
        by_row = quantization == QuantizationType.ROW
        if layout is None:
            layout = OProjAttentionLayout.BSNd if by_row else OProjAttentionLayout.BNdS
        self.quantization = quantization
        self.layout = layout
        self.attention = attention
        self.batch = attention.shape[0]
        if layout == OProjAttentionLayout.BNdS:
            _, self.heads, self.depth, self.length = attention.shape
            self.attention = attention.reshape((self.batch, self.heads * self.depth, self.length))
        elif layout == OProjAttentionLayout.BSNd:
            _, self.length, self.heads, self.depth = attention.shape
            self.attention = attention.reshape((self.batch, self.length, self.heads * self.depth))
        else:
            _, self.heads, self.length, self.depth = attention.shape
        rows = self.heads * self.depth
        self.float8 = float8
        self.dtype = attention.dtype
        itemsize = 4 if attention.dtype == nl.float32 else 2
        if quantization == QuantizationType.MX:
            self.tiles = tiles_of(0, rows // 4, PARTITIONS)
            self.dtype = nl.float8_e4m3fn_x4
            itemsize = 5  # of them one for the scale
        else:
            self.tiles = tiles_of(0, rows, PARTITIONS)
        if quantization in (QuantizationType.STATIC, QuantizationType.ROW):
            self.dtype = float8
            itemsize = 1
        self.bytes_per_row = len(self.tiles) * itemsize
        self.inverse_scale: Tensor = None
        self.transposer: Any = None
        if quantization == QuantizationType.STATIC:
            self.inverse_scale = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.reciprocal(dst=self.inverse_scale, data=loaded(input_scales))
        elif by_row:
            self.transposer = Float8Transposer(float8)
        elif attention.dtype == nl.float32:
            self.transposer = Transposer(nl.float32)

    def load(self, first: int, count: int) -> Chunk:
        """Start to load tokens first .. first+count-1, quantised and with the contraction on partitions."""
        chunk = Chunk(first, count, self.length)
        # An even number of tokens, which MX needs; the one too many is never used otherwise.
        chunk.tiles = nl.ndarray((PARTITIONS, len(self.tiles), count + count % 2), dtype=self.dtype, buffer=nl.sbuf)
        if self.quantization == QuantizationType.MX:
            chunk.mx_scales = nl.ndarray(chunk.tiles.shape, dtype=nl.uint8, buffer=nl.sbuf)
            self._load_mx(chunk)
        elif self.layout == OProjAttentionLayout.BNdS:
            self._load_transposed_already(chunk)
        elif self.transposer is None:
            self._load_by_dma_transpose(chunk)
        else:
            self._load_rows(chunk)
        return chunk

    def _load_transposed_already(self, chunk: Chunk) -> None:
        for k in range(len(self.tiles)):
            start, size = self.tiles[k]
            dst = chunk.tiles[0:size, k, 0 : chunk.count]
            raw = dst
            if self.inverse_scale is not None:
                raw = nl.ndarray((size, chunk.count), dtype=self.attention.dtype, buffer=nl.sbuf)
            for batch, position, rows, at in sequence_pieces(chunk.first, chunk.count, self.length):
                source = self.attention[batch, start : start + size, position : position + rows]
                nisa.dma_copy(dst=raw[:, at : at + rows], src=source)
            if self.inverse_scale is not None:
                quantize_static(dst, raw, self.inverse_scale[0:size, :])

    def _load_mx(self, chunk: Chunk) -> None:
        for k in range(len(self.tiles)):
            start, size = self.tiles[k]
            width = chunk.tiles.shape[2]
            raw = nl.ndarray((size, 4, width), dtype=self.attention.dtype, buffer=nl.sbuf)
            if width > chunk.count:
                nisa.memset(dst=raw[:, :, chunk.count : width], value=0.0, engine=nisa.engine.gpsimd)
            for batch, position, rows, at in sequence_pieces(chunk.first, chunk.count, self.length):
                source = self.attention[batch, 4 * start : 4 * (start + size), position : position + rows]
                nisa.dma_copy(dst=raw[:, :, at : at + rows], src=source.reshape_dim(0, (size, 4)))
            quantize_tokens_mx(chunk.tiles[0:size, k, :], chunk.mx_scales[0:size, k, :], raw)

    def _load_by_dma_transpose(self, chunk: Chunk) -> None:
        for batch, position, rows, at in sequence_pieces(chunk.first, chunk.count, self.length):
            for head, first, size, k, partition in self._runs():
                source = self._rows_of(batch, position, rows, head)[:, first : first + size]
                nisa.dma_transpose(dst=chunk.tiles[partition : partition + size, k, at : at + rows], src=source)

    def _runs(self) -> list[tuple[int, int, int, int, int]]:
        """Columns that lie together in HBM and in one contraction tile: (head, first, size, tile, partition).

        With BSNd all heads of a token lie together and count as one.
        """
        heads, depth = self.heads, self.depth
        if self.layout == OProjAttentionLayout.BSNd:
            heads, depth = 1, heads * depth
        runs = []
        for head in range(heads):
            row = head * depth
            while row < (head + 1) * depth:
                k, partition = row // PARTITIONS, row % PARTITIONS
                size = min(PARTITIONS - partition, (head + 1) * depth - row)
                runs.append((head, row - head * depth, size, k, partition))
                row += size
        return runs

    def _rows_of(self, batch: int, position: int, rows: int, head: int) -> Tensor:
        """[rows, D] of a head, or with BSNd [rows, N * D]."""
        if self.layout == OProjAttentionLayout.BSNd:
            return self.attention[batch, position : position + rows, :]
        return self.attention[batch, head, position : position + rows, :]

    def _load_rows(self, chunk: Chunk) -> None:
        """Tokens on partitions first, for what DMA cannot transpose: float32, and float8 that is yet to be computed."""
        depth = self.depth * (self.heads if self.layout == OProjAttentionLayout.BSNd else 1)
        for first, count in tiles_of(0, chunk.count, PARTITIONS):
            rows = nl.ndarray((count, self.heads * self.depth), dtype=self.attention.dtype, buffer=nl.sbuf)
            for batch, position, size, at in sequence_pieces(chunk.first + first, count, self.length):
                for head in range(self.heads * self.depth // depth):
                    nisa.dma_copy(
                        dst=rows[at : at + size, head * depth : (head + 1) * depth],
                        src=self._rows_of(batch, position, size, head),
                    )
            if self.quantization == QuantizationType.ROW:
                quantized, scale = quantize_rows(rows, self.float8)
                chunk.row_scales.append(scale)
                self.transposer.transpose(chunk.tiles[:, :, first : first + count], quantized, self.tiles)
            else:
                for k in range(len(self.tiles)):
                    start, size = self.tiles[k]
                    self.transposer.transpose(
                        [rows[:, start : start + size]], chunk.tiles[0:size, k, first : first + count]
                    )


class Block(nl.NKIObject):  # type: ignore[misc]
    """Adjacent columns of the weight.

    Attributes:
        tiles: [128, contraction tiles, columns], what matmuls take as moving.
        mx_scales: MX: [128, contraction tiles, columns] uint8.
        sizes: partitions of each contraction tile.
        steps: (operator, [128, columns]): what is done to the products, in this order.
    """

    def __init__(self, first: int, count: int, sizes: list[int]) -> None:
        self.first = first
        self.count = count
        self.sizes = sizes
        self.tiles: Tensor = None
        self.mx_scales: Tensor = None
        self.steps: list[tuple[Any, Tensor]] = []


class Weights(nl.NKIObject):  # type: ignore[misc]
    """The weight with what belongs to its columns.

    Attributes:
        scale: STATIC: [128, 1] float32, what products are multiplied with.
        bytes_per_column: of a block, per partition.
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
        self.rows: list[tuple[Any, Tensor]] = []  # (operator, [1, H]) for all columns
        itemsize = 4 if activations.attention.dtype == nl.float32 else 2
        if quantization == QuantizationType.MX:
            self.weight = packed(weight)
            itemsize = 3 if self.weight.dtype == nl.float4_e2m1fn_x4 else 5
        elif quantization != QuantizationType.NONE:
            self.weight = weight.view(activations.float8)
            itemsize = 1
        if quantization == QuantizationType.STATIC:
            self.scale = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=self.scale, data1=loaded(input_scales), data2=loaded(weight_scales), op=nl.multiply)
        elif quantization == QuantizationType.ROW:
            self.rows.append((nl.multiply, weight_scales))
        if bias is not None:
            self.rows.append((nl.add, bias))
        self.bytes_per_column = len(activations.tiles) * itemsize
        for _, row in self.rows:
            self.bytes_per_column += 4 if row.dtype == nl.float32 else 2

    def load(self, first: int, count: int) -> Block:
        """Start to load columns first .. first+count-1."""
        tiles = self.activations.tiles
        block = Block(first, count, [size for _, size in tiles])
        block.tiles = nl.ndarray((PARTITIONS, len(tiles), count), dtype=self.weight.dtype, buffer=nl.sbuf)
        for column, columns in tiles_of(0, count, LOADED_COLUMNS):
            for k in range(len(tiles)):
                start, size = tiles[k]
                nisa.dma_copy(
                    dst=block.tiles[0:size, k, column : column + columns],
                    src=self.weight[start : start + size, first + column : first + column + columns],
                )
        if self.activations.quantization == QuantizationType.MX:
            block.mx_scales = load_scales(self.weight_scales, tiles, first, count, self.compact)
        for op, row in self.rows:
            block.steps.append((op, on_all_partitions(row, first, count)))
        return block


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
    here = slice(first_row, first_row + row_count)
    there = slice(first_column, first_column + column_count)
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


def loaded(column: Tensor) -> Tensor:
    """A [128, 1] tensor in SBUF."""
    tile = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=column)
    return tile


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

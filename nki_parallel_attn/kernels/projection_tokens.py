"""Tokens in SBUF for output_projection_cte: contraction on partitions, quantised on the way.

Loading is apart from the work that follows it, which comes in steps: the engines take instructions in order, and the
steps of the next chunk are put between the products of the present one, so that nobody waits for a load.
"""

from __future__ import annotations

from typing import Any

from nki_parallel_attn.kernels.quantized_tiles import (
    Float8Transposer,
    clamp_to_float8,
    interleave_lanes,
    quantize_rows,
    scale_on_scalar_engine,
)
from nki_parallel_attn.kernels.tile_transposes import Transposer
from nki_parallel_attn.kernels.tiling import PARTITIONS, sequence_pieces, tiles_of
from nki_parallel_attn.nki import nisa, nl
from nki_parallel_attn.topology.types import OProjAttentionLayout, QuantizationType

MX_STEP_TOKENS = 256  # quantised at once, so that results do not wait long for the engines

Tensor = Any


class Chunk(nl.NKIObject):  # type: ignore[misc]
    """Adjacent tokens of the flattened [B, S].

    Attributes:
        length: S.
        tiles: [128, contraction tiles, tokens], what matmuls take as stationary.
        row_scales: ROW: for every 128 tokens what their products are multiplied with, [tokens, 1] float32.
        mx_scales: MX: [128, contraction tiles, tokens] uint8.
        raw: what is loaded but not yet in `tiles`, and what the first halves of steps made of it; with MX and STATIC
            for one contraction tile, else for all of them: (contraction tile, first token, tensor).
        step: steps done.
    """

    def __init__(self, first: int, count: int, length: int) -> None:
        self.first = first
        self.count = count
        self.length = length
        self.tiles: Tensor = None
        self.row_scales: list[Tensor] = []
        self.mx_scales: Tensor = None
        self.raw: list[tuple[int, int, Tensor]] = []
        self.step = 0

    def steps_left(self) -> int:
        """How often `Activations.advance` is still due."""
        return len(self.raw) + 1 - self.step if self.raw else 0


class Activations(nl.NKIObject):  # type: ignore[misc]
    """The attention tensor, and how it is loaded.

    Attributes:
        batch, length: B and S.
        tiles: (first, partitions) of each contraction tile: rows of N * D, with MX words of four rows.
        bytes_per_row: of SBUF per partition that a token takes, before and after quantisation.
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
            # All heads of a token lie together and count as one.
            self.heads = 1
            self.length, self.depth = attention.shape[1], attention.shape[2] * attention.shape[3]
            self.attention = attention.reshape((self.batch, 1, self.length, self.depth))
        else:
            _, self.heads, self.length, self.depth = attention.shape
        contraction = self.heads * self.depth
        itemsize = 4 if attention.dtype == nl.float32 else 2
        self.tiles = tiles_of(0, contraction, PARTITIONS)
        self.dtype = attention.dtype
        self.inverse_scale: Tensor = None
        self.transposer: Any = None
        bytes_per_tile = itemsize
        if quantization == QuantizationType.STATIC:
            self.dtype = float8
            self.inverse_scale = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.reciprocal(dst=self.inverse_scale, data=loaded(input_scales))
            bytes_per_tile = itemsize + 1
        elif by_row:
            self.dtype = float8
            self.transposer = Float8Transposer(float8)
            bytes_per_tile = itemsize + 1
        elif quantization == QuantizationType.MX:
            self.dtype = nl.float8_e4m3fn_x4
            self.tiles = tiles_of(0, contraction // 4, PARTITIONS)
            bytes_per_tile = 4 * itemsize + 5  # a word and its scale
        elif layout != OProjAttentionLayout.BNdS and attention.dtype == nl.float32:
            self.transposer = Transposer(nl.float32)
            bytes_per_tile = 2 * itemsize
        self.bytes_per_row = len(self.tiles) * bytes_per_tile

    def load(self, first: int, count: int) -> Chunk:
        """Start to load tokens first .. first+count-1."""
        chunk = Chunk(first, count, self.length)
        # An even number of tokens, which MX needs; the one too many is never used otherwise.
        chunk.tiles = nl.ndarray((PARTITIONS, len(self.tiles), count + count % 2), dtype=self.dtype, buffer=nl.sbuf)
        pieces = sequence_pieces(first, count, self.length)
        if self.quantization == QuantizationType.MX:
            chunk.mx_scales = nl.ndarray(chunk.tiles.shape, dtype=nl.uint8, buffer=nl.sbuf)
            self._load_lanes(chunk, pieces)
        elif self.layout == OProjAttentionLayout.BNdS:
            self._load_columns(chunk, pieces)
        elif self.transposer is None:
            self._load_by_dma_transpose(chunk, pieces)
        else:
            self._load_rows(chunk)
        return chunk

    def advance(self, chunk: Chunk) -> None:
        """Do the next step: the first half for one of `raw`, the second for the one before, which has waited long."""
        i = chunk.step
        if i < len(chunk.raw):
            k, token, raw = chunk.raw[i]
            chunk.raw[i] = (k, token, self._first_half(chunk, raw))
        if i > 0:
            k, token, half = chunk.raw[i - 1]
            self._second_half(chunk, k, token, half)
            chunk.raw[i - 1] = (k, token, None)
        chunk.step += 1

    def _first_half(self, chunk: Chunk, raw: Tensor) -> Tensor:
        if self.quantization == QuantizationType.STATIC:
            return scale_on_scalar_engine(raw, self.inverse_scale[0 : raw.shape[0], :])
        if self.quantization == QuantizationType.MX:
            return interleave_lanes(raw)
        if self.quantization == QuantizationType.ROW:
            quantized, scale = quantize_rows(raw, self.dtype)
            chunk.row_scales.append(scale)
            return quantized
        return raw

    def _second_half(self, chunk: Chunk, k: int, token: int, half: Tensor) -> None:
        size = half.shape[0]
        if self.quantization == QuantizationType.STATIC:
            clamp_to_float8(chunk.tiles[0:size, k, 0 : chunk.count], half)
        elif self.quantization == QuantizationType.MX:
            tokens = nl.ds(token, half.shape[1])
            nisa.quantize_mx(dst=chunk.tiles[0:size, k, tokens], src=half, dst_scale=chunk.mx_scales[0:size, k, tokens])
        elif self.quantization == QuantizationType.ROW:
            self.transposer.transpose(chunk.tiles[:, :, token : token + size], half, self.tiles)
        else:
            for k in range(len(self.tiles)):
                start, columns = self.tiles[k]
                self.transposer.transpose(
                    [half[:, start : start + columns]], chunk.tiles[0:columns, k, token : token + size]
                )

    def _load_columns(self, chunk: Chunk, pieces: list[tuple[int, int, int, int]]) -> None:
        """[B, N * D, S]: one contraction tile after the other."""
        for k in range(len(self.tiles)):
            start, size = self.tiles[k]
            tile = chunk.tiles[0:size, k, :]
            if self.quantization == QuantizationType.STATIC:
                tile = nl.ndarray((size, chunk.count), dtype=self.attention.dtype, buffer=nl.sbuf)
                chunk.raw.append((k, 0, tile))
            for batch, position, tokens, at in pieces:
                source = self.attention[batch, start : start + size, position : position + tokens]
                nisa.dma_copy(dst=tile[:, at : at + tokens], src=source)

    def _load_lanes(self, chunk: Chunk, pieces: list[tuple[int, int, int, int]]) -> None:
        """[B, N * D, S] as [words, 4, tokens]: a partition has four adjacent contraction rows."""
        width = chunk.tiles.shape[2]
        for k in range(len(self.tiles)):
            start, size = self.tiles[k]
            lanes = nl.ndarray((size, 4, width), dtype=self.attention.dtype, buffer=nl.sbuf)
            for first, tokens in tiles_of(0, width, MX_STEP_TOKENS):
                chunk.raw.append((k, first, lanes[:, :, first : first + tokens]))
            if width > chunk.count:
                nisa.memset(dst=lanes[:, :, chunk.count : width], value=0.0, engine=nisa.engine.gpsimd)
            for batch, position, tokens, at in pieces:
                source = self.attention[batch, 4 * start : 4 * (start + size), position : position + tokens]
                nisa.dma_copy(dst=lanes[:, :, at : at + tokens], src=source.reshape_dim(0, (size, 4)))

    def _load_by_dma_transpose(self, chunk: Chunk, pieces: list[tuple[int, int, int, int]]) -> None:
        """[B, heads, S, D] of 16 bits: a head's columns go to one contraction tile, or to two."""
        for batch, position, tokens, at in pieces:
            for head in range(self.heads):
                column = 0
                while column < self.depth:
                    row = head * self.depth + column
                    k, partition = row // PARTITIONS, row % PARTITIONS
                    size = min(PARTITIONS - partition, self.depth - column)
                    nisa.dma_transpose(
                        dst=chunk.tiles[partition : partition + size, k, at : at + tokens],
                        src=self.attention[batch, head, position : position + tokens, column : column + size],
                    )
                    column += size

    def _load_rows(self, chunk: Chunk) -> None:
        """[B, heads, S, D] with tokens on partitions, 128 at a time: float32, and what is to become float8 first."""
        depth = self.depth
        for first, count in tiles_of(0, chunk.count, PARTITIONS):
            rows = nl.ndarray((count, self.heads * depth), dtype=self.attention.dtype, buffer=nl.sbuf)
            chunk.raw.append((0, first, rows))
            for batch, position, tokens, at in sequence_pieces(chunk.first + first, count, self.length):
                for head in range(self.heads):
                    nisa.dma_copy(
                        dst=rows[at : at + tokens, head * depth : (head + 1) * depth],
                        src=self.attention[batch, head, position : position + tokens, :],
                    )


def loaded(column: Tensor) -> Tensor:
    """A [128, 1] tensor in SBUF."""
    tile = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=column)
    return tile

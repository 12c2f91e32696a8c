"""Local K and V on chip: read from a paged cache by indirect DMA, in the layouts that the Tensor Engine wants.

A slot that holds no visible token - absent in the block table, beyond the last query, left of every window - is not
read at all: its row of K and V is zero and its weight in the row sum is zero, so whatever the cache holds there, NaN
included, has no effect.

A slot that is read and holds a NaN or an infinity is zeroed and marked: the Tensor Engine would spread it to queries
that must not see it (0 * NaN is NaN). The marks are a column of V, which sums the weights that fall on such slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_parallel_attn.kernels.tile_transposes import Transposer
from nki_parallel_attn.kernels.visible_slots import SlotLayout
from nki_parallel_attn.nki import nisa, nl

# Slots of a segment: what one softmax group covers, and what is loaded together.
SEGMENT_SLOTS = 2048
# Columns of V beside its own: ones and marks.
EXTRA_COLUMNS = 2
# Bytes per partition that segments of K and V may occupy.
RESIDENT_BYTES = 80 * 1024


class Segment(nl.NKIObject):  # type: ignore[misc]
    """Up to SEGMENT_SLOTS slots of one KV head on chip.

    Attributes:
        first, tiles: slot tiles first .. first+tiles-1.
        k: [D, slots], K transposed.
        v: [slots of a tile, tiles, D + 2]: V; ones, but zero for slots that hold nothing visible; marks of slots that
            hold a NaN or an infinity.
    """

    def __init__(self, first: int, tiles: int, k: Any, v: Any) -> None:
        self.first = first
        self.tiles = tiles
        self.k = k
        self.v = v


class PagedKV(nl.NKIObject):  # type: ignore[misc]
    """Loads segments and keeps as many as fit."""

    def __init__(
        self,
        layout: SlotLayout,
        k_cache: Any,
        v_cache: Any,
        block_tables: Any,
        q_offset: Any,
        rows: int,
        dtype: Any,
        transposer: Transposer,
        packed: bool,
        k_scale: Any,
    ) -> None:
        """`q_offset`: int32 [128, 1], position of Q token 0 minus rank*b; `rows`: S; `dtype`: of K and V on chip."""
        self.layout = layout
        self.k_cache = as_device_float8(k_cache)
        self.v_cache = as_device_float8(v_cache)
        self.block_tables = block_tables
        self.q_offset = q_offset
        self.rows = rows
        self.dtype = dtype
        self.transposer = transposer
        self.packed = packed
        self.head_dim = v_cache.shape[3]
        self.kv_heads = v_cache.shape[1]
        self.k_scale = None
        if k_scale is not None:
            self.k_scale = nl.ndarray((self.head_dim, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(dst=self.k_scale, src=k_scale[: self.head_dim, :])
        self.segment_tiles = max(1, SEGMENT_SLOTS // layout.tile)
        self.segments = -(-layout.tiles // self.segment_tiles)
        itemsize = transposer.itemsize
        per_tile = (layout.tile + self.head_dim + EXTRA_COLUMNS) * itemsize
        self.resident = max(2, RESIDENT_BYTES // (self.segment_tiles * per_tile))
        self.column_sets = {}  # type: dict[str, Any]
        self.loaded = {}  # type: dict[str, Segment]
        self.order = []  # type: list[str]

    def segment(self, head: int, number: int) -> Segment:
        """Segment `number` of a KV head, loaded unless it is still there."""
        key = str(head) + "/" + str(number)
        if key not in self.loaded:
            if len(self.order) == self.resident:
                self.loaded.pop(self.order.pop(0))
            self.loaded[key] = self.load(head, number)
            self.order.append(key)
        return self.loaded[key]

    def load(self, head: int, number: int) -> Segment:
        """Read one segment from HBM."""
        first = number * self.segment_tiles
        tiles = min(self.segment_tiles, self.layout.tiles - first)
        size, dim = self.layout.tile, self.head_dim
        index = self.row_index(head, first, tiles, 1)
        v = nl.ndarray((size, tiles, dim + EXTRA_COLUMNS), dtype=self.dtype, buffer=nl.sbuf)
        k = nl.ndarray((dim, tiles * size), dtype=self.dtype, buffer=nl.sbuf)
        # 1 where all of a slot's K (V) is finite.
        k_finite = nl.ndarray((size, tiles), dtype=nl.float32, buffer=nl.sbuf)
        v_finite = nl.ndarray((size, tiles), dtype=nl.float32, buffer=nl.sbuf)
        # All reads first: they take long, and GpSimd, which makes their descriptors, must not wait in between.
        nisa.memset(dst=v, value=0.0, engine=nisa.engine.gpsimd)
        keys = None if self.packed else self.read_rows(self.k_cache, index)
        values = self.read_rows(self.v_cache, index, v[:, :, :dim])
        if self.packed:
            self.read_packed_keys(k, k_finite, head, first, tiles)
        batch = self.transposer.batch(size)
        for start in range(0, tiles, batch):
            stop = min(start + batch, tiles)
            if keys is not None:
                part = self.converted(keys[:, start:stop, :])
                zero_broken(part, k_finite[:, start:stop])
                self.transpose_keys(k[:, start * size : stop * size], part)
            part = v[:, start:stop, :dim]
            if values is not None:
                nisa.tensor_copy(dst=part, src=values[:, start:stop, :])
            zero_broken(part, v_finite[:, start:stop])
        nisa.tensor_scalar(dst=v[:, :, dim], data=index, op0=nl.greater_equal, operand0=0.0)
        exact(v_finite, v_finite, k_finite, nl.multiply)
        nisa.tensor_scalar(dst=v[:, :, dim + 1], data=v_finite, op0=nl.less, operand0=1.0)
        return Segment(first, tiles, k, v)

    def read_rows(self, cache: Any, index: Any, dst: Any = None) -> Any:
        """[size, tiles, D] rows of a cache, zero where left out; None if they were read into `dst`, which is zero."""
        size, tiles = index.shape
        rows = cache.flatten_dims(0, 2)
        direct = dst is not None and rows.dtype == self.dtype
        if not direct:
            dst = nl.ndarray((size, tiles, self.head_dim), dtype=rows.dtype, buffer=nl.sbuf)
            nisa.memset(dst=dst, value=0.0, engine=nisa.engine.gpsimd)
        for t in range(tiles):
            gather_rows(dst[:, t, :], rows, index[:, t : t + 1])
        return None if direct else dst

    def read_packed_keys(self, k: Any, finite: Any, head: int, first: int, tiles: int) -> None:
        """Rows of the packed K are pairs of slots, [D, 2]; the second of a pair may hold nothing visible."""
        size, dim = self.layout.tile, self.head_dim
        rows = self.k_cache.flatten_dims(0, 2).flatten_dims(1, 2)
        pairs = size // 2
        index = self.row_index(head, first, tiles, 2)
        seen = self.visible(self.columns(2)[:, 2:3], first, tiles, pairs)
        flags = nl.ndarray((pairs, tiles, 2), dtype=nl.float32, buffer=nl.sbuf)
        for t in range(tiles):
            stored = nl.ndarray((pairs, dim * 2), dtype=rows.dtype, buffer=nl.sbuf)
            nisa.memset(dst=stored, value=0.0, engine=nisa.engine.gpsimd)
            gather_rows(stored, rows, index[:, t : t + 1])
            # The second slots' bytes are the high ones: 0xFFFF keeps both, 0x00FF the first alone.
            keep = nl.ndarray((pairs, 1), dtype=nl.uint16, buffer=nl.sbuf)
            nisa.tensor_scalar(
                dst=keep, data=seen[:, t : t + 1], op0=nl.multiply, operand0=65280.0, op1=nl.add, operand1=255.0
            )
            halves = stored.view(nl.uint16)
            nisa.tensor_tensor(dst=halves, data1=halves, data2=keep.broadcast(1, dim), op=nl.bitwise_and)
            parted = nl.ndarray((pairs, 2, dim), dtype=self.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=parted, src=stored.reshape((pairs, dim, 2)).permute((0, 2, 1)))
            zero_broken(parted, flags[:, t, :])
            both = nl.ndarray((dim, 2 * pairs), dtype=self.dtype, buffer=nl.sbuf)
            self.transposer.transpose([parted[:, 0, :], parted[:, 1, :]], both)
            target = k[:, t * size : (t + 1) * size].reshape((dim, pairs, 2)).permute((0, 2, 1))
            self.scaled(target, both.reshape((dim, 2, pairs)))
        # From pairs to slots on partitions, through HBM.
        moved = nl.ndarray((tiles, pairs, 2), dtype=nl.float32, buffer=nl.private_hbm)
        nisa.dma_copy(dst=moved.permute((1, 0, 2)), src=flags)
        nisa.dma_copy(dst=finite, src=moved.reshape((tiles, size)).permute((1, 0)))

    def converted(self, stored: Any) -> Any:
        """float8 as the dtype on chip, which holds it exactly."""
        if stored.dtype == self.dtype:
            return stored
        wide = nl.ndarray(stored.shape, dtype=self.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=wide, src=stored)
        return wide

    def transpose_keys(self, k: Any, stored: Any) -> None:
        """k [D, n*size] from stored [size, n, D]."""
        self.transposer.transpose([stored[:, t, :] for t in range(stored.shape[1])], k)
        self.scaled(k, k)

    def scaled(self, dst: Any, src: Any) -> None:
        """dst = src * k_scale per head dim, rounded once to the dtype on chip."""
        if self.k_scale is not None:
            nisa.tensor_scalar(dst=dst, data=src, op0=nl.multiply, operand0=self.k_scale)
        elif dst is not src:
            nisa.tensor_copy(dst=dst, src=src)

    # Addresses. int32 on GpSimd, where it is exact: a cache may have more rows than float32 counts.

    def row_index(self, head: int, first: int, tiles: int, step: int) -> Any:
        """int32 [size/step, tiles]: row of the flattened cache for every `step`-th slot, negative to leave it out."""
        layout = self.layout
        size, per_block = layout.tile // step, layout.block_size // step
        index = self.block_entries(first, tiles, step)
        exact(index, index, filled(self.kv_heads * per_block, size, tiles), nl.multiply)
        exact(index, index, self.columns(step)[:, 0:1].broadcast(1, tiles), nl.add)
        # Parts of a block larger than a tile, and this head's rows.
        starts = nl.ndarray((size, tiles), dtype=nl.int32, buffer=nl.sbuf)
        parts = max(1, layout.block_size // layout.tile)
        for part in range(parts):
            chosen = [t for t in range(tiles) if (first + t) % parts == part]
            if chosen:
                nisa.memset(
                    dst=starts[:, chosen[0] : tiles : parts],
                    value=head * per_block + part * size,
                    engine=nisa.engine.gpsimd,
                )
        exact(index, index, starts, nl.add)
        exact(index, index, self.visible(self.columns(step)[:, 1:2], first, tiles, size), nl.multiply)
        exact(index, index, filled(-1, size, tiles), nl.add)
        return index

    def block_entries(self, first: int, tiles: int, step: int) -> Any:
        """int32 [size/step, tiles]: the block table's entry for each slot; -1 past its end."""
        layout = self.layout
        size = layout.tile // step
        per_tile, parts = max(1, layout.tile // layout.block_size), max(1, layout.block_size // layout.tile)
        entries = nl.ndarray((per_tile, tiles), dtype=nl.int32, buffer=nl.sbuf)
        nisa.memset(dst=entries, value=-1)
        if parts > 1:
            for t in range(tiles):
                block = (first + t) // parts
                nisa.dma_copy(dst=entries[:, t : t + 1], src=self.block_tables[:, block : block + 1])
        else:
            whole = min(tiles, layout.blocks // per_tile - first)
            if whole > 0:
                pattern = [[1, per_tile], [per_tile, whole]]
                nisa.dma_copy(dst=entries[:, :whole], src=self.block_tables.ap(pattern, offset=first * per_tile))
            rest = layout.blocks - (first + whole) * per_tile
            if whole < tiles and rest > 0:
                source = self.block_tables.ap([[1, rest], [1, 1]], offset=(first + whole) * per_tile)
                nisa.dma_copy(dst=entries[:rest, whole : whole + 1], src=source)
        numbers = nl.ndarray((per_tile, tiles), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=numbers, src=entries)
        over = np.zeros((per_tile, size), dtype=np.float32)
        for slot in range(size):
            over[slot * per_tile // size, slot] = 1.0
        return self.transposer.spread(numbers, constant(over))

    def columns(self, step: int) -> Any:
        """int32 [size/step, 3], for every `step`-th slot of tile 0: row in the block plus 1, position on rank 0, and
        the next slot's position."""
        layout = self.layout
        key = str(step)
        if key not in self.column_sets:
            slots = range(0, layout.tile, step)
            inside = [slot % layout.block_size // step + 1 for slot in slots]
            rows = [inside, [layout.position(slot) for slot in slots], [layout.position(slot + 1) for slot in slots]]
            self.column_sets[key] = self.transposer.to_columns(constant(np.array(rows, dtype=np.float32)))
        return self.column_sets[key]

    def visible(self, column: Any, first: int, tiles: int, size: int) -> Any:
        """int32 [size, tiles]: 1 for slots that some query of the call sees by position on this rank, else 0."""
        layout = self.layout
        positions = nl.ndarray((size, tiles), dtype=nl.int32, buffer=nl.sbuf)
        for t in range(tiles):
            nisa.memset(dst=positions[:, t : t + 1], value=layout.first_position(first + t), engine=nisa.engine.gpsimd)
        exact(positions, positions, column.broadcast(1, tiles), nl.add)
        exact(positions, positions, self.q_offset[:size, :].broadcast(1, tiles), nl.subtract)
        seen = nl.ndarray((size, tiles), dtype=nl.int32, buffer=nl.sbuf)
        exact(seen, positions, filled(self.rows - 1, size, tiles), nl.less_equal)
        if layout.window:
            exact(positions, positions, filled(-layout.window, size, tiles), nl.greater)
            exact(seen, seen, positions, nl.multiply)
        return seen


def as_device_float8(cache: Any) -> Any:
    """float8_e4m3fn as the 8-bit format that the target computes with; the finite bit patterns agree."""
    if cache.dtype == nl.float8_e4m3fn and nisa.get_nc_version() == nisa.nc_version.gen3:
        return cache.view(nl.float8_e4m3)
    return cache


def zero_broken(values: Any, finite: Any) -> None:
    """Zero the rows of `values` [P, n, D] that hold a NaN or an infinity; `finite` [P, n] is 0 there, else 1."""
    rows, count, dim = values.shape
    difference = nl.ndarray(values.shape, dtype=values.dtype, buffer=nl.sbuf)
    # x - x is 0, or NaN.
    nisa.tensor_tensor(dst=difference, data1=values, data2=values, op=nl.subtract)
    nisa.tensor_reduce(dst=finite, op=nl.add, data=difference, axis=2)
    nisa.tensor_scalar(dst=finite, data=finite, op0=nl.equal, operand0=0.0)
    wide = values.dtype == nl.float32
    bits = nl.uint32 if wide else nl.uint16
    mask = nl.ndarray((rows, count), dtype=bits, buffer=nl.sbuf)
    # All ones or all zeros: what is too large saturates.
    nisa.tensor_scalar(dst=mask, data=finite, op0=nl.multiply, operand0=2.0**32 if wide else 65535.0)
    stored = values.view(bits)
    nisa.tensor_tensor(dst=stored, data1=stored, data2=mask.expand_dim(2).broadcast(2, dim), op=nl.bitwise_and)


def gather_rows(dst: Any, rows: Any, index: Any) -> None:
    """dst[p] = rows[index[p]], left as it is where the index is out of range."""
    nisa.dma_copy(dst=dst, src=rows.vector_select(0, index), oob_mode=nisa.oob_mode.skip)


def exact(dst: Any, data1: Any, data2: Any, op: Any) -> None:
    """Element-wise on GpSimd, exact for integers."""
    nisa.tensor_tensor(dst=dst, data1=data1, data2=data2, op=op, engine=nisa.engine.gpsimd)


def filled(value: int, size: int, tiles: int) -> Any:
    """int32 [size, tiles] of one value."""
    column = nl.ndarray((size, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=column, value=value, engine=nisa.engine.gpsimd)
    return column.broadcast(1, tiles)


def constant(values: Any) -> Any:
    """A NumPy array on chip."""
    tile = nl.ndarray(values.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=nl.shared_constant(values))
    return tile

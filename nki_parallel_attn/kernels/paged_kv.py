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

from nki_parallel_attn.kernels.element_wise import Constants, gpsimd
from nki_parallel_attn.kernels.tile_transposes import Transposer
from nki_parallel_attn.kernels.visible_slots import SlotLayout
from nki_parallel_attn.nki import nisa, nl

# Slots of a segment: what one softmax group covers, and what is loaded together.
SEGMENT_SLOTS = 2048
# Columns of V beside its own: ones and marks.
EXTRA_COLUMNS = 2
# Bytes per partition that segments of K and V may occupy.
RESIDENT_BYTES = 40 * 1024


class Segment(nl.NKIObject):  # type: ignore[misc]
    """Up to SEGMENT_SLOTS slots of one KV head on chip, or on their way there.

    Attributes:
        first, tiles: slot tiles first .. first+tiles-1.
        k: [D, slots], K transposed.
        v: [slots of a tile, tiles, D + 2]: V; ones, but zero for slots that hold nothing visible; marks of slots that
            hold a NaN or an infinity.
        index: int32 [slots of a tile, tiles], rows of the cache.
        keys, values: as read, [slots of a tile, tiles, D]; None if they were read into k, v.
        k_finite, v_finite: float32 [slots of a tile, tiles], 1 where all of a slot's K (V) is finite.
        read, ready: so many tiles are on their way, and prepared.
        clean_keys, keys_done: the K of the next ones, once it is clean; and whether it has been transposed.
    """

    def __init__(self, first: int, tiles: int, k: Any, v: Any, k_finite: Any, v_finite: Any) -> None:
        self.first = first
        self.tiles = tiles
        self.k = k
        self.v = v
        self.k_finite = k_finite
        self.v_finite = v_finite
        self.keys = None  # type: Any
        self.values = None  # type: Any
        self.index = None  # type: Any
        self.read = 0
        self.ready = 0
        self.clean_keys = None  # type: Any
        self.keys_done = False


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
        constants: Constants,
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
        self.constants = constants
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
        self.numbers = {}  # type: dict[str, Any]
        self.loaded = {}  # type: dict[str, Segment]
        self.order = []  # type: list[str]
        self.next_segment = None  # type: Any
        self.next_tiles = 0

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
        """Make ready to read one segment from HBM."""
        first = number * self.segment_tiles
        tiles = min(self.segment_tiles, self.layout.tiles - first)
        size, dim = self.layout.tile, self.head_dim
        v = nl.ndarray((size, tiles, dim + EXTRA_COLUMNS), dtype=self.dtype, buffer=nl.sbuf)
        k = nl.ndarray((dim, tiles * size), dtype=self.dtype, buffer=nl.sbuf)
        k_finite = nl.ndarray((size, tiles), dtype=nl.float32, buffer=nl.sbuf)
        v_finite = nl.ndarray((size, tiles), dtype=nl.float32, buffer=nl.sbuf)
        segment = Segment(first, tiles, k, v, k_finite, v_finite)
        stored_v = v[:, :, :dim]
        if self.v_cache.dtype != self.dtype:
            segment.values = stored_v = nl.ndarray((size, tiles, dim), dtype=self.v_cache.dtype, buffer=nl.sbuf)
        clear(v)
        if segment.values is not None:
            clear(stored_v)
        if not self.packed:
            segment.keys = nl.ndarray((size, tiles, dim), dtype=self.k_cache.dtype, buffer=nl.sbuf)
            clear(segment.keys)
        segment.index = self.row_index(head, first, tiles, 1)
        nisa.tensor_scalar(dst=v[:, :, dim], data=segment.index, op0=nl.greater_equal, operand0=0.0)
        if self.packed:
            self.read_packed_keys(k, k_finite, head, first, tiles)
        return segment

    def read(self, segment: Segment, tiles: int) -> None:
        """Start to read the first `tiles` tiles of a segment at least, in the order in which they are needed."""
        while segment.read < min(tiles, segment.tiles):
            start = segment.read
            stop = segment.read = self.next_batch(segment, start)
            if not self.packed:
                self.read_rows(self.k_cache, segment.index, segment.keys, start, stop)
            values = segment.v[:, :, : self.head_dim] if segment.values is None else segment.values
            self.read_rows(self.v_cache, segment.index, values, start, stop)

    def next_batch(self, segment: Segment, start: int) -> int:
        """End of the batch of tiles from `start` on. The first ones of all are short: everything waits for them."""
        batch = self.transposer.batch(self.layout.tile)
        if segment.first == 0 and start < 2:
            return start + 1
        return min(start // batch * batch + batch, segment.tiles)

    def announce(self, head: int, number: int, tiles: int, more: bool) -> None:
        """The first `tiles` tiles of this segment are needed next: prepare them in prepare_ahead(). Read them, and with
        `more` those that are needed after that."""
        self.next_segment, self.next_tiles = self.segment(head, number), tiles
        self.read(self.next_segment, tiles + (self.transposer.batch(self.layout.tile) if more else 0))

    def prepare_ahead(self) -> None:
        """A step for what is needed next."""
        if self.next_segment is not None and self.next_segment.ready < self.next_tiles:
            self.prepare_batch(self.next_segment)

    def prepare(self, segment: Segment, tiles: int) -> None:
        """Prepare the first `tiles` tiles of a segment for the Tensor Engine, where that has not been done ahead."""
        self.read(segment, tiles)
        while segment.ready < tiles:
            self.prepare_batch(segment)

    def prepare_batch(self, segment: Segment) -> None:
        """A step of preparing the next tiles of a segment: K cleaned, K transposed, V."""
        size, dim = self.layout.tile, self.head_dim
        start = segment.ready
        stop = self.next_batch(segment, start)
        if segment.keys is not None and segment.clean_keys is None:
            segment.clean_keys = self.converted(segment.keys[:, start:stop, :])
            zero_broken(segment.clean_keys, segment.k_finite[:, start:stop])
            self.transposer.engines.add_to_vector(2 * (stop - start) * dim)
            return
        if segment.clean_keys is not None and not segment.keys_done:
            segment.keys_done = True
            self.transpose_keys(segment.k[:, start * size : stop * size], segment.clean_keys)
            return
        segment.clean_keys = None
        segment.keys_done = False
        segment.ready = stop
        part = segment.v[:, start:stop, :dim]
        if segment.values is not None:
            nisa.tensor_copy(dst=part, src=segment.values[:, start:stop, :])
        finite = segment.v_finite[:, start:stop]
        zero_broken(part, finite)
        self.transposer.engines.add_to_vector(2 * (stop - start) * dim)
        gpsimd(finite, finite, segment.k_finite[:, start:stop], nl.multiply)
        self.constants.apply(segment.v[:, start:stop, dim + 1], finite, 1.0, nl.less)
        if segment.ready == segment.tiles:
            segment.keys = segment.values = None

    def read_rows(self, cache: Any, index: Any, dst: Any, start: int, stop: int) -> None:
        """Rows of a cache into tiles start .. stop-1 of `dst`, which is left as it is where they are left out."""
        rows = cache.flatten_dims(0, 2)
        for t in range(start, stop):
            gather_rows(dst[:, t, :], rows, index[:, t : t + 1])

    def read_packed_keys(self, k: Any, finite: Any, head: int, first: int, tiles: int) -> None:
        """Rows of the packed K are pairs of slots, [D, 2]; either of a pair may hold nothing visible."""
        size, dim = self.layout.tile, self.head_dim
        rows = self.k_cache.flatten_dims(0, 2).flatten_dims(1, 2)
        pairs = size // 2
        index = self.row_index(head, first, tiles, 2)
        numbers = self.slot_numbers(head, first, tiles, 2)
        # One byte of each 16 bits: the second slots' bytes are the high ones.
        keep = nl.ndarray((pairs, tiles), dtype=nl.int32, buffer=nl.sbuf)
        second = nl.ndarray((pairs, tiles), dtype=nl.int32, buffer=nl.sbuf)
        gpsimd(keep, self.visible(numbers[:, 1, :]), filled(0x00FF, pairs, tiles), nl.multiply)
        gpsimd(second, self.visible(numbers[:, 2, :]), filled(0xFF00, pairs, tiles), nl.multiply)
        gpsimd(keep, keep, second, nl.add)
        kept = nl.ndarray((pairs, tiles), dtype=nl.uint16, buffer=nl.sbuf)
        nisa.tensor_copy(dst=kept, src=keep)
        flags = nl.ndarray((pairs, tiles, 2), dtype=nl.float32, buffer=nl.sbuf)
        for t in range(tiles):
            stored = nl.ndarray((pairs, dim * 2), dtype=rows.dtype, buffer=nl.sbuf)
            nisa.memset(dst=stored, value=0.0, engine=nisa.engine.gpsimd)
            gather_rows(stored, rows, index[:, t : t + 1])
            halves = stored.view(nl.uint16)
            nisa.tensor_tensor(dst=halves, data1=halves, data2=kept[:, t : t + 1].broadcast(1, dim), op=nl.bitwise_and)
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
        """int32 [size/step, tiles]: row of the flattened cache for every `step` slots, negative to leave them out."""
        size, per_block = self.layout.tile // step, self.layout.block_size // step
        index = self.block_entries(first, tiles, step)
        numbers = self.slot_numbers(head, first, tiles, step)
        rows_of_block, minus_one = filled(self.kv_heads * per_block, size, tiles), filled(-1, size, tiles)
        seen = self.visible(numbers[:, 1, :])
        if step > 1:
            gpsimd(seen, seen, self.visible(numbers[:, 2, :]), nl.maximum)
        gpsimd(index, index, rows_of_block, nl.multiply)
        gpsimd(index, index, numbers[:, 0, :], nl.add)
        gpsimd(index, index, seen, nl.multiply)
        gpsimd(index, index, minus_one, nl.add)
        return index

    def block_entries(self, first: int, tiles: int, step: int) -> Any:
        """int32 [size/step, tiles]: the block table's entry for each slot; -1 past its end."""
        layout = self.layout
        size = layout.tile // step
        per_tile, parts = max(1, layout.tile // layout.block_size), max(1, layout.block_size // layout.tile)
        entries = nl.ndarray((size, tiles), dtype=nl.int32, buffer=nl.sbuf)
        if parts > 1:
            for t in range(tiles):
                source = self.block_tables.ap([[0, size], [1, 1]], offset=(first + t) // parts)
                nisa.dma_copy(dst=entries[:, t : t + 1], src=source)
            return entries
        same = size // per_tile
        whole = min(tiles, layout.blocks // per_tile - first)
        if whole < tiles:
            nisa.memset(dst=entries, value=-1, engine=nisa.engine.gpsimd)
        if whole > 0:
            pattern = [[1, per_tile], [0, same], [per_tile, whole]]
            nisa.dma_copy(dst=entries[:, :whole], src=self.block_tables.ap(pattern, offset=first * per_tile))
        rest = layout.blocks - (first + whole) * per_tile
        if whole < tiles and rest > 0:
            source = self.block_tables.ap([[1, rest], [0, same], [1, 1]], offset=(first + whole) * per_tile)
            nisa.dma_copy(dst=entries[: rest * same, whole : whole + 1], src=source)
        return entries

    def slot_numbers(self, head: int, first: int, tiles: int, step: int) -> Any:
        """int32 [size/step, 3, tiles], for every `step`-th slot: its row among those of its block's heads, plus 1; its
        position on rank 0; that of the next slot."""
        layout = self.layout
        key = str([head, first, step])
        if key not in self.numbers:
            per_block = layout.block_size // step
            slots = (first + np.arange(tiles)) * layout.tile + np.arange(0, layout.tile, step)[:, None]
            rows = head * per_block + slots % layout.block_size // step + 1
            numbers = np.stack([rows, layout.positions(slots), layout.positions(slots + 1)], axis=1)
            self.numbers[key] = nl.shared_constant(numbers.astype(np.int32))
        tile = nl.ndarray((layout.tile // step, 3, tiles), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=self.numbers[key])
        return tile

    def visible(self, positions: Any) -> Any:
        """int32 [size, tiles]: 1 where some query of the call sees that position plus this rank's offset, else 0."""
        size, tiles = positions.shape
        ahead = nl.ndarray((size, tiles), dtype=nl.int32, buffer=nl.sbuf)
        last = filled(self.rows - 1, size, tiles)
        gpsimd(ahead, positions, self.q_offset[:size, :].broadcast(1, tiles), nl.subtract)
        seen = nl.ndarray((size, tiles), dtype=nl.int32, buffer=nl.sbuf)
        gpsimd(seen, ahead, last, nl.less_equal)
        if self.layout.window:
            gpsimd(ahead, ahead, filled(-self.layout.window, size, tiles), nl.greater)
            gpsimd(seen, seen, ahead, nl.multiply)
        return seen


def as_device_float8(cache: Any) -> Any:
    """float8_e4m3fn as the 8-bit format that the target computes with; the finite bit patterns agree."""
    if cache.dtype == nl.float8_e4m3fn and nisa.get_nc_version() == nisa.nc_version.gen3:
        return cache.view(nl.float8_e4m3)
    return cache


def zero_broken(values: Any, finite: Any) -> None:
    """Zero the rows of `values` [P, n, D] that hold a NaN or an infinity; `finite` [P, n] is 0 there, else 1."""
    rows, count, dim = values.shape
    zeros = nl.ndarray((rows, dim), dtype=values.dtype, buffer=nl.sbuf)
    for i in range(count):
        # x * 0 is 0, or NaN.
        nisa.tensor_scalar_reduce(
            dst=zeros,
            data=values[:, i, :],
            op0=nl.multiply,
            operand0=0.0,
            reduce_op=nl.add,
            reduce_res=finite[:, i : i + 1],
        )
    nisa.tensor_scalar(dst=finite, data=finite, op0=nl.equal, operand0=0.0)
    # 16-bit elements in pairs where there are pairs, which halves the time.
    wide = dim * values.dtype.itemsize % 4 == 0
    bits = nl.uint32 if wide else nl.uint16
    mask = nl.ndarray((rows, count), dtype=bits, buffer=nl.sbuf)
    # All ones or all zeros: what is too large saturates.
    nisa.tensor_scalar(dst=mask, data=finite, op0=nl.multiply, operand0=2.0**32 if wide else 65535.0)
    stored = values.view(bits)
    for i in range(count):
        row = stored[:, i, :]
        nisa.tensor_scalar(dst=row, data=row, op0=nl.bitwise_and, operand0=mask[:, i : i + 1])


def clear(tile: Any) -> None:
    """Zeros, written in elements of 4 bytes where that is possible."""
    if tile.dtype.itemsize < 4 and tile.shape[-1] * tile.dtype.itemsize % 4 == 0:
        tile = tile.view(nl.float32)
    nisa.memset(dst=tile, value=0.0, engine=nisa.engine.gpsimd)


def gather_rows(dst: Any, rows: Any, index: Any) -> None:
    """dst[p] = rows[index[p]], left as it is where the index is out of range."""
    nisa.dma_copy(dst=dst, src=rows.vector_select(0, index), oob_mode=nisa.oob_mode.skip)


def filled(value: int, size: int, tiles: int) -> Any:
    """int32 [size, tiles] of one value."""
    column = nl.ndarray((size, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=column, value=value, engine=nisa.engine.gpsimd)
    return column.broadcast(1, tiles)

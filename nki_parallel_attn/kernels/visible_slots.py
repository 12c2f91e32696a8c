"""Which tiles of local KV slots a tile of queries sees: at compile time where positions are known, else by masks.

All ranks run one program, so what differs between ranks is known at run time only. A tile of slots is, for a tile of
queries, hidden on every rank (skipped), seen whole by every query on every rank (not masked), or masked by bounds that
the device computes from this rank's offset: what a query sees of consecutive slots is one range of them.

Positions: local slot s of rank r holds position (s // b)*R*b + s % b + r*b, b the block size. Contiguous shards are
R = 1 with the rank in the offset.
"""

from __future__ import annotations

from typing import Any

from nki_parallel_attn.nki import nisa, nl

# Counts kept in SBUF; the same ones come back for every head and along the diagonal.
MAX_COUNTS = 512
# Entries of the block table that are looked at together.
TABLE_ENTRIES = 1024


def slot_tile_size(block_size: int) -> int:
    """Slots of one tile: whole blocks, or an even part of one, at most 128."""
    if block_size <= 128:
        return block_size * (128 // block_size)
    return largest_divisor(block_size, 128)


def largest_divisor(value: int, limit: int) -> int:
    """The largest divisor of `value` that is at most `limit`."""
    divisor = min(value, limit)
    while value % divisor:
        divisor -= 1
    return divisor


class SlotLayout(nl.NKIObject):  # type: ignore[misc]
    """Where this rank's slots are in the sequence.

    Attributes:
        ranks: R of round-robin, 1 for contiguous shards.
        block_size: b.
        tile: slots of one tile.
        tiles: number of slot tiles.
        blocks: entries of the block table that can be visible.
        q_offset: position of Q token 0 in the coordinates of the slots, or an upper bound of it.
        exact: q_offset is that of every rank, so that visibility is known at compile time.
        window: sliding window, 0 for none.
    """

    def __init__(self, ranks: int, block_size: int, blocks: int, q_offset: int, exact: bool, window: int) -> None:
        self.ranks = ranks
        self.block_size = block_size
        self.blocks = blocks
        self.tile = slot_tile_size(block_size)
        self.tiles = -(-blocks * block_size // self.tile)
        self.q_offset = q_offset
        self.exact = exact
        self.window = window

    def position(self, slot: int) -> int:
        """Position of a slot on rank 0."""
        return int(self.positions(slot))

    def positions(self, slots: Any) -> Any:
        """Positions on rank 0 of one slot or an array of them."""
        return slots // self.block_size * self.ranks * self.block_size + slots % self.block_size

    def first_position(self, tile: int) -> int:
        """Position of a tile's first slot on rank 0, the lowest of any rank."""
        return self.position(tile * self.tile)

    def last_position(self, tile: int) -> int:
        """Position of a tile's last slot on the last rank, the highest of any rank."""
        return self.position((tile + 1) * self.tile - 1) + (self.ranks - 1) * self.block_size

    def hidden(self, tile: int, row: int, rows: int) -> bool:
        """No query of row .. row+rows-1 sees the tile, on any rank."""
        if self.q_offset < 0:
            return False
        first = self.q_offset + row
        if self.first_position(tile) > first + rows - 1:
            return True
        return self.exact and self.window > 0 and self.last_position(tile) <= first - self.window

    def seen_whole(self, tile: int, row: int, rows: int) -> bool:
        """Every query of row .. row+rows-1 sees all of the tile, on every rank."""
        if not self.exact:
            return False
        first = self.q_offset + row
        if self.last_position(tile) > first:
            return False
        return self.window == 0 or self.first_position(tile) > first + rows - 1 - self.window


class Bounds(nl.NKIObject):  # type: ignore[misc]
    """What queries see of the slots of a unit: index i + start of slot i with first <= index < stop.

    Attributes:
        first, stop: float32 [rows, 1].
        start: number known at compile time.
    """

    def __init__(self, first: Any, stop: Any, start: int) -> None:
        self.first = first
        self.stop = stop
        self.start = start


class SlotMasks(nl.NKIObject):  # type: ignore[misc]
    """Bounds of what a tile of queries sees of consecutive slot tiles on this rank.

    They are sums of counts, for each slot tile that is not seen whole: how many of its slots are at or before a query,
    and how many are left of its window. These depend on the distance of the two tiles only.
    """

    def __init__(self, layout: SlotLayout, rows: int, q_offset: Any, filled: Any) -> None:
        """Both float32 [rows, 1], the same value in each partition.

        Args:
            q_offset: position of Q token 0 minus rank*b.
            filled: slots up to the last block that is there, or None if those beyond are not visible.
        """
        self.layout = layout
        self.rows = rows
        self.filled = filled
        # Position of the key minus that of the query, at distance 0.
        steps = nl.ndarray((rows, layout.tile), dtype=nl.float32, buffer=nl.sbuf)
        b = layout.block_size
        pattern = [[layout.ranks * b, layout.tile // b], [1, b]] if layout.tile >= b else [[1, layout.tile]]
        nisa.iota(dst=steps, pattern=pattern, offset=0, channel_multiplier=-1)
        self.ahead = nl.ndarray((rows, layout.tile), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=self.ahead, data=steps, op0=nl.subtract, operand0=q_offset)
        self.lowest = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=self.lowest, value=-1.0e6)
        self.counts = {}  # type: dict[str, Any]
        self.order = []  # type: list[str]

    def bounds(self, row: int, tiles: list[int]) -> Any:
        """Bounds for queries from `row` on and consecutive slot tiles; None where they are all seen whole."""
        layout = self.layout
        masked = [tile for tile in tiles if not layout.seen_whole(tile, row, self.rows)]
        if not masked:
            return None
        distances = [row - layout.first_position(tile) for tile in masked]
        whole = (len(tiles) - len(masked)) * layout.tile
        first = self.lowest
        if layout.window:
            # The slots seen whole come after those left of the window.
            first = self.total([distance - layout.window for distance in distances], -whole)
        return Bounds(first, self.within(self.total(distances, 0), masked[0] * layout.tile), -whole)

    def within(self, stop: Any, first: int) -> Any:
        """`stop`, counted from slot `first` on, no further than the slots that are filled.

        A slot of no block has a score of 0, which would be the maximum of a row whose own scores are low.
        """
        if self.filled is None:
            return stop
        bounded = nl.ndarray((self.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=bounded, data=self.filled, op0=nl.subtract, operand0=float(first), op1=nl.minimum, operand1=stop
        )
        return bounded

    def total(self, distances: list[int], extra: int) -> Any:
        """float32 [rows, 1]: sum of the counts at these distances, and `extra`."""
        key = str(distances) + str(extra)
        if len(distances) == 1 and not extra:
            return self.count(distances[0])
        if key not in self.counts:
            total = nl.ndarray((self.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=total, data=self.count(distances[0]), op0=nl.add, operand0=float(extra))
            for distance in distances[1:]:
                nisa.tensor_tensor(dst=total, data1=total, data2=self.count(distance), op=nl.add)
            self.keep(key, total)
        return self.counts[key]

    def count(self, distance: int) -> Any:
        """float32 [rows, 1]: slots of a tile at most `distance` ahead of the tile of queries."""
        key = str(distance)
        if key not in self.counts:
            seen = nl.ndarray((self.rows, self.layout.tile), dtype=nl.bfloat16, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=seen, data=self.ahead, op0=nl.less_equal, operand0=float(distance))
            count = nl.ndarray((self.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_reduce(dst=count, op=nl.add, data=seen, axis=1)
            self.keep(key, count)
        return self.counts[key]

    def keep(self, key: str, value: Any) -> None:
        """Remember a column; forget the oldest when there are many."""
        if len(self.order) == MAX_COUNTS:
            self.counts.pop(self.order.pop(0))
        self.counts[key] = value
        self.order.append(key)


def filled_slots(block_tables: Any, layout: SlotLayout, rows: int) -> Any:
    """float32 [rows, 1]: slots up to the end of the last block that is not absent."""
    filled = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=filled, value=0.0)
    for start in range(0, layout.blocks, TABLE_ENTRIES):
        count = min(TABLE_ENTRIES, layout.blocks - start)
        entries = nl.ndarray((rows, count), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=entries, src=block_tables.ap([[0, rows], [1, count]], offset=start))
        ends = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
        b = layout.block_size
        nisa.iota(dst=ends, pattern=[[b, count]], offset=(start + 1) * b, channel_multiplier=0)
        present = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=present, data=entries, op0=nl.greater_equal, operand0=0.0)
        nisa.tensor_tensor(dst=ends, data1=ends, data2=present, op=nl.multiply)
        last = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=last, op=nl.maximum, data=ends, axis=1)
        nisa.tensor_tensor(dst=filled, data1=filled, data2=last, op=nl.maximum)
    return filled

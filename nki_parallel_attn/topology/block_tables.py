"""Block tables of a paged KV cache: which physical block holds a rank's local logical block.

`BlockPool` hands out the physical blocks of one rank's cache, `block_table` and `active_blocks_table` lay lists of them
out as the tensors that the reference pages take. An entry of -1 means absent: nothing is read there.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError
from nki_parallel_attn.topology.kv_layout import BoundLayout

ABSENT = -1


class BlockPool:
    """The physical blocks 0 .. num_blocks-1 of one rank's cache, with a count of holders for each.

    A sequence's blocks are a plain list of numbers: `blocks = pool.allocate(3)`, later `blocks += pool.allocate(1)`.
    Two sequences with a common prefix share its blocks: `other = pool.share(blocks[:2]) + pool.allocate(1)`. The lowest
    free numbers go first, so ranks that make the same calls hold the same tables. Every call checks all it was given
    before it changes anything.
    """

    def __init__(self, num_blocks: int) -> None:
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
            raise ArgumentError("num_blocks", repr(num_blocks), "a positive integer")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that no one holds."""
        return len(self._free)

    def holders(self, block: int) -> int:
        """How many times `block` is held."""
        _check_block("block", block, self.num_blocks)
        return self._holders[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks.

        Raises:
            ArgumentError: fewer are free; none is taken then.
        """
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= self.num_free:
            raise ArgumentError("count", repr(count), f"0 to {self.num_free}, the free blocks of {self.num_blocks}")
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> list[int]:
        """Hold `blocks` once more and return them as a new list; share full blocks only, for no one may write to them.

        Raises:
            ArgumentError: a block that no one holds.
        """
        for index, block in enumerate(blocks):
            _check_block(f"blocks[{index}]", block, self.num_blocks)
            if not self._holders[block]:
                raise ArgumentError(f"blocks[{index}]", block, "a block that is held")
        for block in blocks:
            self._holders[block] += 1
        return list(blocks)

    def free(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each of `blocks`; a block without holders returns to the pool.

        Raises:
            ArgumentError: a block given up more often than it is held.
        """
        for index, block in enumerate(blocks):
            _check_block(f"blocks[{index}]", block, self.num_blocks)
        for block, count in Counter(blocks).items():
            if count > self._holders[block]:
                raise ArgumentError(
                    "blocks", f"block {block} {count} times", f"at most {self._holders[block]}, its holds"
                )
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                heapq.heappush(self._free, block)

    def check_writable(self, blocks: Iterable[int]) -> None:
        """Raise unless each of `blocks` has exactly one holder: a write would change another sequence's prefix.

        Raises:
            ArgumentError: a block that is shared or free.
        """
        for index, block in enumerate(blocks):
            if self.holders(block) != 1:
                raise ArgumentError(
                    f"blocks[{index}]",
                    f"block {block} with {self._holders[block]} holders",
                    "one holder to write to it",
                )


def blocks_needed(layout: BoundLayout, rank: int, length: int) -> int:
    """Blocks that `rank` needs for the first `length` tokens of a sequence; a started block counts whole."""
    return -(-layout.filled_slots(rank, length) // layout.block_size)


def block_table(blocks: Sequence[int], max_blocks: int, num_blocks: int) -> Tensor:
    """`block_tables` of attention_kv_parallel_segmented_cte: one sequence's local blocks as [1, max_blocks] int32.

    Args:
        blocks: physical block of each local logical block, -1 for absent; a block may appear twice (shared prefix).
        max_blocks: width of the table; the rest is filled with -1.
        num_blocks: blocks in the cache.

    Raises:
        ArgumentError: more blocks than `max_blocks`, or a block outside [-1, num_blocks).
    """
    return _table([blocks], max_blocks, num_blocks, "blocks")


def active_blocks_table(
    sequences: Sequence[Sequence[int]], max_blocks: int, num_blocks: int, kv_heads: int = 1
) -> Tensor:
    """`active_blocks_table` of attention_block_tkg: the local blocks of each sequence of the rank's batch.

    Returns:
        [B, max_blocks] int32, or [B, kv_heads, max_blocks] with entries block*kv_heads + head when kv_heads > 1: the
        page's num_blocks*kv_heads addressing. -1 stays -1.

    Raises:
        ArgumentError: no sequence, or as `block_table`.
    """
    if not sequences:
        raise ArgumentError("sequences", "no sequence", "at least one")
    table = _table(sequences, max_blocks, num_blocks, "sequences")
    return table if kv_heads == 1 else per_head_block_table(table, num_blocks, kv_heads)


def per_head_block_table(table: Tensor, num_blocks: int, kv_heads: int) -> Tensor:
    """Spread [B, max_blocks] block numbers to [B, kv_heads, max_blocks] int32 entries block*kv_heads + head."""
    check_block_table(table, num_blocks)
    if num_blocks * kv_heads > torch.iinfo(torch.int32).max:
        raise ArgumentError("num_blocks*kv_heads", num_blocks * kv_heads, "a count that fits in int32")
    blocks = table.to(torch.int64)[:, None, :]
    entries = blocks * kv_heads + torch.arange(kv_heads, device=table.device)[:, None]
    return torch.where(blocks == ABSENT, ABSENT, entries).to(torch.int32)


def check_block_table(table: Tensor, num_blocks: int, kv_heads: int = 1, argument: str = "block_tables") -> None:
    """Raise unless every entry is -1 or addresses the cache.

    Args:
        table: any shape; integers.
        num_blocks, kv_heads: of the cache; entries are valid in [-1, num_blocks*kv_heads), where kv_heads stays 1 for a
            table of block numbers.
        argument: the name to report.

    Raises:
        ArgumentTypeError: not an integer tensor.
        ArgumentError: an entry outside the range; names the first one's index and value.
    """
    if table.is_floating_point() or table.is_complex() or table.dtype == torch.bool:
        raise ArgumentTypeError(argument, table.dtype, "an integer dtype")
    limit = num_blocks * kv_heads
    table = table.to(torch.int64)  # of fewer bits -1 or the limit may be another number
    wrong = (table < ABSENT) | (table >= limit)
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        what = "num_blocks" if kv_heads == 1 else "num_blocks*kv_heads"
        raise ArgumentError(f"{argument}{list(index)}", int(table[index]), f"-1 or a block in [0, {limit}) ({what})")


def _table(sequences: Sequence[Sequence[int]], max_blocks: int, num_blocks: int, argument: str) -> Tensor:
    if isinstance(max_blocks, bool) or not isinstance(max_blocks, int) or max_blocks < 0:
        raise ArgumentError("max_blocks", repr(max_blocks), "an integer of at least 0")
    if num_blocks - 1 > torch.iinfo(torch.int32).max:
        raise ArgumentError("num_blocks", num_blocks, "at most 2^31 blocks, whose numbers fit in int32")
    table = torch.full((len(sequences), max_blocks), ABSENT, dtype=torch.int64)
    for row, blocks in zip(table, sequences, strict=True):
        if len(blocks) > max_blocks:
            raise ArgumentError(argument, f"{len(blocks)} blocks", f"at most max_blocks={max_blocks}")
        numbers = torch.as_tensor(blocks)
        if len(blocks) and (numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool):
            raise ArgumentTypeError(argument, numbers.dtype, "block numbers, which are integers")
        row[: len(blocks)] = numbers.to(torch.int64)
    check_block_table(table, num_blocks, argument=argument)
    return table.to(torch.int32)


def _check_block(argument: str, block: int, num_blocks: int) -> None:
    if not 0 <= block < num_blocks:
        raise ArgumentError(argument, block, f"a block in [0, {num_blocks})")

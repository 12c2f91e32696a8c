"""Where a token's K and V live: three ways to deal one sequence over R ranks, as closed forms in both directions.

A layout (`Contiguous()`, `RoundRobin()`, `Interleaved(i)`) is a description; `bind(...)` fixes the number of ranks and
the block size and answers the questions. All answers are vectorised: integers give integers, integer tensors of any
width give int64 tensors, exact for positions up to 2**31 and beyond. A rank fills its slots in order of position, so
the slots that a prefix fills are always 0, 1, ..., and the slots of a window of positions are one run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError

Index = TypeVar("Index", int, Tensor)


@dataclass(frozen=True)
class Contiguous:
    """Rank r holds positions [r*L, (r+1)*L), L being the local length."""

    def bind(self, *, ranks: int, block_size: int, local_length: int) -> ContiguousShards:
        """Fix the geometry; `local_length` (L) in tokens is a multiple of `block_size`."""
        return ContiguousShards(ranks, block_size, local_length)


@dataclass(frozen=True)
class RoundRobin:
    """Global block g lives on rank g % R as that rank's block g // R."""

    def bind(self, *, ranks: int, block_size: int, local_length: int | None = None) -> CyclicShards:
        """Fix the geometry; `local_length` is not needed, for shards grow evenly."""
        return CyclicShards(ranks, block_size, block_size)


@dataclass(frozen=True)
class Interleaved:
    """Runs of `interleave` tokens are dealt in turn; `interleave` divides the block size and equals it in RoundRobin.

    Source: the serving stack's virtual blocks of R*block_size positions (vllm-neuron/docs/design/parallelism/dcp.md).
    """

    interleave: int

    def bind(self, *, ranks: int, block_size: int, local_length: int | None = None) -> CyclicShards:
        """Fix the geometry; `local_length` is not needed, for shards grow evenly."""
        return CyclicShards(ranks, block_size, self.interleave)


KVLayout = Contiguous | RoundRobin | Interleaved


@dataclass(frozen=True)
class ContiguousShards:
    """`Contiguous` over `ranks` ranks of `local_length` tokens each."""

    ranks: int
    block_size: int
    local_length: int

    def __post_init__(self) -> None:
        _check_positive(ranks=self.ranks, block_size=self.block_size, local_length=self.local_length)
        if self.local_length % self.block_size:
            raise ArgumentError("local_length", self.local_length, f"a multiple of block_size={self.block_size}")

    def owner(self, position: Index) -> Index:
        """Index within the group of the rank that holds `position`; position < ranks*local_length."""
        position = _exact(position)
        _check_range("position", position, self.ranks * self.local_length)
        return position // self.local_length

    def slot(self, position: Index) -> Index:
        """Local token slot of `position` on its owner."""
        position = _exact(position)
        _check_range("position", position, self.ranks * self.local_length)
        return position % self.local_length

    def position(self, rank: int, slot: Index) -> Index:
        """Global position of local `slot` on `rank`; the inverse of (owner, slot)."""
        slot = _exact(slot)
        _check_rank(rank, self.ranks)
        _check_range("slot", slot, self.local_length)
        return slot + rank * self.local_length

    def filled_slots(self, rank: int, length: Index) -> Index:
        """How many local slots a prefix of `length` tokens fills on `rank`; length <= ranks*local_length."""
        length = _exact(length)
        _check_rank(rank, self.ranks)
        _check_range("length", length, self.ranks * self.local_length + 1)
        return _clamp(length - rank * self.local_length, 0, self.local_length)

    def visible_blocks(self, rank: int, query_position: Index) -> Index:
        """How many leading local blocks lie wholly at or before `query_position`.

        Padded queries may lie beyond the shards; they see every block.
        """
        query_position = _exact(query_position)
        _check_range("query_position", query_position)
        length = _clamp(query_position + 1, 0, self.ranks * self.local_length)
        return self.filled_slots(rank, length) // self.block_size

    def local_slots(self, length: int) -> int:
        """Slots each rank must hold for a sequence of `length` tokens, in whole blocks.

        Raises:
            ArgumentError: the shards together are shorter than `length`.
        """
        _check_range("length", length, self.ranks * self.local_length + 1)
        return self.local_length


@dataclass(frozen=True)
class CyclicShards:
    """`RoundRobin` (interleave == block_size) and `Interleaved` over `ranks` ranks."""

    ranks: int
    block_size: int
    interleave: int

    def __post_init__(self) -> None:
        _check_positive(ranks=self.ranks, block_size=self.block_size, interleave=self.interleave)
        if self.block_size % self.interleave:
            raise ArgumentError("interleave", self.interleave, f"a divisor of block_size={self.block_size}")

    @property
    def virtual_block(self) -> int:
        """Positions that fill exactly one block on every rank."""
        return self.ranks * self.block_size

    @property
    def stripe(self) -> int:
        """Positions that give every rank one run of `interleave` tokens."""
        return self.ranks * self.interleave

    def owner(self, position: Index) -> Index:
        """Index within the group of the rank that holds `position`."""
        position = _exact(position)
        _check_range("position", position)
        return (position // self.interleave) % self.ranks

    def slot(self, position: Index) -> Index:
        """Local token slot of `position` on its owner."""
        position = _exact(position)
        _check_range("position", position)
        # Stripes tile virtual blocks exactly, so the block and the offset in it come out of one expression.
        return (position // self.stripe) * self.interleave + position % self.interleave

    def position(self, rank: int, slot: Index) -> Index:
        """Global position of local `slot` on `rank`; the inverse of (owner, slot)."""
        slot = _exact(slot)
        _check_rank(rank, self.ranks)
        _check_range("slot", slot)
        return (slot // self.interleave) * self.stripe + rank * self.interleave + slot % self.interleave

    def filled_slots(self, rank: int, length: Index) -> Index:
        """How many local slots a prefix of `length` tokens fills on `rank`."""
        length = _exact(length)
        _check_rank(rank, self.ranks)
        _check_range("length", length)
        remainder = length % self.stripe - rank * self.interleave
        return (length // self.stripe) * self.interleave + _clamp(remainder, 0, self.interleave)

    def visible_blocks(self, rank: int, query_position: Index) -> Index:
        """How many leading local blocks lie wholly at or before `query_position`."""
        query_position = _exact(query_position)
        _check_range("query_position", query_position)
        return self.filled_slots(rank, query_position + 1) // self.block_size

    def local_slots(self, length: int) -> int:
        """Slots each rank must hold for a sequence of `length` tokens, in whole blocks."""
        _check_range("length", length)
        return -(-length // self.virtual_block) * self.block_size


BoundLayout = ContiguousShards | CyclicShards


def _exact(value: Index) -> Index:
    """Widen to int64, so that no product overflows; a float would be rounded silently and is refused."""
    if not isinstance(value, Tensor):
        if not _is_integer(value):
            raise ArgumentTypeError("positions", repr(value), "an integer or a tensor of integers")
        return value
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise ArgumentTypeError("positions", value.dtype, "an integer dtype")
    return value.to(torch.int64)


def _is_integer(value: object) -> bool:
    """Python's, NumPy's or torch's sizes; not a bool."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _clamp(value: Index, low: int, high: int) -> Index:
    if isinstance(value, Tensor):
        return value.clamp(low, high)
    return max(low, min(value, high))


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(name, repr(value), "a positive integer")


def _check_rank(rank: int, ranks: int) -> None:
    if not _is_integer(rank) or not 0 <= rank < ranks:
        raise ArgumentError("rank", repr(rank), f"an index within the group, 0 to {ranks - 1}")


def _check_range(name: str, value: int | Tensor, limit: int | None = None) -> None:
    if isinstance(value, Tensor):
        if not value.numel():
            return
        low, high = (int(v) for v in value.aminmax())
    else:
        low = high = value
    if low < 0 or (limit is not None and high >= limit):
        got = low if low < 0 else high
        raise ArgumentError(name, got, f"0 <= {name}" + ("" if limit is None else f" < {limit}"))

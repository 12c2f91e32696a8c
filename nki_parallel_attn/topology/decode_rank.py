"""DecodeRank: where one rank stands among the cp*kvdp ranks that share KV in decode, and what it sees of a step.

A step's active tokens are described once, the same on every rank: `positions` [B, S_tkg] are the positions that the new
tokens take in their sequences' caches. The prior of row b is every position below positions[b, 0]. -1 is padding: a
whole row (an unused place in the batch) or a row's tail (fewer tokens than S_tkg). KVDP slices the batch first, CP the
sequence of what remains.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError
from nki_parallel_attn.topology.kv_layout import BoundLayout
from nki_parallel_attn.topology.slot_mapping import PADDING


@dataclass(frozen=True)
class DecodeRank:
    """One rank's place in its KV group; the index within the group is cp_rank*kvdp + kvdp_rank.

    Args:
        layout: how the CP group's ranks share a sequence; `layout.ranks` is CP, 1 when it is off.
        cp_rank: index within the CP group.
        kvdp: KV data parallelism degree, 1 when it is off.
        kvdp_rank: index within the KVDP group.

    Raises:
        ArgumentError: a rank outside its group.
    """

    layout: BoundLayout
    cp_rank: int = 0
    kvdp: int = 1
    kvdp_rank: int = 0

    def __post_init__(self) -> None:
        for name, value, size in (("cp_rank", self.cp_rank, self.cp), ("kvdp_rank", self.kvdp_rank, self.kvdp)):
            if not 0 <= value < size:
                raise ArgumentError(name, value, f"an index within the group, 0 to {size - 1}")

    @classmethod
    def from_index(cls, layout: BoundLayout, index: int, kvdp: int = 1) -> DecodeRank:
        """The rank at `index` of the KV group."""
        return cls(layout, index // kvdp, kvdp, index % kvdp)

    @property
    def cp(self) -> int:
        """Context parallelism degree."""
        return self.layout.ranks

    def batch_rows(self, batch: int) -> slice:
        """The B/KVDP sequences of a batch of B whose KV this rank holds.

        Raises:
            ArgumentError: B is not a multiple of KVDP.
        """
        if batch % self.kvdp:
            raise ArgumentError("batch", batch, f"a multiple of kvdp={self.kvdp}")
        rows = batch // self.kvdp
        return slice(self.kvdp_rank * rows, (self.kvdp_rank + 1) * rows)

    def own_positions(self, positions: Tensor) -> Tensor:
        """`positions` of this rank's sequences, int64 [B/KVDP, S_tkg], after a check of the whole batch.

        Raises:
            ArgumentTypeError, ArgumentError: as `check_positions`; a position beyond the layout; B that is not a
                multiple of KVDP.
        """
        positions = check_positions(positions)
        self.layout.owner(positions.clamp(min=0))  # for its range check
        return positions[self.batch_rows(len(positions))]


def check_positions(positions: Tensor) -> Tensor:
    """Return `positions` [B, S_tkg] as int64.

    Raises:
        ArgumentTypeError: not integers.
        ArgumentError: not two dims, a value below -1, a token after padding in its row, or a position below the row's
            first one, which is the length of the prior.
    """
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise ArgumentTypeError("positions", positions.dtype, "an integer dtype")
    if positions.ndim != 2 or not positions.numel():
        raise ArgumentError("positions", tuple(positions.shape), "[B, S_tkg], not empty")
    positions = positions.to(torch.int64)
    if positions.shape[1] == 1 and int(positions.min()) >= PADDING:
        return positions  # the plain step, at every token: nothing else can be wrong
    first, later = positions[:, :1], positions[:, 1:]
    after_padding = (later != PADDING) & (positions[:, :-1] == PADDING)
    for wrong, expected in (
        (positions < PADDING, "at least 0, or -1 for padding"),
        (torch.nn.functional.pad(after_padding, (1, 0)), "padding (-1), for padding only ends a row"),
        ((positions != PADDING) & (positions < first), "at least the row's first position, the length of its prior"),
    ):
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            raise ArgumentError(f"positions[{row}, {column}]", int(positions[row, column]), expected)
    return positions

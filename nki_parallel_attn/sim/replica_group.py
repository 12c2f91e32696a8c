"""ReplicaGroup: which ranks take part in a collective, as NKI spells it.

Source: nki.collectives.ReplicaGroup (NKI 0.6) and ReplicaGroup.from_partition_op with rg_partition_op (NKI 0.7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from . import location
from .errors import ReplicaGroupError
from .integers import is_integer


class rg_partition_op(Enum):
    """How `ReplicaGroup.from_partition_op` maps a rank to the id of its rank list."""

    div = "div"
    mod = "mod"
    bitwise_and = "bitwise_and"


@dataclass(frozen=True, init=False)
class ReplicaGroup:
    """Rank lists of equal length that share no rank; a collective runs independently inside each list.

    `ReplicaGroup([[0, 1, 2, 3], [4, 5, 6, 7]])` runs within ranks 0 to 3 and within ranks 4 to 7. A rank's index in a
    collective is its place in its list. The lists may cover part of a world; `validate` demands all of it.

    Raises:
        ReplicaGroupError: no list, an empty list, lists of unequal length, a rank that is not a non-negative integer,
            or a rank that appears twice.
    """

    groups: tuple[tuple[int, ...], ...]

    def __init__(self, groups: Iterable[Iterable[int]]) -> None:
        lists = tuple(
            tuple(_as_rank(rank, groups) for rank in _as_list(group, groups)) for group in _as_list(groups, groups)
        )
        if not lists or not all(lists):
            raise _error(f"a replica group needs at least one rank list and no empty one, got {groups!r}")
        sizes = sorted({len(group) for group in lists})
        if len(sizes) > 1:
            raise _error(f"rank lists must have equal sizes, got sizes {sizes}: {_short(lists)}")
        seen: set[int] = set()
        for group in lists:
            for rank in group:
                if rank in seen:
                    raise _error(f"rank {rank} appears twice in replica group {_short(lists)}")
                seen.add(rank)
        object.__setattr__(self, "groups", lists)

    @staticmethod
    def from_partition_op(world_size: int, op: rg_partition_op, operand: int) -> ReplicaGroup:
        """Partition ranks 0..world_size-1: ranks with the same `op(rank, operand)` form one list, in rank order.

        Raises:
            ReplicaGroupError: world_size < 1, an operand that `op` cannot take, or lists of unequal size.
        """
        for name, value in (("world_size", world_size), ("operand", operand)):
            if not is_integer(value):
                raise _error(f"{name} must be an integer, got {value!r}")
        if world_size < 1:
            raise _error(f"world_size must be at least 1, got {world_size}")
        if not isinstance(op, rg_partition_op):
            raise _error(f"op must be a member of rg_partition_op, got {op!r}")
        if operand < 0 or (operand == 0 and op is not rg_partition_op.bitwise_and):
            raise _error(f"operand of {op} must be positive (0 only for bitwise_and), got {operand}")
        list_ids: dict[rg_partition_op, Callable[[int], int]] = {
            rg_partition_op.div: lambda rank: rank // operand,
            rg_partition_op.mod: lambda rank: rank % operand,
            rg_partition_op.bitwise_and: lambda rank: rank & operand,
        }
        list_id = list_ids[op]
        lists: dict[int, list[int]] = {}
        for rank in range(world_size):
            lists.setdefault(list_id(rank), []).append(rank)
        return ReplicaGroup(lists.values())

    @property
    def group_size(self) -> int:
        """Number of ranks in each list."""
        return len(self.groups[0])

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of every list, sorted."""
        return tuple(sorted(rank for group in self.groups for rank in group))

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The list that holds `rank`.

        Raises:
            ReplicaGroupError: no list holds it.
        """
        for group in self.groups:
            if rank in group:
                return group
        raise _error(f"rank {rank} is in no list of replica group {_short(self.groups)}")

    def index_of(self, rank: int) -> int:
        """Place of `rank` within its list.

        Raises:
            ReplicaGroupError: no list holds it.
        """
        return self.group_of(rank).index(rank)

    def validate(self, world_size: int) -> ReplicaGroup:
        """Return self when the lists partition ranks 0..world_size-1 exactly.

        Raises:
            ReplicaGroupError: a rank outside the world, or a rank of the world that no list holds.
        """
        ranks = self.ranks
        if ranks[-1] >= world_size:
            raise _error(f"rank {ranks[-1]} is outside a world of {world_size} ranks: {_short(self.groups)}")
        if len(ranks) < world_size:
            missing = sorted(set(range(world_size)) - set(ranks))
            raise _error(f"ranks {_short(missing)} of {world_size} are in no list: {_short(self.groups)}")
        return self


def _error(message: str) -> ReplicaGroupError:
    """Within a kernel with its line."""
    from .core import running_core  # here, because it loads torch

    if running_core() is None:
        return ReplicaGroupError(message)
    return ReplicaGroupError(f"{location.show(location.caller())}: {message}")


def _as_list(group: Any, groups: Any) -> Sequence[Any]:
    try:
        return list(group)
    except TypeError:
        raise _error(f"a replica group is a list of rank lists, got {groups!r}") from None


def _as_rank(rank: Any, groups: Any) -> int:
    if not is_integer(rank) or rank < 0:
        raise _error(f"ranks must be non-negative integers, got {rank!r} in {groups!r}")
    return int(rank)


def _short(value: Any) -> str:
    text = str([list(v) if isinstance(v, tuple) else v for v in value])
    return text if len(text) <= 200 else text[:197] + "..."

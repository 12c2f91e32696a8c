"""The ranks that one call of attention_block_tkg ties together: its KVDP list, its CP list, and the grid of both."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError
from nki_parallel_attn.ops.rank_agreement import check_in_world
from nki_parallel_attn.ops.validation import check_int
from nki_parallel_attn.sim.replica_group import ReplicaGroup


@dataclass(frozen=True)
class DecodeGroups:
    """World ranks, ascending.

    Attributes:
        kvdp, cp: this rank's list in each replica group; itself alone where the degree is 1.
        all: the kvdp*cp ranks that share KV.
        rank: this rank.
    """

    kvdp: tuple[int, ...]
    cp: tuple[int, ...]
    all: tuple[int, ...]
    rank: int

    @property
    def kvdp_rank(self) -> int:
        """Index in the KVDP list."""
        return self.kvdp.index(self.rank)


def decode_groups(kvdp: int, kvdp_group: ReplicaGroup | None, cp: int, cp_group: ReplicaGroup | None) -> DecodeGroups:
    """Find this rank's lists.

    Raises:
        ArgumentTypeError, ArgumentError: a degree below 1; a group that is missing, has another type or size, does not
            hold this rank or lists ranks out of order; lists that do not cross in a grid of kvdp*cp ranks.
    """
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    check_int("KVDP", kvdp, minimum=1)
    check_int("CP", cp, minimum=1)
    own_kvdp = _list_of("KVDP", kvdp, kvdp_group, rank)
    own_cp = _list_of("CP", cp, cp_group, rank)
    # Ranks with one index in their KVDP lists share a sequence: each of them must find the same CP list, and so on.
    grid = [_list_of("KVDP", kvdp, kvdp_group, peer) for peer in own_cp]
    for column, peer in enumerate(own_kvdp):
        expected = tuple(row[column] for row in grid)
        if _list_of("CP", cp, cp_group, peer) != expected:
            raise ArgumentError(
                "CP_replica_group",
                f"rank {peer} in {list(_list_of('CP', cp, cp_group, peer))}",
                f"{list(expected)}, which crosses KVDP_replica_group in a grid",
            )
    ranks = tuple(sorted(peer for row in grid for peer in row))
    if len(ranks) > 1 and not (dist.is_available() and dist.is_initialized()):
        name = "KVDP_replica_group" if kvdp > 1 else "CP_replica_group"
        raise ArgumentError(name, f"ranks {list(ranks)}", "one rank", "torch.distributed is not initialised")
    return DecodeGroups(own_kvdp, own_cp, ranks, rank)


def check_process_group(name: str, group: dist.ProcessGroup | None, ranks: tuple[int, ...], of: str) -> None:
    """Check for a torch process group of exactly these ranks."""
    if group is None:
        return
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentTypeError(name, type(group).__name__, "a torch process group with this rank")
    members = tuple(dist.get_process_group_ranks(group))
    if members != ranks:
        raise ArgumentError(name, f"ranks {list(members)}", f"{list(ranks)}, this rank's list in {of}")


def _list_of(kind: str, degree: int, group: ReplicaGroup | None, rank: int) -> tuple[int, ...]:
    name = f"{kind}_replica_group"
    if group is None:
        if degree > 1:
            raise ArgumentError(name, None, f"a ReplicaGroup with {kind}={degree}")
        return (rank,)
    if not isinstance(group, ReplicaGroup):
        raise ArgumentTypeError(name, type(group).__name__, "a ReplicaGroup")
    try:
        ranks = tuple(group.group_of(rank))
    except ValueError as error:
        raise ArgumentError(name, group.groups, f"a list that holds rank {rank}") from error
    if list(ranks) != sorted(ranks):
        raise ArgumentError(name, f"the list {list(ranks)}", "ranks in ascending order")
    if len(ranks) != degree:
        raise ArgumentError(kind, degree, f"{len(ranks)}, the length of {list(ranks)} in {name}")
    check_in_world(name, group)
    return ranks

"""Ranks raise together: before the first collective of an operation, each says whether its arguments are good.

A rank posts "ok" with a hash of what must be equal on all ranks, or the error it is about to raise, and reads what the
others posted (rank_board.py). Posts are used rather than a collective because they work before a process group exists,
leave nothing pending when a rank stays away, and a rank whose replica group is wrong can tell those that wait for it
although it does not know who they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Literal, get_args
from weakref import WeakKeyDictionary

import torch.distributed as dist

from nki_parallel_attn.errors import ArgumentError, PeerError, RankMismatchError
from nki_parallel_attn.ops.rank_board import ERROR, GONE, RankBoard
from nki_parallel_attn.sim.replica_group import ReplicaGroup

CheckRanks = Literal["always", "first", "never"]

OK = "ok "


def agree(
    operation: str,
    ranks: tuple[int, ...] | None,
    fields: Mapping[str, object],
    error: Exception | None,
    check_ranks: CheckRanks,
    partly_known: Mapping[str, object] | None = None,
    check_known: Callable[[Mapping[int, Mapping[str, str]]], None] | None = None,
) -> None:
    """Return on all of `ranks`, or raise on all of them.

    Args:
        operation: name for messages.
        ranks: world ranks of this rank's group; None when it is unknown, which needs an `error`.
        fields: what must be equal on all ranks, by argument name; values are compared by their `str`.
        error: what is wrong with this rank's arguments.
        check_ranks: "always" exchanges at every call, "first" once for each set of `fields`, "never" only raises
            `error` here. It must be the same on all ranks: those that exchange wait for those that do not.
        partly_known: what must be equal on the ranks that know it; None on those that do not.
        check_known: called with what each rank knows of `partly_known`, as text; it raises on all ranks or on none.

    Raises:
        error: as given.
        PeerError: other ranks refused their arguments, or did not arrive within the timeout of the default group.
        RankMismatchError: a field differs between ranks.
    """
    alone = not (dist.is_available() and dist.is_initialized()) or (ranks is not None and len(ranks) == 1)
    if alone or check_ranks == "never":
        if error:
            raise error
        return
    board = _board()
    if ranks is None:
        assert error is not None
        board.refuse(f"{operation}: {_describe(error)}")
        raise error
    digest = hashlib.sha256(json.dumps([operation, {k: str(v) for k, v in fields.items()}]).encode()).hexdigest()
    if check_ranks == "first" and error is None and (ranks, digest) in board.agreed:
        return
    known = {name: str(value) for name, value in (partly_known or {}).items() if value is not None}
    ok = f"{OK}{digest} {json.dumps(known)}"
    try:
        posted = board.exchange(operation, ranks, ERROR + _describe(error) if error else ok)
    except dist.DistError as lost:
        raise PeerError(f"{operation}: the rank that holds the store has died: {lost}") from (error or lost)
    if error:
        raise error
    gone = {rank: text.removeprefix(GONE) for rank, text in posted.items() if text.startswith(GONE)}
    if gone:
        raise PeerError(f"{operation}: ranks {list(gone)} have given up: {next(iter(gone.values()))}")
    refused = {rank: text.removeprefix(ERROR) for rank, text in posted.items() if text.startswith(ERROR)}
    if refused:
        reasons = "; ".join(f"rank {rank} refused its arguments: {text}" for rank, text in refused.items())
        raise PeerError(f"{operation}: {reasons}")
    digests = {text.removeprefix(OK).split(" ", 1)[0] for text in posted.values()}
    known_by_rank = {rank: json.loads(text.removeprefix(OK).split(" ", 1)[1]) for rank, text in posted.items()}
    differences = []
    if len(digests) > 1:
        details = board.exchange(operation, ranks, json.dumps({name: str(value) for name, value in fields.items()}))
        by_rank = {rank: json.loads(text) for rank, text in details.items()}
        differences.append(_differences(by_rank))
    for name in partly_known or {}:
        differences.append(_differences({rank: known for rank, known in known_by_rank.items() if name in known}))
    if any(differences):
        text = "; ".join(filter(None, differences))
        raise RankMismatchError(f"{operation}: arguments differ between ranks: {text}")
    if check_known is not None:
        check_known(known_by_rank)
    # Not before: after a failure all ranks compare again, the one that refused and those that did not.
    if check_ranks == "first":
        board.agreed.add((ranks, digest))


def check_check_ranks(value: object) -> None:
    """Raise ArgumentError unless `value` is one of `CheckRanks` or None."""
    if value is not None and value not in get_args(CheckRanks):
        raise ArgumentError("check_ranks", repr(value), f"one of {', '.join(get_args(CheckRanks))}")


def check_in_world(name: str, groups: ReplicaGroup) -> None:
    """Raise ArgumentError if a list of `groups` has a rank beyond the default group, which would never come."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    for ranks in groups.groups:
        if max(ranks) >= dist.get_world_size():
            raise ArgumentError(name, f"ranks {list(ranks)}", f"ranks below the world size, {dist.get_world_size()}")


_boards: WeakKeyDictionary[dist.ProcessGroup, RankBoard] = WeakKeyDictionary()


def _board() -> RankBoard:
    world = dist.group.WORLD
    assert world is not None
    if world not in _boards:
        store = dist.distributed_c10d._get_default_store()
        _boards[world] = RankBoard(store, dist.get_rank())
    return _boards[world]


def _differences(by_rank: Mapping[int, Mapping[str, str]]) -> str:
    """'scale: 1.0 on ranks 0, 1, 0.5 on rank 2', for each field that differs."""
    texts = []
    for name in dict.fromkeys(name for fields in by_rank.values() for name in fields):
        ranks_of: dict[str, list[int]] = {}
        for rank, fields in by_rank.items():
            ranks_of.setdefault(fields.get(name, "missing"), []).append(rank)
        if len(ranks_of) > 1:
            values = (
                f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
                for value, ranks in ranks_of.items()
            )
            texts.append(f"{name}: {', '.join(values)}")
    return "; ".join(texts)


def _describe(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}"

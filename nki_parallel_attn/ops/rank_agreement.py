"""Ranks raise together: before the first collective of an operation, each says whether its arguments are good.

A rank posts "ok" with a hash of what must be equal on all ranks, or the error it is about to raise, to the store that
torch.distributed was initialised with, and reads what the others posted. The store is used rather than a collective
because it works before a process group exists, leaves nothing pending when a rank stays away, and a rank whose replica
group is wrong can tell the ranks that wait for it although it does not know who they are.

Cost: two round trips to the store in a call, about half a millisecond for four ranks of one host.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, cast, get_args
from weakref import WeakKeyDictionary

import torch.distributed as dist

from nki_parallel_attn.errors import ArgumentError, PeerError, RankMismatchError

CheckRanks = Literal["always", "first", "never"]

PREFIX = "nki_parallel_attn"
# A rank that waits longer than this looks for reasons: a peer that refused, or one that waits in another group.
GRACE = timedelta(seconds=1)
POLL = timedelta(seconds=0.5)


def agree(
    operation: str,
    ranks: tuple[int, ...] | None,
    fields: Mapping[str, object],
    error: Exception | None,
    check_ranks: CheckRanks,
) -> None:
    """Return on all of `ranks`, or raise on all of them.

    Args:
        operation: name for messages.
        ranks: world ranks of this rank's group; None when it is unknown, which needs an `error`.
        fields: what must be equal on all ranks, by argument name; values are compared by their `str`.
        error: what is wrong with this rank's arguments.
        check_ranks: "always" exchanges at every call, "first" once for each set of `fields`, "never" only raises
            `error` here.

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
    if check_ranks == "first" and error is None:
        if (ranks, digest) in board.agreed:
            return
        board.agreed.add((ranks, digest))
    call = board.next_call(ranks)
    posted = board.exchange(operation, call, ranks, f"error {_describe(error)}" if error else f"ok {digest}")
    if error:
        raise error
    refused = {rank: text[6:] for rank, text in posted.items() if text.startswith("error ")}
    if refused:
        reasons = "; ".join(f"rank {rank} refused its arguments: {text}" for rank, text in refused.items())
        raise PeerError(f"{operation}: {reasons}")
    if len(set(posted.values())) > 1:
        details = board.exchange(operation, f"{call}/fields", ranks, json.dumps({k: str(v) for k, v in fields.items()}))
        by_rank = {rank: json.loads(text) for rank, text in details.items() if text.startswith("{")}
        raise RankMismatchError(f"{operation}: arguments differ between ranks: {_differences(by_rank)}")


def check_check_ranks(value: object) -> None:
    """Raise ArgumentError unless `value` is one of `CheckRanks` or None."""
    if value is not None and value not in get_args(CheckRanks):
        raise ArgumentError("check_ranks", repr(value), f"one of {', '.join(get_args(CheckRanks))}")


class _Board:
    """What ranks post about their calls, in the default group's store.

    Keys: <group>/<lifetime>.<call>/<rank> holds a rank's post for one call; refused/<rank> the error of a rank that
    does not know its group; waiting/<rank> the group that a rank has been waiting in for longer than the grace period.
    """

    def __init__(self, store: Any, rank: int) -> None:  # torch declares only a part of Store
        self.store: Any = dist.distributed_c10d.PrefixStore(PREFIX, store)
        self.timeout: timedelta = store.timeout
        self.rank = rank
        self.agreed: set[tuple[tuple[int, ...], str]] = set()
        self._calls: dict[tuple[int, ...], tuple[int, int]] = {}
        self._stale: dict[tuple[int, ...], str] = {}
        self._refused = False

    def next_call(self, ranks: tuple[int, ...]) -> str:
        """A name that no other call of the group has, in this life of the default process group or an earlier one."""
        if ranks not in self._calls:
            self._calls[ranks] = (self.store.add(f"lifetimes/{_join(ranks)}/{self.rank}", 1), 0)
        lifetime, count = self._calls[ranks]
        self._calls[ranks] = (lifetime, count + 1)
        return f"{lifetime}.{count}"

    def refuse(self, text: str) -> None:
        self.store.set(f"refused/{self.rank}", text)
        self._refused = True

    def exchange(self, operation: str, call: str, ranks: tuple[int, ...], text: str) -> dict[int, str]:
        """Post `text` and return every rank's, in rank order."""
        if self._refused:
            self.store.delete_key(f"refused/{self.rank}")
            self._refused = False
        keys = {rank: f"{_join(ranks)}/{call}/{rank}" for rank in ranks}
        self.store.set(keys[self.rank], text)
        self._wait(operation, ranks, keys)
        posted = dict(zip(ranks, (value.decode() for value in self._get(list(keys.values()))), strict=True))
        # Everyone has posted this call, so everyone has read the one before.
        if ranks in self._stale:
            self.store.delete_key(self._stale[ranks])
        self._stale[ranks] = keys[self.rank]
        return posted

    def _get(self, keys: list[str]) -> list[bytes]:
        if self.store.has_extended_api():
            return cast("list[bytes]", self.store.multi_get(keys))
        return [self.store.get(key) for key in keys]

    def _arrived(self, keys: list[str], patience: timedelta) -> bool:
        try:
            self.store.wait(keys, patience)
        except RuntimeError:  # of which DistStoreError is one
            return bool(self.store.check(keys))
        return True

    def _wait(self, operation: str, ranks: tuple[int, ...], keys: dict[int, str]) -> None:
        deadline = time.monotonic() + self.timeout.total_seconds()
        if self._arrived(list(keys.values()), min(GRACE, self.timeout)):
            return
        self.store.set(f"waiting/{self.rank}", json.dumps([list(ranks), operation]))
        try:
            while not self._arrived(list(keys.values()), POLL):
                missing = [rank for rank, key in keys.items() if not self.store.check([key])]
                problem = self._problem(ranks, keys, missing)
                if not problem and time.monotonic() > deadline:
                    problem = f"ranks {missing} did not arrive within {self.timeout.total_seconds():.0f} s"
                if problem:
                    # Also for the ranks that wait for the same ones.
                    self.store.set(keys[self.rank], f"error {problem}")
                    raise PeerError(f"{operation}: {problem}")
        finally:
            self.store.delete_key(f"waiting/{self.rank}")

    def _problem(self, ranks: tuple[int, ...], keys: dict[int, str], missing: list[int]) -> str:
        """Why the missing ranks will never come, or an empty string."""
        for rank in ranks:
            if rank not in missing and rank != self.rank:
                text = self.store.get(keys[rank]).decode()
                if text.startswith("error "):
                    return f"rank {rank}: {text[6:]}"
        for rank in missing:
            if self.store.check([f"refused/{rank}"]):
                return f"rank {rank} refused its arguments: {self.store.get(f'refused/{rank}').decode()}"
            if self.store.check([f"waiting/{rank}"]):
                theirs, operation = json.loads(self.store.get(f"waiting/{rank}"))
                # It waits for this rank as this rank waits for it: neither will come.
                if self.rank in theirs and theirs != list(ranks):
                    return (
                        f"replica_groups differ: rank {self.rank} is in group {list(ranks)}, "
                        f"rank {rank} in {operation} with group {theirs}"
                    )
        return ""


_boards: WeakKeyDictionary[dist.ProcessGroup, _Board] = WeakKeyDictionary()


def _board() -> _Board:
    world = dist.group.WORLD
    assert world is not None
    if world not in _boards:
        store = dist.distributed_c10d._get_default_store()
        _boards[world] = _Board(store, dist.get_rank())
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


def _join(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks))

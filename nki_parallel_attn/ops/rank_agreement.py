"""Ranks raise together: before the first collective of an operation, each says whether its arguments are good.

A rank posts "ok" with a hash of what must be equal on all ranks, or the error it is about to raise, to the store that
torch.distributed was initialised with, and reads what the others posted. The store is used rather than a collective
because it works before a process group exists, leaves nothing pending when a rank stays away, and a rank whose replica
group is wrong can tell the ranks that wait for it although it does not know who they are.

Cost: two round trips to the store for each call, about half a millisecond for four ranks of one host.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch.distributed as dist

from nki_parallel_attn.errors import ArgumentError, PeerError, RankMismatchError

CheckRanks = Literal["always", "first", "never"]

PREFIX = "nki_parallel_attn"
ERROR, OK, GONE = "error ", "ok ", "gone "
# A rank that waits longer than this looks for reasons, this often: a peer that refused, or that waits in another group.
GRACE_SECONDS = 1.0
LOOK_SECONDS = 0.5
# Pauses between two looks at the store: a tenth of the time waited so far, within these bounds.
PAUSE_SECONDS = (0.0001, 0.01)


def agree(
    operation: str,
    ranks: tuple[int, ...] | None,
    fields: Mapping[str, object],
    error: Exception | None,
    check_ranks: CheckRanks,
    partly_known: Mapping[str, object] | None = None,
) -> None:
    """Return on all of `ranks`, or raise on all of them.

    Args:
        operation: name for messages.
        ranks: world ranks of this rank's group; None when it is unknown, which needs an `error`.
        fields: what must be equal on all ranks, by argument name; values are compared by their `str`.
        error: what is wrong with this rank's arguments.
        check_ranks: "always" exchanges at every call, "first" once for each set of `fields`, "never" only raises
            `error` here.
        partly_known: what must be equal on the ranks that know it; None on those that do not.

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


def check_check_ranks(value: object) -> None:
    """Raise ArgumentError unless `value` is one of `CheckRanks` or None."""
    if value is not None and value not in get_args(CheckRanks):
        raise ArgumentError("check_ranks", repr(value), f"one of {', '.join(get_args(CheckRanks))}")


class _Board:
    """What ranks post about their calls, in the default group's store.

    <group>/<lifetime>/<rank>/<0 or 1> holds "<n> <text>", a rank's post for the group's n-th exchange. Two slots are
    enough: who posts n+2 has read n+1 from everyone, and who has posted n+1 has read n.
    refused/<rank> holds the last error of a rank that did not know its group. It counts as a call of the group that the
    rank uses next, so that a caller who goes on after an error stays in step with the others.
    waiting/<rank> holds the exchange that a rank has long been waiting in. Both are empty when that is over.
    """

    def __init__(self, store: Any, rank: int) -> None:  # torch declares only a part of Store
        self.store: Any = dist.distributed_c10d.PrefixStore(PREFIX, store)
        self.timeout: float = store.timeout.total_seconds()
        self.rank = rank
        self.agreed: set[tuple[tuple[int, ...], str]] = set()
        self._lifetimes: dict[tuple[int, ...], int] = {}
        self._next: Counter[tuple[int, ...]] = Counter()
        self._complete: set[tuple[tuple[int, ...], int]] = set()
        self._refusals: list[str] = []
        self._refused = 0
        self._seen_refusals: dict[int, int] = {}

    def refuse(self, text: str) -> None:
        """Tell whoever waits for this rank that it will not come."""
        self._refused += 1
        self._refusals.append(text)
        self.store.set(f"refused/{self.rank}", json.dumps([self._refused, text]))

    def exchange(self, operation: str, ranks: tuple[int, ...], text: str) -> dict[int, str]:
        """Post `text` and return every rank's, in rank order.

        Raises:
            PeerError: a rank will not come, or did not within the timeout.
        """
        refusals, self._refusals = self._refusals, []
        for refusal in refusals:
            self.exchange(operation, ranks, ERROR + refusal)
        if refusals:
            self.store.set(f"refused/{self.rank}", "")
        if ranks not in self._lifetimes:
            # Keys must differ from those of an earlier default group over the same store.
            self._lifetimes[ranks] = self.store.add(f"lifetimes/{_join(ranks)}/{self.rank}", 1)
        number = self._next[ranks]
        self._next[ranks] += 1
        self._post(ranks, self._lifetimes[ranks], number, text)
        start = looked = time.monotonic()
        try:
            while len(posted := self._read(ranks, number)) < len(ranks):
                now = time.monotonic()
                if now - start > GRACE_SECONDS and now - looked > LOOK_SECONDS:
                    looked = now
                    here = [ranks, self._lifetimes[ranks], number, operation]
                    self.store.set(f"waiting/{self.rank}", json.dumps(here))
                    missing = [rank for rank in ranks if rank not in posted]
                    problem = self._problem(operation, ranks, posted, missing)
                    if not problem and now - start > self.timeout:
                        problem = f"ranks {missing} did not arrive within {self.timeout:.0f} s"
                    if problem:
                        # For the ranks that wait for the same ones, and for those that come after all.
                        self._post(ranks, self._lifetimes[ranks], number, GONE + problem)
                        raise PeerError(f"{operation}: {problem}")
                time.sleep(min(max((now - start) / 10, PAUSE_SECONDS[0]), PAUSE_SECONDS[1]))
        finally:
            if looked > start:
                self.store.set(f"waiting/{self.rank}", "")
        return posted

    def _post(self, ranks: tuple[int, ...], lifetime: int, number: int, text: str) -> None:
        self.store.set(f"{_join(ranks)}/{lifetime}/{self.rank}/{number % 2}", f"{number} {text}")

    def _read(self, ranks: tuple[int, ...], number: int) -> dict[int, str]:
        """The posts of this exchange that are there; one round trip once all keys exist, for reading others blocks."""
        keys = {rank: f"{_join(ranks)}/{self._lifetimes[ranks]}/{rank}/{number % 2}" for rank in ranks}
        if (ranks, number % 2) not in self._complete:
            if self.store.check(list(keys.values())):
                self._complete.add((ranks, number % 2))
            else:
                keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        names = list(keys.values())
        values = self.store.multi_get(names) if self.store.has_extended_api() else map(self.store.get, names)
        numbered = {rank: value.decode().partition(" ") for rank, value in zip(keys, values, strict=True)}
        return {rank: text for rank, (of, _, text) in numbered.items() if int(of) == number}

    def _lookup(self, key: str) -> str:
        """The value of a key that is emptied but never deleted; an empty string when it was never set."""
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _problem(self, operation: str, ranks: tuple[int, ...], posted: Mapping[int, str], missing: list[int]) -> str:
        """Why the missing ranks will never come, or an empty string."""
        for text in posted.values():
            if text.startswith(GONE):
                return text.removeprefix(GONE)
        for rank in missing:
            if refusal := self._lookup(f"refused/{rank}"):
                count, text = json.loads(refusal)
                if self._seen_refusals.get(rank, 0) < count:
                    self._seen_refusals[rank] = count
                    return f"rank {rank} refused its arguments: {text}"
            if waiting := self._lookup(f"waiting/{rank}"):
                theirs, lifetime, number, their_operation = json.loads(waiting)
                # It waits for this rank as this rank waits for it: neither will come. One of the two, the one in the
                # smaller group, tells the group of the other.
                if self.rank in theirs and (len(ranks), list(ranks)) < (len(theirs), theirs):
                    problem = (
                        f"replica_groups differ: rank {rank} is in {their_operation} with group {theirs}, "
                        f"rank {self.rank} in {operation} with group {list(ranks)}"
                    )
                    self._post(tuple(theirs), lifetime, number, ERROR + problem)
                    self._next[tuple(theirs)] = number + 1
                    return problem
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

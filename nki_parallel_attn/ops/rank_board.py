"""What the ranks of a group post about their calls, and what they find out when a post does not come.

Posts go through the default group's store, which every rank reaches, and through mailboxes (rank_mailbox.py) between
ranks of one host, which cost microseconds and no server. A rank always writes to its mailbox, and to the store until
all peers have said that they read its mailbox. It reads a mailbox if it can, else the store. So the ranks need not
agree on a way: each pair finds its own, at the group's first exchange, and groups across hosts work as before.

In the store:
    <group>/<lifetime>/<rank>/<0 or 1>  a rank's post for the group's n-th exchange, by the parity of n. Two places are
        enough: who posts n+2 has read n+1 from everyone, and who has posted n+1 has read n.
    refused/<rank>  the last error of a rank that did not know its group. It counts as a call of the group that the rank
        uses next, so that a caller who goes on after an error stays in step with the others.
    waiting/<rank>  the exchange that a rank has long been waiting in. Both are empty when that is over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from nki_parallel_attn.errors import PeerError
from nki_parallel_attn.ops.rank_mailbox import OwnMailbox, PeerMailbox

PREFIX = "nki_parallel_attn"
ERROR, GONE = "error ", "gone "
# A rank that waits longer than this looks for reasons, this often: a peer that refused, died or waits in another group.
GRACE_SECONDS = 1.0
LOOK_SECONDS = 0.5
# Pauses between two looks for posts: a tenth of the time waited so far, within these bounds.
PAUSE_SECONDS = (0.00005, 0.01)


@dataclass
class _Group:
    """One rank list's exchanges, as this rank sees them.

    Attributes:
        lifetime: tells the list's keys from those of an earlier default group over the same store.
        next: number of the next exchange.
        mailbox: this rank's; None where the system has none.
        peers: mailboxes that this rank reads.
        unreachable: peers whose mailbox cannot be read from here.
        read_by: peers that read this rank's mailbox.
        store_complete: parities for which the keys that this rank reads exist in the store.
    """

    ranks: tuple[int, ...]
    lifetime: int
    mailbox: OwnMailbox | None
    next: int = 0
    peers: dict[int, PeerMailbox] = field(default_factory=dict)
    unreachable: set[int] = field(default_factory=set)
    read_by: set[int] = field(default_factory=set)
    store_complete: set[int] = field(default_factory=set)

    def key(self, rank: int, number: int) -> str:
        return f"{_join(self.ranks)}/{self.lifetime}/{rank}/{number % 2}"


class RankBoard:
    """The posts of one default group.

    Attributes:
        timeout: seconds to wait for a post, by default the store's timeout.
    """

    def __init__(self, store: Any, rank: int) -> None:  # torch declares only a part of Store
        self.store: Any = dist.distributed_c10d.PrefixStore(PREFIX, store)
        self.timeout: float = store.timeout.total_seconds()
        self.rank = rank
        self.agreed: set[tuple[tuple[int, ...], str]] = set()
        self._groups: dict[tuple[int, ...], _Group] = {}
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
        group = self._group(ranks)
        number = group.next
        group.next += 1
        self._post(group, number, text)
        posted = {self.rank: text}
        start = looked = time.monotonic()
        try:
            while len(posted) < len(ranks):
                self._read(group, number, posted)
                missing = [rank for rank in ranks if rank not in posted]
                if not missing:
                    break
                now = time.monotonic()
                if now - start > GRACE_SECONDS and now - looked > LOOK_SECONDS:
                    looked = now
                    self.store.set(f"waiting/{self.rank}", json.dumps([ranks, group.lifetime, number, operation]))
                    problem = self._problem(operation, group, number, posted, missing)
                    if not problem and now - start > self.timeout:
                        problem = f"ranks {missing} did not arrive within {self.timeout:.0f} s"
                    if problem:
                        # For the ranks that wait for the same ones, and for those that come after all.
                        self._post(group, number, GONE + problem)
                        raise PeerError(f"{operation}: {problem}")
                time.sleep(min(max((now - start) / 10, PAUSE_SECONDS[0]), PAUSE_SECONDS[1]))
        finally:
            if looked > start:
                self.store.set(f"waiting/{self.rank}", "")
        return {rank: posted[rank] for rank in ranks}

    def _group(self, ranks: tuple[int, ...]) -> _Group:
        if ranks not in self._groups:
            lifetime = self.store.add(f"lifetimes/{_join(ranks)}/{self.rank}", 1)
            try:
                mailbox = OwnMailbox()
            except (OSError, AttributeError):  # no /proc, or no os.memfd_create
                mailbox = None
            self._groups[ranks] = _Group(ranks, lifetime, mailbox)
        return self._groups[ranks]

    def _post(self, group: _Group, number: int, text: str) -> None:
        """Post "<whether all peers' mailboxes are read> <own mailbox> <text>"."""
        others = len(group.ranks) - 1
        address = group.mailbox.address if group.mailbox else "null"
        text = f"{int(len(group.peers) == others)} {address} {text}"
        if group.mailbox:
            group.mailbox.write(number, text)
        if len(group.read_by) < others:
            self.store.set(group.key(self.rank, number), f"{number} {text}")

    def _read(self, group: _Group, number: int, posted: dict[int, str]) -> None:
        """Add the posts of this exchange that are there to `posted`."""
        found: dict[int, tuple[int, str]] = {}
        in_store = []
        for rank in group.ranks:
            if rank in posted:
                continue
            if rank not in group.peers:
                in_store.append(rank)
            elif (post := group.peers[rank].read(number)) is not None:
                found[rank] = post
        if in_store:
            found |= self._read_store(group, number, in_store)
        for rank, (of, whole) in found.items():
            reads, address, text = whole.split(" ", 2)
            if reads == "1":
                group.read_by.add(rank)
            if rank not in group.peers and rank not in group.unreachable:
                try:
                    group.peers[rank] = PeerMailbox(address)
                except OSError:
                    group.unreachable.add(rank)
            # Two calls on, a peer has replaced its post: it gave this call up long ago.
            posted[rank] = text if of == number else f"{GONE}rank {rank} has gone on to later calls"

    def _read_store(self, group: _Group, number: int, ranks: list[int]) -> dict[int, tuple[int, str]]:
        """Posts of these ranks, and their numbers; one round trip once all keys exist, for reading others blocks."""
        keys = {rank: group.key(rank, number) for rank in ranks}
        if number % 2 not in group.store_complete:
            if self.store.check(list(keys.values())):
                group.store_complete.add(number % 2)
            else:
                keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        names = list(keys.values())
        values = self.store.multi_get(names) if self.store.has_extended_api() else map(self.store.get, names)
        numbered = {rank: value.decode().partition(" ") for rank, value in zip(keys, values, strict=True)}
        return {rank: (int(of), text) for rank, (of, _, text) in numbered.items() if int(of) >= number}

    def _lookup(self, key: str) -> str:
        """The value of a key that is emptied but never deleted; an empty string when it was never set."""
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _problem(
        self, operation: str, group: _Group, number: int, posted: Mapping[int, str], missing: list[int]
    ) -> str:
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
                theirs, lifetime, their_number, their_operation = json.loads(waiting)
                ranks = group.ranks
                # It waits for this rank as this rank waits for it: neither will come. One of the two, the one in the
                # smaller group, tells the group of the other.
                if self.rank in theirs and (len(ranks), list(ranks)) < (len(theirs), theirs):
                    problem = (
                        f"replica_groups differ: rank {rank} is in {their_operation} with group {theirs}, "
                        f"rank {self.rank} in {operation} with group {list(ranks)}"
                    )
                    other = self._group(tuple(theirs))
                    other.lifetime = lifetime
                    self._post(other, their_number, ERROR + problem)
                    other.next = their_number + 1
                    return problem
            # Read once more: it may have posted and then ended.
            if rank in group.peers and group.peers[rank].owner_died() and group.peers[rank].read(number) is None:
                return f"rank {rank} has died"
        return ""


def _join(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks))

"""Posts between ranks: mailboxes where ranks share a host, else the store, and what ranks learn of absentees."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist

from nki_parallel_attn.errors import ArgumentError, PeerError, RankFailedError, RankMismatchError
from nki_parallel_attn.ops import rank_agreement, rank_board
from nki_parallel_attn.ops.rank_agreement import agree
from nki_parallel_attn.ops.rank_mailbox import PLACE_BYTES, OwnMailbox, PeerMailbox
from nki_parallel_attn.testing import run_ranks
from tests.patience import SOON


def test_a_mailbox_holds_two_posts():
    own = OwnMailbox()
    peer = PeerMailbox(own.address)
    assert peer.read(0) is None
    long = "x" * 100_000
    for number, text in enumerate(["a b", "", long, "c"]):
        own.write(number, text)
    assert [peer.read(number) for number in range(5)] == [(2, long), (3, "c"), (2, long), (3, "c"), None]
    assert not peer.owner_died()


def test_a_post_that_is_half_written_is_not_there_yet():
    own = OwnMailbox()
    peer = PeerMailbox(own.address)
    own.write(0, "first")
    own.write(2, "second, and longer")
    whole = os.pread(own._file, 64, 0)
    for torn in range(1, 20):
        os.pwrite(own._file, bytes(64), 0)
        os.pwrite(own._file, whole[:torn], 0)
        assert peer.read(2) is None
    os.pwrite(own._file, whole, 0)
    assert peer.read(2) == (2, "second, and longer") and PLACE_BYTES > 1 << 20


def test_an_address_of_another_process_is_not_taken():
    own = OwnMailbox()
    with pytest.raises(OSError, match="not the file"):
        PeerMailbox(own.address.replace('"nonce":"', '"nonce":"00'))
    with pytest.raises(OSError, match="another host"):
        PeerMailbox(own.address.replace('"boot":"', '"boot":"0'))
    with pytest.raises(OSError, match="no mailbox"):
        PeerMailbox("null")


def agree_often(without: int | None) -> None:
    """Rank `without` cannot make a mailbox, as on a host of its own: all others read it through the store."""
    rank, ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
    with pytest.MonkeyPatch.context() as patch:
        if rank == without:
            patch.setattr(rank_board, "OwnMailbox", _refuse)
        for step in range(6):
            agree("step", ranks, {"n": step}, None, "always")
    board = rank_agreement._board()
    assert len(board._groups[ranks].peers) == len(ranks) - 1 - (without not in (None, rank))
    sets: list[str] = []
    store = board.store
    board.store = _Recorder(store, sets)
    for step in range(4):
        agree("step", ranks, {"n": step}, None, "always")
    assert bool(sets) == (without is not None), sets
    board.store = store
    for step in range(3):
        with pytest.raises(RankMismatchError, match="n: 0 on ranks 0, 1, 1 on rank 2"):
            agree("step", ranks, {"n": int(rank == 2)}, None, "always")
        error = ArgumentError("n", step, "another")
        with pytest.raises(ArgumentError if rank == 1 else PeerError, match="n: "):
            agree("step", ranks, {"n": 0}, error if rank == 1 else None, "always")
    agree("step", ranks, {"n": 0}, None, "always")


class _Recorder:
    def __init__(self, store: object, sets: list[str]) -> None:
        self._store, self._sets = store, sets

    def set(self, key: str, value: str) -> None:
        self._sets.append(key)
        self._store.set(key, value)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


def _refuse() -> None:
    raise OSError("no anonymous files")


@pytest.mark.parametrize("without", [None, 1, 2])
def test_ranks_agree_with_and_without_mailboxes(without):
    run_ranks(agree_often, 3, args=(without,))


def refuse_without_a_group() -> None:
    """A rank that does not know its group is heard of, and everyone goes on in step, again and again."""
    rank, ranks = dist.get_rank(), (0, 1, 2)
    for step in range(3):
        agree("step", ranks, {"n": step}, None, "always")
        if rank == 1:
            with pytest.raises(ArgumentError):
                agree("step", None, {}, ArgumentError("group", step, "a list with this rank"), "always")
        else:
            with pytest.raises(PeerError, match=f"group: .*{step}"):
                agree("step", ranks, {"n": 0}, None, "always")
    agree("step", ranks, {"n": 0}, None, "always")
    # Rank 0 alone thinks that there are two.
    with pytest.raises((PeerError, RankMismatchError), match=r"replica_groups differ|have given up"):
        agree("step", (0, 1) if rank == 0 else ranks, {}, None, "always")
    agree("step", ranks, {"n": 0}, None, "always")


def test_refusals_and_other_groups_are_heard_of():
    run_ranks(refuse_without_a_group, 3)


def refuse_while_the_others_go_on(mailboxes: bool, refusals: int) -> None:
    """The others have heard of each refusal, and replaced their posts, before rank 1 knows its group again."""
    rank, ranks = dist.get_rank(), (0, 1, 2)
    with pytest.MonkeyPatch.context() as patch:
        _impatient(patch)
        if not mailboxes:
            patch.setattr(rank_board, "OwnMailbox", _refuse)
        for step in range(refusals):
            with pytest.raises(ArgumentError if rank == 1 else PeerError, match=f"group: .*{step}"):
                error = ArgumentError("group", step, "a list with this rank") if rank == 1 else None
                agree("step", None if rank == 1 else ranks, {}, error, "always")
            dist.barrier()
        for step in range(3):
            agree("step", ranks, {"n": step}, None, "always")


def _impatient(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rank_board, "GRACE_SECONDS", 0.05)
    patch.setattr(rank_board, "LOOK_SECONDS", 0.05)


@pytest.mark.parametrize(("mailboxes", "refusals"), [(True, 2), (True, 5), (False, 3)])
def test_refusals_that_were_heard_of_long_ago(mailboxes, refusals):
    run_ranks(refuse_while_the_others_go_on, 3, args=(mailboxes, refusals))


def stay_away(calls: int) -> None:
    """Rank 1 comes to a call that the others have given up, and called again since."""
    rank, ranks = dist.get_rank(), (0, 1, 2)
    agree("step", ranks, {}, None, "always")
    with pytest.MonkeyPatch.context() as patch:
        _impatient(patch)
        patch.setattr(rank_agreement._board(), "timeout", 0.2 if rank != 1 else 60.0)
        for _ in range(0 if rank == 1 else calls):
            with pytest.raises(PeerError, match=r"\[1\] did not arrive|have given up"):
                agree("step", ranks, {}, None, "always")
    dist.barrier()
    start = time.monotonic()
    for _ in range(calls if rank == 1 else 0):
        with pytest.raises(PeerError, match="given up"):
            agree("step", ranks, {}, None, "always")
    agree("step", ranks, {}, None, "always")
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize("calls", [1, 3])
def test_a_rank_that_comes_to_a_call_given_up_hears_of_it(calls):
    run_ranks(stay_away, 3, args=(calls,))


def die_before_a_post() -> None:
    rank, ranks = dist.get_rank(), (0, 1, 2)
    for step in range(3):
        agree("step", ranks, {"n": step}, None, "always")
    if rank == 1:
        os._exit(3)
    start = time.monotonic()
    with pytest.raises(PeerError, match="rank 1 has died"):
        agree("step", ranks, {"n": 0}, None, "always")
    assert time.monotonic() - start < SOON
    raise KeyError(f"rank {rank} has seen it")


def test_a_dead_rank_is_noticed_before_the_timeout(survivors_finish):
    with pytest.raises(RankFailedError) as raised:
        run_ranks(die_before_a_post, 3)
    assert all(f"rank {rank} has seen it" in str(raised.value) for rank in (0, 2)), raised.value

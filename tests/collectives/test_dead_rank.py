"""A rank that is killed makes its peers raise at once, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nki_parallel_attn.errors import PeerError, RankFailedError
from nki_parallel_attn.kernels.collectives_torch import TRANSPORT_VARIABLE, Exchange, exchange_for
from nki_parallel_attn.testing import run_ranks
from tests.patience import SOON

WORLD_SIZE = 3
VICTIM = 1

pytestmark = pytest.mark.usefixtures("survivors_finish")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_a_round(exchange: Exchange) -> None:
    with exchange.round() as opened:
        opened.all_gather(torch.zeros(1 << 16))
        if exchange.rank == VICTIM:
            die()
        opened.all_to_all(opened.outbox((1 << 16,), torch.float32))


def die_while_one_waits_for_another(exchange: Exchange) -> None:
    """Rank 0 waits for rank 2, which is late and finds the victim dead before it has sent rank 0 anything."""
    with exchange.round() as opened:
        opened.all_gather(torch.zeros(1))
        time.sleep([0, 0.3, 0.8][exchange.rank])
        if exchange.rank == VICTIM:
            die()
        opened.all_to_all(opened.outbox((1 << 16,), torch.float32))


def die_before_a_digest(exchange: Exchange) -> None:
    exchange.barrier()
    if exchange.rank == VICTIM:
        die()
    exchange.exchange_digest(b"hello")


def die_after_the_last_call(exchange: Exchange) -> None:
    with exchange.round() as opened:
        assert opened.all_gather(torch.tensor(exchange.rank)).tolist() == [0, 1, 2]
    if exchange.rank == VICTIM:
        die()
    time.sleep(0.5)
    exchange._finish()  # waits for the end of the peers' rounds, as the next call would


def survivors_of(scenario: Callable[[Exchange], None], transport: str, tmp_path: Path) -> list[tuple[str, float]]:
    """Of every rank but the victim: the error's text, or "fine", and the seconds it took."""

    def body() -> None:
        os.environ[TRANSPORT_VARIABLE] = transport
        exchange = exchange_for()
        outcome = "fine"
        start = time.monotonic()
        try:
            scenario(exchange)
        except PeerError as error:
            outcome = str(error)
        (tmp_path / str(exchange.rank)).write_text(json.dumps([outcome, time.monotonic() - start]))

    with pytest.raises(RankFailedError, match=f"rank {VICTIM}: died of SIGKILL"):
        run_ranks(body, WORLD_SIZE)
    return [json.loads((tmp_path / str(rank)).read_text()) for rank in range(WORLD_SIZE) if rank != VICTIM]


@pytest.mark.parametrize("scenario", [die_in_a_round, die_before_a_digest])
def test_shared_memory_peers_raise_and_nothing_is_left(tmp_path, scenario):
    before = set(os.listdir("/dev/shm"))
    for message, seconds in survivors_of(scenario, "shm", tmp_path):
        assert f"rank {VICTIM} of the group (process" in message and "has died" in message
        assert seconds < SOON
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "nki" in name]


@pytest.mark.parametrize("scenario", [die_in_a_round, die_while_one_waits_for_another])
def test_gloo_peers_raise(tmp_path, scenario):
    for message, seconds in survivors_of(scenario, "gloo", tmp_path):
        assert "a peer has died" in message
        assert seconds < SOON


def test_a_rank_may_end_after_its_last_call(tmp_path):
    """What it sent before is all that its peers need."""
    assert [message for message, _ in survivors_of(die_after_the_last_call, "shm", tmp_path)] == ["fine", "fine"]

"""Cores and ranks: cooperative threads, reproducible order, deadlocks found from state."""

from __future__ import annotations

import functools

import pytest
import torch

from nki_parallel_attn.sim import DeadlockError, NkiValidationError, simulate
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl
from nki_parallel_attn.sim.core import current_core
from nki_parallel_attn.sim.scheduler import Scheduler, Task


def barrier(events, parties):
    """Append to `events` and wait until `parties` have."""
    events.append(None)
    generation = (len(events) - 1) // parties
    current_core().scheduler.block_until(lambda: len(events) >= (generation + 1) * parties, "everyone")


@pytest.mark.parametrize(("world_size", "lnc"), [(1, 2), (8, 2), (64, 2)])
@pytest.mark.parametrize("seed", [None, 7])
def test_many_cores_meet_at_barriers(world_size, lnc, seed):
    events, order = [], []

    def kernel(_):
        for _ in range(3):
            barrier(events, world_size * lnc)
        order.append((current_core().rank.index, nl.program_id(0)))

    run = simulate(kernel, world_size=world_size, lnc=lnc, target="trn2", seed=seed)
    run([(0,)] * world_size)
    first = list(order)
    assert len(events) == 3 * world_size * lnc and len(set(first)) == world_size * lnc
    events.clear()
    order.clear()
    run([(0,)] * world_size)
    assert order == first, "the same seed gives the same order"


def test_a_seed_permutes_the_order():
    orders = set()
    for seed in range(20):
        order = []
        tasks = [Task(str(i), functools.partial(order.append, i)) for i in range(4)]
        Scheduler(seed).run(tasks)
        orders.add(tuple(order))
    assert len(orders) > 5


def test_a_deadlock_says_who_waits_for_what():
    def kernel(_):
        if nl.program_id(0) == 1:
            current_core().scheduler.block_until(lambda: False, "a message from core 0")

    with pytest.raises(DeadlockError) as caught:
        simulate(kernel, world_size=2, lnc=2, target="trn2")([(0,), (0,)])
    text = str(caught.value)
    assert "2 of 4" in text and "rank 1 core 1 waits for a message from core 0 at " + __file__ in text
    assert "ended: rank 0 core 0, rank 1 core 0" in text


def test_the_first_error_ends_every_task():
    finished = []

    def kernel(_):
        core = current_core()
        if core.rank.index == 2:
            raise ValueError("rank 2 is unwell")
        core.scheduler.block_until(lambda: False, "rank 2")
        finished.append(core.rank.index)

    with pytest.raises(ValueError, match="rank 2 is unwell") as caught:
        simulate(kernel, world_size=4)([(0,)] * 4)
    assert not finished
    assert getattr(caught.value, "__notes__", ["raised by rank 2"]) == ["raised by rank 2"]


def test_program_instances_share_hbm_and_know_their_place():
    def kernel(x):
        assert nl.num_programs() == 2 and nl.program_ndim() == 1
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        tile = nl.load(x[nl.ds(4 * nl.program_id(0), 4), :])
        nisa.tensor_scalar(tile, tile, nl.add, float(nl.program_id(0)))
        nl.store(out[nl.ds(4 * nl.program_id(0), 4), :], tile)
        return out

    values = torch.randn(8, 16)
    expected = values + torch.tensor([0.0, 1.0]).repeat_interleave(4)[:, None]
    assert torch.equal(simulate(kernel, lnc=2, target="trn3")(values), expected)


def test_program_instances_allocate_alike():
    def kernel():
        nl.ndarray((4, 4 + nl.program_id(0)), nl.float32, nl.shared_hbm)

    with pytest.raises(NkiValidationError) as caught:
        simulate(kernel, lnc=2)()
    assert caught.value.rule == "shared-allocation"


@pytest.mark.parametrize(("target", "lnc"), [("trn1", 2), ("trn2", 8)])
def test_the_target_limits_the_launch(target, lnc):
    with pytest.raises(NkiValidationError) as caught:
        simulate(lambda: None, lnc=lnc, target=target)
    assert caught.value.rule == "lnc"

"""Bad input: one clear error on every rank, before any data moves, and no rank left waiting."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nki_parallel_attn import ReplicaGroup, attention_kv_parallel_segmented_cte
from nki_parallel_attn.backends import torch as torch_backend
from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError, PeerError, RankMismatchError
from nki_parallel_attn.kernels import attention_kv_parallel_segmented_cte_torch as kernel
from nki_parallel_attn.ops import rank_agreement
from tests.kvp.case import Case
from tests.patience import SOON

RANKS = 4
BAD = 2  # the rank with the bad argument
CASE = Case(ranks=RANKS, rows=64, block_size=8, prior=24)
CONTIGUOUS = Case(ranks=RANKS, rows=64, block_size=8, prior=24, layout="contiguous")
APC = Case(ranks=RANKS, rows=64, block_size=8, prior=24, apc=True)


def scalar(value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([[value]], dtype=dtype)


def with_table_entry(index: int, value: int) -> Any:
    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        table = arguments["block_tables"].clone()
        table[0, index] = value
        return {"block_tables": table}

    return change


def halves(name: str, dim: int = 0) -> Any:
    return lambda arguments: {name: arguments[name].narrow(dim, 0, arguments[name].shape[dim] // 2)}


# name: case, what to change on one rank, the argument that the error must name
BAD_ARGUMENTS: dict[str, tuple[Case, Any, str]] = {
    "wrong rank id": (CASE, {"kvp_rank_id": scalar(0)}, "kvp_rank_id"),
    "no rank id": (CASE, {"kvp_rank_id": None}, "kvp_rank_id"),
    "rank id dtype": (CASE, {"kvp_rank_id": scalar(2, torch.int64)}, "kvp_rank_id"),
    "q dtype": (CASE, lambda a: {"q": a["q"].to(torch.int32)}, "q"),
    "q not a tensor": (CASE, {"q": [1.0]}, "q"),
    "q dims": (CASE, lambda a: {"q": a["q"][0]}, "q"),
    "q sparse": (CASE, lambda a: {"q": a["q"].to_sparse()}, "q"),
    "q empty": (CASE, lambda a: {"q": a["q"][:, :0]}, "q"),
    "q nested": (CASE, lambda a: {"q": torch.nested.nested_tensor([torch.ones(1, 1)] * 2)}, "q"),
    "no data": (CASE, lambda a: {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in a.items()}, "q"),
    "q device": (CASE, lambda a: {"q": a["q"].to("meta")}, "k_cache"),
    "head_dim": (CASE, lambda a: {"q": a["q"].repeat(1, 1, 5)}, "q"),
    "k dtype": (CASE, lambda a: {"k_cache": a["k_cache"].to(torch.bfloat16)}, "k_cache"),
    "k shape": (CASE, halves("k_cache", 2), "k_cache"),
    "k empty": (CASE, lambda a: {"k_cache": a["k_cache"][:0], "v_cache": a["v_cache"][:0]}, "k_cache"),
    "k heads": (CASE, lambda a: {n: a[n].repeat(1, 3, 1, 1) for n in ("k_cache", "v_cache")}, "k_cache"),
    "v shape": (CASE, halves("v_cache", 0), "v_cache"),
    "v dims": (CASE, halves("v_cache", 3), "v_cache"),
    "table entry too large": (CASE, with_table_entry(1, 1000), "block_tables[0, 1]"),
    "table entry below -1": (CASE, with_table_entry(0, -2), "block_tables[0, 0]"),
    "table dtype": (CASE, lambda a: {"block_tables": a["block_tables"].long()}, "block_tables"),
    "table shape": (CASE, lambda a: {"block_tables": a["block_tables"][0]}, "block_tables"),
    "table empty": (CASE, lambda a: {"block_tables": a["block_tables"][:, :0]}, "block_tables"),
    "table too short": (CASE, lambda a: {"block_tables": a["block_tables"][:, :1]}, "block_tables"),
    "S no multiple of seg_size": (CASE, {"seg_size": 24}, "q"),
    "seg_size no multiple of block_size": (CASE, {"seg_size": 12}, "seg_size"),
    "seg_size zero": (CASE, {"seg_size": 0}, "seg_size"),
    "block_size": (CASE, {"block_size": 16, "seg_size": 16}, "k_cache"),
    "group_size": (CASE, {"group_size": 2}, "group_size"),
    "kvp_group_size": (CASE, {"kvp_group_size": 2}, "kvp_group_size"),
    "scale": (CASE, {"scale": float("nan")}, "scale"),
    "scale beyond float32": (CASE, {"scale": 1e39}, "scale"),
    "sliding_window": (CASE, {"sliding_window": -1}, "sliding_window"),
    "global_q_offset": (CASE, {"global_q_offset": 0}, "global_q_offset"),
    "offset negative": (CASE, {"kvp_q_offset": scalar(-8)}, "kvp_q_offset"),
    "offset missing": (CASE, {"kvp_q_offset": None}, "kvp_q_offset"),
    "offset of another rank": (CONTIGUOUS, {"kvp_q_offset": scalar(24)}, "kvp_q_offset"),
    "offset with the wrong sign": (CONTIGUOUS, {"kvp_q_offset": scalar(24 + 2 * 24)}, "kvp_q_offset"),
    "contiguous table too short": (CONTIGUOUS, lambda a: {"block_tables": a["block_tables"][:, :1]}, "block_tables"),
    "contiguous table too long": (
        CONTIGUOUS,
        lambda a: {"block_tables": a["block_tables"].repeat(1, 2)},
        "block_tables",
    ),
    "apc in contiguous mode": (CONTIGUOUS, {"apc_mode": True}, "apc_mode"),
    "apc without prior": (APC, {"valid_num_prior_tokens": None}, "valid_num_prior_tokens"),
    "apc with contradicting prior": (APC, {"valid_num_prior_tokens": scalar(24)}, "valid_num_prior_tokens"),
    "apc with a ragged prior": (APC, {"valid_num_prior_tokens": scalar(3)}, "valid_num_prior_tokens"),
    "apc with a compile-time offset": (APC, {"global_q_offset": 24}, "global_q_offset"),
    "prior without apc": (CASE, {"valid_num_prior_tokens": scalar(8)}, "valid_num_prior_tokens"),
    "k_scale shape": (CASE, {"k_scale": torch.ones(32, 1)}, "k_scale"),
    "k_scale infinite": (CASE, {"k_scale": torch.full((128, 1), torch.inf)}, "k_scale"),
    "v_scale not one value": (CASE, {"v_scale": torch.arange(1.0, 129)[:, None]}, "v_scale"),
    "packed but not fp8": (CASE, {"fp8_packed": True}, "k_cache"),
    "replica group type": (CASE, {"replica_groups": [[0, 1, 2, 3]]}, "replica_groups"),
    "replica group without this rank": (CASE, {"replica_groups": ReplicaGroup([[0, 1], [3, 4]])}, "replica_groups"),
    "ranks beyond the world": (CASE, {"replica_groups": ReplicaGroup([[0, 1, 2, 9], [3, 4, 5, 6]])}, "replica_groups"),
    "ranks beyond the world in another list": (
        CASE,
        {"replica_groups": ReplicaGroup([[0, 1, 2, 3], [4, 5, 6, 7]])},
        "replica_groups",
    ),
    "ranks out of order": (CASE, {"replica_groups": ReplicaGroup([[3, 2, 1, 0]])}, "replica_groups"),
    "backend": (CASE, {"backend": "tpu"}, "backend"),
    "check_ranks": (CASE, {"check_ranks": "sometimes"}, "check_ranks"),
    "flag": (CASE, {"tp_out": 1}, "tp_out"),
    "lnc": (CASE, {"lnc": 3}, "lnc"),
    "lnc type": (CASE, {"lnc": True}, "lnc"),
    "group type": (CASE, {"group": 3}, "group"),
    "target": (CASE, {"target": "trn1"}, "target"),
}


RIGHT_ON_SOME_RANK = {
    "wrong rank id",
    "offset of another rank",
    "offset with the wrong sign",
    "contiguous table too short",
    "contiguous table too long",
    "replica group without this rank",
}


def call(case: Case, rank: int, change: Any = None) -> Exception | None:
    """The error of one call, None when it succeeds."""
    arguments = case.arguments(rank)
    if change is not None:
        arguments |= change(arguments) if callable(change) else change
    try:
        attention_kv_parallel_segmented_cte(**arguments)
    except Exception as error:
        return error
    return None


@pytest.mark.multirank(world_size=RANKS, timeout=120)
def test_one_bad_rank(rank):
    """Each bad argument raises itself on the bad rank, and a PeerError naming rank and argument on the others."""
    for name, (case, change, argument) in BAD_ARGUMENTS.items():
        start = time.monotonic()
        error = call(case, rank, change if rank == BAD else None)
        if rank == BAD:
            assert isinstance(error, ArgumentError), (name, error)
            assert str(error).startswith(argument), (name, error)
        else:
            assert isinstance(error, PeerError), (name, error)
            assert f"rank {BAD}" in str(error) and argument in str(error), (name, error)
        assert time.monotonic() - start < SOON, name
    # The group still works.
    assert call(CASE, rank) is None


@pytest.mark.multirank(world_size=RANKS)
def test_all_ranks_bad_raise_their_own_error(rank):
    for name, (case, change, argument) in BAD_ARGUMENTS.items():
        if name in RIGHT_ON_SOME_RANK:
            continue
        error = call(case, rank, change)
        assert isinstance(error, ArgumentError) and str(error).startswith(argument), (name, error)
    assert call(CASE, rank) is None


DIFFERENT: dict[str, tuple[Any, str]] = {
    "scale": ({"scale": 0.5}, "scale: "),
    "tp_out": ({"tp_out": True}, "tp_out: "),
    "window": ({"sliding_window": 5}, "sliding_window: "),
    "seg_size": ({"seg_size": 64}, "seg_size: "),
    "rows": (lambda a: {"q": a["q"][:, :32]}, "q: "),
    "dtype": (lambda a: {n: a[n].bfloat16() for n in ("q", "k_cache", "v_cache")}, "q: "),
    "offset": ({"kvp_q_offset": scalar(16), "global_q_offset": 16}, "kvp_q_offset: "),
    "v_scale": ({"v_scale": torch.ones(128, 1)}, "v_scale: "),
    "kv heads": (lambda a: {n: a[n].repeat(1, 2, 1, 1) for n in ("k_cache", "v_cache")}, "k_cache: "),
    "apc": (APC.arguments(BAD), "apc_mode: "),
    "layout": (CONTIGUOUS.arguments(BAD) | {"kvp_rank_id": None, "kvp_group_size": 0}, "kvp_group_size: "),
    "gradient": (lambda a: {"q": a["q"].requires_grad_()}, "requires_grad: "),
}


@pytest.mark.multirank(world_size=RANKS)
def test_ranks_that_disagree(rank):
    for name, (change, field) in DIFFERENT.items():
        error = call(CASE, rank, change if rank == BAD else None)
        assert isinstance(error, RankMismatchError), (name, error)
        assert field in str(error) and f"rank {BAD}" in str(error), (name, error)
    assert call(CASE, rank) is None


@pytest.mark.multirank(world_size=RANKS)
def test_different_local_lengths(rank):
    """Each rank's offset is a possible one; together they are not."""
    length = CONTIGUOUS.local_length
    offset = 24 - rank * (length if rank < 3 else length + 8)
    error = call(CONTIGUOUS, rank, {"kvp_q_offset": scalar(offset)})
    assert isinstance(error, RankMismatchError)
    assert f"local_kv_len: {length} on ranks 1, 2, {length + 8} on rank 3" in str(error)
    assert call(CONTIGUOUS, rank) is None


FIRST_TABLES: dict[str, Any] = {
    "too short": lambda a: {"block_tables": a["block_tables"][:, :-1]},
    "much too short": lambda a: {"block_tables": a["block_tables"][:, :1]},
    "blocks beyond the shard": lambda a: {"block_tables": a["block_tables"].repeat(1, 2)},
}


@pytest.mark.multirank(world_size=RANKS)
@pytest.mark.parametrize("mode", ["always", "first"])
def test_rank_0_of_contiguous_shards(rank, mode):
    """Its own arguments do not tell how long its shard is; those of the others do."""
    arguments = CONTIGUOUS.arguments(rank)
    for name, change in FIRST_TABLES.items():
        error = call(CONTIGUOUS, rank, {"check_ranks": mode} | (change(arguments) if rank == 0 else {}))
        assert isinstance(error, ArgumentError if rank == 0 else PeerError), (name, error)
        assert "block_tables" in str(error) and f"local_kv_len={CONTIGUOUS.local_length}" in str(error), (name, error)
    for padding in (0, 3):  # longer is fine when no block is there
        table = torch.nn.functional.pad(arguments["block_tables"], (0, padding), value=-1)
        assert call(CONTIGUOUS, rank, {"check_ranks": mode, "block_tables": table}) is None


@pytest.mark.multirank(world_size=RANKS)
def test_checking_once_begins_again_after_a_failure(rank):
    """The ranks that refused nothing compare again too: they would not be there for the one that did."""
    once = {"check_ranks": "first"}
    for _ in range(2):
        error = call(CASE, rank, once | ({"kvp_q_offset": scalar(-8)} if rank == BAD else {}))
        assert isinstance(error, ArgumentError if rank == BAD else PeerError), error
    for _ in range(2):
        assert call(CASE, rank, once) is None


@pytest.mark.multirank(world_size=2)
@pytest.mark.parametrize("stage", ["read_local_kv", "local_partials", "merge"])
def test_a_rank_that_runs_out_of_memory(rank, stage):
    """Whatever fails between the check and the result, the peers hear of it at once; then all go on."""
    case = Case(ranks=2, rows=64, block_size=8)
    assert call(case, rank) is None

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no memory for this")

    works = getattr(kernel, stage)
    if rank == 1:
        setattr(kernel, stage, fail)
    try:
        error = call(case, rank)
        # At the last stage rank 0 has all it needs, and hears of the failure or not, as it comes before or after.
        if not (stage == "merge" and rank == 0 and error is None):
            assert isinstance(error, MemoryError if rank == 1 else PeerError) and "no memory for this" in str(error)
    finally:
        setattr(kernel, stage, works)
    for _ in range(2):
        assert call(case, rank) is None


@pytest.mark.multirank(world_size=2)
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("check_ranks", ["always", "never"])
@pytest.mark.parametrize("stage", ["read_local_kv", "local_partials", "merge"])
def test_a_failure_and_a_slow_rank(rank, stage, check_ranks, slow):
    """Rank 0 comes to the call that rank 1 has already failed in, or has long done its part: both stay in step."""
    case = Case(ranks=2, rows=64, block_size=8)
    assert call(case, rank) is None

    def late(*arguments: object) -> object:
        time.sleep(0.3)
        return connect(*arguments)

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no memory for this")

    connect = torch_backend.exchange_for
    changed = {"check_ranks": check_ranks}
    with pytest.MonkeyPatch.context() as patch:
        if rank == slow:
            patch.setattr(torch_backend, "exchange_for", late)
        if rank == 1:
            patch.setattr(kernel, stage, fail)
        error = call(case, rank, changed)
    if not (stage == "merge" and rank == 0 and error is None):
        assert isinstance(error, MemoryError if rank == 1 else PeerError) and "no memory for this" in str(error)
    for _ in range(3):
        assert call(case, rank, changed) is None


@pytest.mark.multirank(world_size=RANKS)
def test_different_replica_groups(rank):
    """Rank 3 thinks it shares KV with rank 2 only: nobody waits for the timeout."""
    pair = Case(ranks=2, rows=64, block_size=8)
    start = time.monotonic()
    error = call(pair, 1, {"replica_groups": ReplicaGroup([[0, 1], [2, 3]])}) if rank == 3 else call(CASE, rank)
    assert isinstance(error, PeerError) and "replica_groups differ" in str(error), error
    assert time.monotonic() - start < SOON
    assert call(CASE, rank) is None


@pytest.mark.multirank(world_size=2)
def test_a_slow_rank_is_waited_for(rank):
    if rank == 1:
        time.sleep(2.5)
    case = Case(ranks=2, rows=64, block_size=8)
    assert call(case, rank) is None
    if rank == 1:
        time.sleep(2)
    error = call(case, rank, {"scale": float("inf")} if rank == 0 else None)
    assert isinstance(error, ArgumentError if rank == 0 else PeerError)


@pytest.mark.multirank(world_size=2)
def test_a_rank_that_does_not_come(rank):
    """The others raise after the timeout; the rank that comes too late raises at once; then both go on."""
    case = Case(ranks=2, rows=64, block_size=8)
    board = rank_agreement._board()
    timeout = board.timeout
    if rank == 0:
        board.timeout = 2
    else:
        board.store.wait(["given up"])
    start = time.monotonic()
    error = call(case, rank)
    assert isinstance(error, PeerError), error
    assert ("[1] did not arrive within 2 s" if rank == 0 else "[0] have given up") in str(error)
    assert time.monotonic() - start < SOON
    board.store.set("given up", "")
    board.timeout = timeout
    assert call(case, rank) is None


@pytest.mark.multirank(world_size=2)
def test_given_group_of_other_ranks(rank):
    single = dist.new_group([rank], use_local_synchronization=True)
    error = call(Case(ranks=2, rows=64, block_size=8), rank, {"group": single})
    assert isinstance(error, ArgumentError) and error.argument == "group"


def test_group_without_torch_distributed():
    error = call(Case(ranks=2, rows=64, block_size=8), 0)
    assert isinstance(error, ArgumentError) and "not initialised" in str(error)


def test_type_errors_are_type_errors():
    case = Case(ranks=1, rows=64, block_size=8)
    assert isinstance(call(case, 0, {"block_size": 8.0}), ArgumentTypeError)
    assert isinstance(call(case, 0, {"k_cache": None}), TypeError)

"""What a step sees at the edges: long priors read in pieces, threads, absent blocks, NaN, full shards, built masks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nki_parallel_attn import attention_block_tkg, gen_mask_tkg, is_qk_swapped
from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError
from nki_parallel_attn.kernels import decode_cache_torch
from tests.tkg.case import Case
from tests.tkg.compare import check_rank
from tests.tkg.in_process import run_block

LONG = Case(batch=2, tokens=2, q_heads=4, kv_heads=2, longest=2600, dtype=torch.float32, seed=2)


def check(case: Case) -> None:
    arguments = [case.arguments(index) for index in range(case.ranks)]
    for index, results in enumerate(run_block(arguments, case.kvdp, case.cp)):
        check_rank(case, index, arguments[index], results)


@pytest.mark.parametrize(
    "case",
    [
        LONG,
        replace(LONG, cache="flat_t"),
        replace(LONG, cache="block4", dtype=torch.bfloat16),
        replace(LONG, cache="block4", kv_heads=1, seed=1),  # blocks in order: read in place
        replace(LONG, cache="packed4", fp8="fp8", dtype=torch.float64, window=1500),
        replace(LONG, cache="block3", kv_heads=1, mask="full", window=1000),
        replace(LONG, mask="swapped", dtype=torch.bfloat16),
        replace(LONG, cache="block4", cp=2, layout="interleaved 1", longest=5200, seed=4),
    ],
    ids=lambda case: f"{case.cache} {case.mask} cp{case.cp} {case.dtype}",
)
def test_priors_longer_than_a_piece(case, monkeypatch):
    monkeypatch.setattr(decode_cache_torch, "PIECE_SLOTS", 1024)
    check(case)


@pytest.mark.parametrize("batch", [1, 2])
def test_threads_share_the_keys_of_few_sequences(batch):
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        check(replace(LONG, batch=batch, kv_heads=1, longest=5000))
    finally:
        torch.set_num_threads(threads)


def test_equal_priors_are_read_in_one_call():
    case = Case(batch=4, q_heads=2, mask="pos_ids", seed=1)
    case.positions[:] = 20
    check(case)


def test_bfloat16_and_float8_without_a_rounding_in_doubt():
    """X and W of small integers: every product and sum is exact, so float8 has nothing to tip over."""
    case = Case(batch=4, tokens=2, cache="packed4", fp8="fp8", dtype=torch.bfloat16, seed=1)
    generator = torch.Generator().manual_seed(3)
    for name, scale in (("x", 1.0), ("w", 2.0**-5)):
        shape = case.tensors[name].shape
        case.tensors[name] = (torch.randint(-2, 3, shape, generator=generator) * scale).to(torch.bfloat16)
    k, v = case.new_tokens[1:]
    arguments = case.arguments(0)
    results = run_block([arguments], 1, 1)[0]
    check_rank(case, 0, arguments, results)
    assert not k.radius.any() and not v.radius.any()
    stored = arguments["V_cache"].double()
    slots = arguments["kv_cache_update_idx"].to(torch.int64)
    assert torch.equal(stored[slots // 4, 0, slots % 4], v.value[:, 0])


def test_absent_blocks_contribute_nothing():
    """As a full mask that hides their slots."""
    case = Case(batch=2, tokens=2, q_heads=2, kv_heads=2, cache="block4", seed=2)
    full = replace(case, mask="full")
    case.positions[:] = full.positions[:] = torch.tensor([[12, 13], [14, 15]])
    arguments = case.arguments(0)
    arguments["active_blocks_table"][0, :, 1] = -1
    arguments["active_blocks_table"][1, 1, 0] = -1
    plain = run_block([case.arguments(0)], 1, 1)[0][0]
    out = run_block([arguments], 1, 1)[0][0]
    masked = full.arguments(0)
    mask = masked["attention_mask"]
    per_kv = case.q_heads // 2
    mask[4:8, 0] = 0
    mask[0:4, 1, per_kv:] = 0
    expected = run_block([masked], 1, 1)[0][0]
    assert float((out - expected).abs().max()) < 1e-13
    assert float((out - plain).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["K_cache", "V_cache"])
def test_nan_reaches_only_who_sees_it(name):
    """Head 0 does not see slot 5, head 1 does."""
    case = Case(batch=2, q_heads=2, mask="full", seed=2)
    arguments = case.arguments(0)
    assert int(case.positions[0, 0]) > 6
    arguments["attention_mask"][5, 0, 0] = 0
    expected = run_block([arguments], 1, 1)[0][0]
    arguments = case.arguments(0) | {"attention_mask": arguments["attention_mask"]}
    arguments[name][0, 0, 5, 3] = torch.nan
    out = run_block([arguments], 1, 1)[0][0]
    assert out[0, 1].isnan().any()
    out[0, 1] = expected[0, 1]
    assert torch.equal(out, expected)


def test_a_completely_full_shard():
    """Rank 0 has no slot left; the active token belongs to rank 1."""
    case = Case(cp=2, batch=2, layout="contiguous", kv_heads=2, seed=1)
    case.positions[:] = torch.tensor([[16], [20]])
    arguments = case.arguments(0)
    assert arguments["pos_ids"].flatten().tolist() == [16, 16] and arguments["S_ctx"] == 16
    assert arguments["K_cache"].shape[2] == 16
    check(case)


@pytest.mark.parametrize("name", ["K_cache", "V_cache"])
def test_flat_caches_of_any_strides(name):
    case = Case(batch=2, tokens=2, q_heads=2, kv_heads=2, seed=2)
    arguments = case.arguments(0)
    arguments[name] = arguments[name].transpose(2, 3).contiguous().transpose(2, 3)
    results = attention_block_tkg(**arguments)
    check_rank(case, 0, arguments, results)


def test_nothing_visible_is_zero():
    case = Case(batch=2, q_heads=2, mask="full")
    arguments = case.arguments(0)
    arguments["attention_mask"][:, 1] = 0
    out = run_block([arguments], 1, 1)[0][0]
    assert (out[1] == 0).all() and (out[0] != 0).any()


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("window", [0, 6])
def test_gen_mask_tkg_equals_the_call_with_pos_ids(swapped, window):
    case = Case(batch=3, tokens=3, q_heads=2, window=window, seed=2)
    given = case.arguments(0)
    expected = attention_block_tkg(**given)[0]
    slots = given["K_cache"].shape[2]
    mask = gen_mask_tkg(
        given["pos_ids"],
        slots,
        case.all_q_heads,
        swa_start_pos_ids=given["swa_start_pos_ids"],
        active_mask=given["attention_mask"] if window else None,
        is_qk_swapped=swapped,
    )
    made = {"attention_mask": mask, "pos_ids": None, "swa_start_pos_ids": None, "S_ctx": None}
    arguments = case.arguments(0) | made | {"is_qk_swapped": swapped}
    out = attention_block_tkg(**arguments)[0]
    assert float((out - expected).abs().max()) < 1e-13


def test_gen_mask_tkg_refuses():
    pos = torch.tensor([[3, 4]])
    for arguments, name in (
        ((pos.float(), 8, 2), "pos_ids"),
        ((pos[0], 8, 2), "pos_ids"),
        ((-pos, 8, 2), "pos_ids"),
        ((pos, 4, 2), "S_ctx"),
    ):
        with pytest.raises(ArgumentError) as raised:
            gen_mask_tkg(*arguments)
        assert raised.value.argument == name
    with pytest.raises(ArgumentTypeError):
        gen_mask_tkg(pos, 8, 2, swa_start_pos_ids=pos.float())
    with pytest.raises(ArgumentError, match="active_mask"):
        gen_mask_tkg(pos, 8, 2, active_mask=torch.ones(2, 1, 3, 2))


@pytest.mark.parametrize("swapped", [False, True])
def test_is_qk_swapped_says_how_a_mask_was_built(swapped):
    sizes = {"S_ctx": 12, "B_attn": 3, "q_heads_attn": 2, "S_tkg": 2}
    mask = gen_mask_tkg(torch.tensor([[3, 4]] * 3), 12, 2, is_qk_swapped=swapped)
    assert is_qk_swapped(mask, **sizes) is swapped
    with pytest.raises(ArgumentError, match=r"attention_mask.*\[12, 3, 4, 2\], or swapped \[3, 4, 2, 12\]"):
        is_qk_swapped(mask, **{**sizes, "q_heads_attn": 4})
    with pytest.raises(ArgumentError, match="differs between the two layouts"):
        is_qk_swapped(torch.ones(2, 2, 2, 2), S_ctx=2, B_attn=2, q_heads_attn=2, S_tkg=2)

"""The sharded decoder on real ranks against the dense decoder: same weights, same tokens, logits of every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nki_parallel_attn.errors import ArgumentError, PlanError
from nki_parallel_attn.integrations.decoder import Decoder, DecoderConfig, Dense
from nki_parallel_attn.integrations.kv_caches import FP8, FP8_MAX, KVCaches, to_fp8
from nki_parallel_attn.integrations.kv_parallel_decode import KVParallelDecode, hand_over, prefill_batch
from nki_parallel_attn.integrations.rope import Rope, RopeOrder
from nki_parallel_attn.integrations.tolerance import relative_tolerance
from nki_parallel_attn.plan import ShardingPlan
from nki_parallel_attn.testing import run_ranks
from nki_parallel_attn.topology.kv_layout import Contiguous, Interleaved

GQA = DecoderConfig(
    vocab_size=89,
    hidden=64,
    layers=2,
    q_heads=8,
    kv_heads=2,
    head_dim=16,
    intermediate=104,
    max_positions=256,
    rope=Rope(16),
    sliding_window=(0, 0),
)
MIXED = dataclasses.replace(
    GQA,
    hidden=128,
    intermediate=101,
    sliding_window=(0, 9),
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm=True,
    kv_heads=4,
    rope=Rope(16, order=RopeOrder.ADJACENT_PAIRS),
)
STEPS = 5


def random_decoder(config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return decoder.to(dtype).requires_grad_(False)


def random_tokens(lengths: Sequence[int], steps: int = STEPS) -> list[torch.Tensor]:
    """Of each sequence, the prompt and the tokens that the steps read."""
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(GQA.vocab_size, (length + steps,), generator=generator) for length in lengths]


def decode_on_this_rank(
    decoder: Decoder, lengths: list[int], prefill: dict[str, Any], decode: dict[str, Any], fp8: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [B, 1 + steps, vocab] and greedy choices of the prompts' last tokens and of every step; bytes sent."""
    rank, tokens = dist.get_rank(), random_tokens(lengths)
    common = {"world_size": dist.get_world_size(), "block_size": 4, "max_seq_len": max(lengths) + STEPS}
    shape = decoder.config.attention_shape()
    first, second = (ShardingPlan(shape, **{**common, **options}) for options in (prefill, decode))
    prompts = [ids[:length] for ids, length in zip(tokens, lengths, strict=True)]
    caches, hidden = prefill_batch(
        decoder, first, rank, prompts, groups=first.process_groups(), kv_dtype=FP8 if fp8 else None
    )
    handed, sent = hand_over(first, second, caches, lengths)
    assert (handed is caches) == in_place(prefill, decode) and (sent == 0 or handed is not caches)
    run = KVParallelDecode(decoder, second, rank, handed, lengths, groups=second.process_groups())
    assert run.cache_bytes == second.memory(batch=len(lengths), dtype=handed.dtype).per_rank
    states, chosen = [hidden], [run.greedy(hidden)]
    for step in range(STEPS):
        read = torch.stack([ids[length + step] for ids, length in zip(tokens, lengths, strict=True)])
        states.append(run.step(read))
        chosen.append(run.greedy(states[-1]))
    assert run.lengths.tolist() == [length + STEPS for length in lengths]
    logits = torch.stack([decoder.logits(state) for state in states], 1)
    return logits, torch.stack(chosen, 1), torch.tensor(sent)


CASES: dict[str, tuple[DecoderConfig, list[int], dict[str, Any], dict[str, Any]]] = {
    # config, prompt lengths, prefill plan, decode plan; the number of ranks is the product of one plan's degrees
    "one rank": (GQA, [5, 11], {}, {}),
    "cp": (GQA, [21], {"kvp": 4}, {"cp": 4}),
    "cp, ragged batch": (MIXED, [3, 30, 17], {"kvp": 2}, {"cp": 2}),
    "cp, a prompt shorter than the ranks": (GQA, [1, 2], {"kvp": 4}, {"cp": 4}),
    "cp, tokens dealt one by one": (MIXED, [19, 8], {"kvp": 4}, {"cp": 4, "kv_layout": Interleaved(1)}),
    "cp, contiguous": (MIXED, [19, 8], {"kvp": 4}, {"cp": 4, "kv_layout": Contiguous()}),
    "cp, two KV groups": (MIXED, [13, 9], {"kvp": 2, "tp": 4}, {"cp": 2, "tp": 4}),
    "kvdp": (GQA, [9, 20, 2, 7], {"kvp": 4}, {"kvdp": 4}),
    "kvdp, other blocks": (MIXED, [9, 20, 2, 7], {"kvp": 2}, {"kvdp": 2, "block_size": 6}),
    "kvdp+cp": (MIXED, [12, 3, 21, 8], {"kvp": 4}, {"kvdp": 2, "cp": 2}),
    "kvdp+cp, eight ranks": (GQA, [12, 3, 21, 8], {"kvp": 8}, {"kvdp": 2, "cp": 4}),
    "kvdp+cp, strided": (MIXED, [12, 3], {"kvp": 4, "tp": 8}, {"kvdp": 2, "cp": 2, "tp": 8, "rank_order": "strided"}),
    "cp, room for more tokens": (GQA, [13, 9], {"kvp": 2, "max_seq_len": 20}, {"cp": 2, "max_seq_len": 80}),
    "cp, room for less": (GQA, [13, 9], {"kvp": 2, "max_seq_len": 80}, {"cp": 2}),
    "tensor parallel to cp": (MIXED, [12, 3], {"kvp": 1, "tp": 4}, {"cp": 2, "tp": 4}),
}


def in_place(prefill: dict[str, Any], decode: dict[str, Any]) -> bool:
    """Whether decoding goes on in the prefill's own caches."""
    same_ranks = prefill.get("kvp", 1) == decode.get("cp", 1) and decode.keys() <= {"cp", "tp"}
    return same_ranks and "max_seq_len" not in prefill


def world_of(prefill: dict[str, Any], decode: dict[str, Any]) -> int:
    sizes = [plan.get("tp", plan.get("kvp", 1) * plan.get("kvdp", 1) * plan.get("cp", 1)) for plan in (prefill, decode)]
    return max(sizes)


@pytest.mark.parametrize(("case", "fp8"), [*((name, False) for name in CASES), ("cp", True), ("kvdp+cp", True)])
def test_logits_equal_dense(case: str, fp8: bool) -> None:
    """With float8 in float64, where no two sums differ enough to round K or V to different numbers."""
    config, lengths, prefill, decode = CASES[case]
    dtype = torch.float64 if fp8 else torch.float32
    decoder = random_decoder(config, dtype)
    results = run_ranks(decode_on_this_rank, world_of(prefill, decode), args=(decoder, lengths, prefill, decode, fp8))
    for row, ids in enumerate(random_tokens(lengths)):
        dense = Dense(config, len(ids), ids.device, fp8_kv=fp8)
        expected = decoder.logits(decoder.run_layers(ids, dense))[lengths[row] - 1 :]
        tolerance = relative_tolerance(config, len(ids), dtype) * expected.abs().max().item()
        for logits, chosen, _ in results:
            assert (logits[row] - expected).abs().max().item() <= tolerance
            assert chosen[row].tolist() == expected.argmax(-1).tolist()
    if config.intermediate % len(results) == 0:
        assert all(torch.equal(logits, results[0][0]) for logits, _, _ in results)
    pair = "cp" in decode and "kvdp" not in decode and "kv_layout" not in decode and "kvp" in prefill
    moved = sum(int(sent) for *_, sent in results)
    assert (moved == 0) == (len(results) == 1 or (pair and prefill["kvp"] == decode["cp"]))


def test_float8_is_another_result() -> None:
    decoder, (ids,) = random_decoder(GQA, torch.float64), random_tokens([20])
    plain, rounded = (decoder.run_layers(ids, Dense(GQA, len(ids), ids.device, fp8_kv=fp8)) for fp8 in (False, True))
    assert 1e-4 < (plain - rounded).abs().max() / plain.abs().max() < 0.2


def test_float8_saturates() -> None:
    values = to_fp8(torch.tensor([1e6, -1e6, 0.0, 1.0, 17.0])).float()
    assert values.tolist() == [FP8_MAX, -FP8_MAX, 0.0, 1.0, 16.0]


def refused_on_this_rank(fault: str) -> None:
    decoder, rank = random_decoder(GQA, torch.float32), dist.get_rank()
    common = {"world_size": 2, "block_size": 4, "max_seq_len": 12}
    shape = GQA.attention_shape()
    plan = ShardingPlan(shape, kvdp=2, **common)
    lengths = [3, 12] if fault != "odd batch" else [3]
    if fault == "prefill plan":
        plan = ShardingPlan(shape, kvp=2, **common)
    if fault == "other shape":
        plan = ShardingPlan(dataclasses.replace(shape, layers=3), kvdp=2, **common)
    cache_shape = plan.rank(rank).cache_shape(1 if fault == "too few blocks" else 3)
    layers = 1 if fault == "a layer less" else 2
    caches = KVCaches.zeros(cache_shape, layers, torch.float32, torch.device("cpu"))
    run = KVParallelDecode(decoder, plan, rank, caches, lengths, groups=plan.process_groups())
    if fault == "no prompt":
        prefill_batch(decoder, ShardingPlan(shape, kvp=2, **common), rank, [])
    if fault == "a list of tokens":
        run.step([1, 2])  # type: ignore[arg-type]
    run.step(torch.tensor([1] if fault == "one token" else [1, 89] if fault == "vocabulary" else [1, 2]))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("odd batch", "kvdp divides batch"),
        ("prefill plan", "a decoding plan"),
        ("other shape", "the decoder's shape"),
        ("too few blocks", "1 x 3 in order"),
        ("a layer less", "one for each of 2 layers"),
        ("one token", "one per sequence"),
        ("vocabulary", r"ids in \[0, 89\)"),
        ("no prompt", "at least one sequence"),
        ("a list of tokens", "got list, expected a non-empty int64 tensor"),
        ("full", "max_seq_len=12"),
    ],
)
def test_refused_on_every_rank(fault: str, message: str) -> None:
    def body() -> None:
        with pytest.raises((ArgumentError, PlanError), match=message):
            refused_on_this_rank(fault)

    run_ranks(body, 2)

"""The KV-parallel decoder on real ranks against the dense decoder: same weights, same tokens, float32."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.integrations.decoder import Decoder, DecoderConfig
from nki_parallel_attn.integrations.glassllm import load_glassllm
from nki_parallel_attn.integrations.kv_parallel_prefill import KVParallelPrefill, all_reduce
from nki_parallel_attn.integrations.rope import DynamicScaling, Rope
from nki_parallel_attn.integrations.tolerance import logits_tolerance
from nki_parallel_attn.kernels.collectives_torch import exchange_for
from nki_parallel_attn.plan import ShardingPlan
from nki_parallel_attn.testing import run_ranks
from nki_parallel_attn.topology.kv_layout import Contiguous, KVLayout, RoundRobin

GQA = DecoderConfig(
    vocab_size=89,
    hidden=64,
    layers=2,
    q_heads=8,
    kv_heads=2,
    head_dim=16,
    intermediate=101,
    max_positions=256,
    rope=Rope(16),
    sliding_window=(0, 0),
)
MIXED = dataclasses.replace(
    GQA, sliding_window=(0, 21), qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True, kv_heads=4
)
DIVIDED = dataclasses.replace(MIXED, intermediate=100)
DYNAMIC = dataclasses.replace(GQA, rope=Rope(16, scaling=DynamicScaling(4.0, 32)), tied_embeddings=True)


def random_decoder(config: DecoderConfig) -> Decoder:
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return decoder.requires_grad_(False)


def prefill_on_this_rank(
    decoder: Decoder,
    token_ids: torch.Tensor,
    chunks: list[tuple[int, bool]],
    options: dict[str, Any],
    shuffle_blocks: bool = False,
) -> torch.Tensor:
    """Logits of the chunks (tokens, apc_mode) read one after the other."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shape = decoder.config.attention_shape()
    plan = ShardingPlan(shape, world_size=world_size, max_seq_len=len(token_ids), **options)
    blocks = None
    if shuffle_blocks:
        generator = torch.Generator().manual_seed(rank)
        blocks = (3 + torch.randperm(plan.blocks_per_sequence(), generator=generator)).tolist()
    prefill = KVParallelPrefill(decoder, plan, rank, groups=plan.process_groups(), physical_blocks=blocks)
    hidden, start = [], 0
    for length, apc_mode in chunks:
        hidden.append(prefill.extend(token_ids[start : start + length], apc_mode=apc_mode))
        start += length
    # What is written is what this rank owns, and nothing else.
    written = sum(int((cache != 0).any(-1).sum()) for cache in prefill.caches.k)
    assert written == plan.rank(rank).tokens_held(start) * plan.kv_heads_per_rank * decoder.config.layers
    return decoder.logits(torch.cat(hidden))


CASES: dict[str, tuple[DecoderConfig, int, int, list[tuple[int, bool]], dict[str, Any]]] = {
    # config, ranks, tokens, chunks, plan
    "round robin": (GQA, 4, 128, [(128, False)], {"kvp": 4, "block_size": 16}),
    "contiguous": (GQA, 4, 128, [(128, False)], {"kvp": 4, "block_size": 16, "kv_layout": Contiguous()}),
    "ragged": (GQA, 4, 101, [(101, False)], {"kvp": 4, "block_size": 8}),
    "ragged contiguous": (GQA, 4, 101, [(101, False)], {"kvp": 4, "block_size": 8, "kv_layout": Contiguous()}),
    "fewer tokens than ranks": (GQA, 4, 3, [(3, False)], {"kvp": 4, "block_size": 2}),
    "odd chunks": (GQA, 4, 101, [(37, False), (1, False), (63, False)], {"kvp": 4, "block_size": 8}),
    "run-time prefix": (GQA, 4, 128, [(64, False), (64, True)], {"kvp": 4, "block_size": 16}),
    "ragged run-time prefixes": (MIXED, 4, 99, [(37, False), (22, True), (40, True)], {"kvp": 4, "block_size": 4}),
    "windows, biases, norms": (MIXED, 4, 120, [(120, False)], {"kvp": 4, "block_size": 8, "seg_size": 40}),
    "windows, contiguous": (MIXED, 4, 120, [(120, False)], {"kvp": 4, "block_size": 8, "kv_layout": Contiguous()}),
    "two KV groups": (GQA, 4, 96, [(50, False), (46, True)], {"kvp": 2, "block_size": 8}),
    "two KV groups, strided": (MIXED, 4, 96, [(96, False)], {"kvp": 2, "block_size": 8, "rank_order": "strided"}),
    "two model copies": (GQA, 4, 96, [(96, False)], {"tp": 2, "kvp": 2, "block_size": 8}),
    "tensor parallel alone": (MIXED, 2, 50, [(30, False), (20, False)], {"kvp": 1, "block_size": 8}),
    "eight ranks": (GQA, 8, 128, [(128, False)], {"kvp": 8, "block_size": 8}),
    "feed-forward divided": (DIVIDED, 4, 40, [(40, False)], {"kvp": 4, "block_size": 8}),
    "dynamic rope": (DYNAMIC, 2, 100, [(60, False), (40, True)], {"kvp": 2, "block_size": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_dense(case: str) -> None:
    config, ranks, length, chunks, options = CASES[case]
    decoder = random_decoder(config)
    token_ids = torch.randint(config.vocab_size, (length,), generator=torch.Generator().manual_seed(4))
    results = run_ranks(prefill_on_this_rank, ranks, args=(decoder, token_ids, chunks, options, True))
    expected = decoder(token_ids)
    for logits in results:
        deviation = (logits - expected).abs().max().item()
        assert deviation <= logits_tolerance(config, expected), deviation
    if options.get("tp", ranks) == ranks:
        assert all(torch.equal(logits, results[0]) for logits in results)


@pytest.mark.parametrize("kv_layout", [RoundRobin(), Contiguous()])
def test_glassllm_on_four_ranks(kv_layout: KVLayout) -> None:
    model = load_glassllm()
    token_ids = torch.randint(1024, (128,), generator=torch.Generator().manual_seed(5))
    options = {"kvp": 4, "block_size": 16, "kv_layout": kv_layout}
    results = run_ranks(prefill_on_this_rank, 4, args=(model.decoder, token_ids, [(128, False)], options))
    expected = model.original_logits(token_ids)
    assert (results[0] - expected).abs().max().item() <= logits_tolerance(model.decoder.config, expected)


def test_a_feed_forward_that_ranks_do_not_divide_is_not_summed() -> None:
    def sent_to_sum(decoder: Decoder) -> int:
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        plan = ShardingPlan(decoder.config.attention_shape(), world_size=ranks, kvp=ranks, block_size=8, max_seq_len=8)
        prefill = KVParallelPrefill(decoder, plan, rank, groups=plan.process_groups())
        prefill.extend(torch.arange(8))
        return sum(count for (stage, _), count in prefill.measured.sent.items() if stage == "all-reduce")

    once, twice = (run_ranks(sent_to_sum, 4, args=(random_decoder(config),)) for config in (MIXED, DIVIDED))
    # Hidden states of 8 tokens in each of 2 layers: three quarters leave a rank twice.
    assert once == [8 * 64 * 4 * 2 * 3 // 2] * 4
    assert twice == [2 * sent for sent in once]


def test_all_reduce_is_the_same_sum_everywhere() -> None:
    def on_rank() -> tuple[torch.Tensor, dict[str, int]]:
        exchange = exchange_for()
        exchange.reset_traffic()
        share = torch.arange(21.0).view(3, 7) * 10**exchange.rank
        return all_reduce(exchange, share), exchange.traffic()

    for summed, sent in run_ranks(on_rank, 4):
        assert torch.equal(summed, torch.arange(21.0).view(3, 7) * 1111)
        # 21 elements, padded to 24: three quarters of them leave the rank twice.
        assert sent["all_to_all"] == sent["all_gather"] == 18 * 4


def test_refused() -> None:
    decoder = random_decoder(GQA)
    plan = ShardingPlan(GQA.attention_shape(), world_size=1, block_size=8, max_seq_len=20)
    prefill = KVParallelPrefill(decoder, plan, 0)
    prefill.extend(torch.arange(15))
    with pytest.raises(ArgumentError, match="21 tokens in all"):
        prefill.extend(torch.arange(6))
    other = ShardingPlan(MIXED.attention_shape(), world_size=1, block_size=8, max_seq_len=20)
    with pytest.raises(ArgumentError, match="the decoder's shape"):
        KVParallelPrefill(decoder, other, 0)
    decode = ShardingPlan(GQA.attention_shape(), world_size=2, cp=2, block_size=8, max_seq_len=20)
    with pytest.raises(ArgumentError, match="cp=2"):
        KVParallelPrefill(decoder, decode, 0)


def test_failed_call_leaves_the_prefix_readable() -> None:
    decoder = random_decoder(GQA)
    plan = ShardingPlan(GQA.attention_shape(), world_size=1, block_size=8, max_seq_len=40)
    prefill = KVParallelPrefill(decoder, plan, 0)
    token_ids = torch.arange(40)
    prefill.extend(token_ids[:17])
    with pytest.raises(ArgumentError):
        prefill.extend(torch.tensor([3, 1000]))
    assert prefill.length == 17
    logits = decoder.logits(prefill.extend(token_ids[17:]))
    expected = decoder(token_ids)[17:]
    assert (logits - expected).abs().max().item() <= logits_tolerance(GQA, expected)

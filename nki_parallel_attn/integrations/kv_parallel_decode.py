"""Decoding with a KV cache dealt over ranks, by sequence (CP), by batch (KVDP) or both: what one rank does.

In every layer one call of attention_block_tkg does RMSNorm, the projections of the rank's Q heads and its group's KV
heads, RoPE, attention over the shards, the cache update, and the rank's rows of the output projection. The shares of
all ranks are then summed, as are those of the feed-forward, so that hidden states are equal, bit for bit, on all ranks.

    caches, hidden = prefill_batch(decoder, prefill_plan, rank, prompts, groups=prefill_plan.process_groups())
    caches, _ = hand_over(prefill_plan, plan, caches, lengths)
    decode = KVParallelDecode(decoder, plan, rank, caches, lengths, groups=plan.process_groups())
    tokens = decode.greedy(hidden)                      # [B, hidden] to [B]
    while ...:
        tokens = decode.greedy(decode.step(tokens))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nki_parallel_attn.backends import Backend
from nki_parallel_attn.errors import ArgumentError, PlanError
from nki_parallel_attn.integrations.decoder import Decoder, DecoderLayer, Projection, RMSNorm, add_bias, share_of
from nki_parallel_attn.integrations.kv_caches import KVCaches
from nki_parallel_attn.integrations.kv_parallel_prefill import (
    KVParallelPrefill,
    Measurements,
    all_reduce,
    intermediate_share,
)
from nki_parallel_attn.integrations.rope import RopeOrder
from nki_parallel_attn.kernels.collectives_torch import exchange_for
from nki_parallel_attn.ops.attention_block_tkg import attention_block_tkg
from nki_parallel_attn.plan import ShardingPlan
from nki_parallel_attn.plan_groups import ProcessGroups
from nki_parallel_attn.plan_rank import RankView
from nki_parallel_attn.topology.block_tables import active_blocks_table
from nki_parallel_attn.topology.types import QuantizationType

PARTITIONS = 128
"""The operation takes X in multiples of this width; narrower models are padded with zeros."""


def prefill_batch(
    decoder: Decoder,
    plan: ShardingPlan,
    rank: int,
    prompts: Sequence[Tensor],
    *,
    groups: ProcessGroups | None = None,
    backend: Backend = "auto",
    kv_dtype: torch.dtype | None = None,
    after_layer: Callable[[], object] | None = None,
) -> tuple[KVCaches, Tensor]:
    """Read several prompts, one after the other, into one pair of caches per layer.

    Args:
        decoder, plan, rank, groups, backend: as KVParallelPrefill takes them.
        prompts: token ids [S] int64 of each sequence.
        kv_dtype: of the caches, by default the weights'; or float8_e4m3fn.
        after_layer: called when a layer of a prompt is done.

    Returns:
        The caches, each sequence's `plan.blocks_per_sequence()` blocks in order, and the hidden states [B, hidden] of
        the prompts' last tokens.

    Raises:
        ArgumentError: no prompt, or what KVParallelPrefill refuses.
    """
    if not prompts:
        raise ArgumentError("prompts", "none", "token ids of at least one sequence")
    weight, width = decoder.embed_tokens.weight, plan.blocks_per_sequence()
    shape = plan.rank(rank).cache_shape(len(prompts) * width)
    caches = KVCaches.zeros(shape, decoder.config.layers, kv_dtype or weight.dtype, weight.device)
    last = []
    for row, prompt in enumerate(prompts):
        blocks = range(row * width, (row + 1) * width)
        prefill = KVParallelPrefill(
            decoder, plan, rank, groups=groups, backend=backend, physical_blocks=blocks, caches=caches
        )
        last.append(prefill.extend(prompt, after_layer=after_layer)[-1])
    return caches, torch.stack(last)


def hand_over(
    source: ShardingPlan, plan: ShardingPlan, caches: KVCaches, lengths: Sequence[int]
) -> tuple[KVCaches, int]:
    """Caches of `plan` from those that `prefill_batch` filled for `source`, and the bytes that this rank sent for them.

    The very same caches where both plans describe the same cache, with as many blocks; else redistributed once.
    """
    try:
        plan.check_same_cache(source)
        if plan.blocks_per_sequence() == source.blocks_per_sequence():
            return caches, 0
    except PlanError:
        pass
    moved, sent = plan.redistribute(source, [*caches.k, *caches.v], lengths)
    return KVCaches(moved[: len(caches.k)], moved[len(caches.k) :]), sent


class KVParallelDecode:
    """One rank's share of decoding B sequences, one token of each per step.

    Args:
        decoder: the whole model; a rank copies its slices of the attention weights.
        plan: kvdp and cp ranks share KV, tp ranks divide the heads; max_seq_len bounds every sequence.
        rank: this rank of the plan.
        caches: this rank's caches, which hold the first `lengths` tokens; they are written to.
        lengths: tokens of each of the B sequences that are in the caches, the same on every rank.
        sequences: physical blocks of each of the B/kvdp sequences that this rank holds; by default in order,
            `plan.blocks_per_sequence()` each, as `RankView.shard_kv` and `ShardingPlan.redistribute` leave them.
        groups: this rank's `plan.process_groups()`; None for one rank without torch.distributed.
        backend: of the attention operation.

    Attributes:
        lengths: [B] int64, tokens in the caches.
        measured: seconds by stage, and bytes sent, by ("kvdp" or "cp", collective) for attention_block_tkg.

    Raises:
        ArgumentError: a plan whose shape is not the decoder's, or one for prefill; caches or lengths that do not fit.
        PlanError: kvdp does not divide B.
    """

    def __init__(
        self,
        decoder: Decoder,
        plan: ShardingPlan,
        rank: int,
        caches: KVCaches,
        lengths: Sequence[int],
        *,
        sequences: Sequence[Sequence[int]] | None = None,
        groups: ProcessGroups | None = None,
        backend: Backend = "auto",
    ) -> None:
        if plan.shape != decoder.config.attention_shape():
            raise ArgumentError("plan", plan.shape, f"the decoder's shape {decoder.config.attention_shape()}")
        if plan.kvp > 1:
            raise ArgumentError("plan", f"kvp={plan.kvp}", "a decoding plan, kvp=1")
        self.decoder = decoder
        self.plan = plan
        self.view = plan.rank(rank)
        self.caches = caches
        self.backend = backend
        self.groups = groups
        device = decoder.embed_tokens.weight.device
        self.kvdp_exchange = exchange_for(groups.kvdp, device) if groups and plan.kvdp > 1 else None
        self.cp_exchange = exchange_for(groups.cp, device) if groups and plan.cp > 1 else None
        self.tp_exchange = exchange_for(groups.tp if groups else None, device)
        self.measured = Measurements()
        self.lengths = torch.tensor([plan.length(length) for length in lengths])
        self._check_caches()
        held, width = plan.batch_per_rank(len(lengths)), plan.blocks_per_sequence()
        if sequences is None:
            if caches.k[0].shape[0] != held * width:
                expected = f"{held} x {width} in order, or `sequences` beside them"
                raise ArgumentError("caches", f"{caches.k[0].shape[0]} blocks", expected)
            sequences = [range(row * width, (row + 1) * width) for row in range(held)]
        if len(sequences) != held:
            raise ArgumentError("sequences", f"{len(sequences)} sequences", f"{held}, which this rank holds")
        self.block_table = active_blocks_table(sequences, width, caches.k[0].shape[0])
        self.active_blocks_table = self.view.active_blocks_table(sequences, width, caches.k[0].shape[0]).to(device)
        self.weights = [_LayerWeights(layer, self.view, self.tp_exchange.rank == 0) for layer in _layers(decoder)]

    @property
    def cache_bytes(self) -> int:
        """Bytes of this rank's K and V caches over all layers."""
        return self.caches.nbytes

    @torch.no_grad()
    def step(self, token_ids: Tensor) -> Tensor:
        """Read the next token of every sequence: hidden states [B, hidden], equal on all ranks of the model copy.

        Args:
            token_ids: [B] int64, the same on every rank; row b takes position `lengths[b]`.

        Raises:
            ArgumentError: other token ids, a sequence beyond plan.max_seq_len, or what the operation refuses.
        """
        self.decoder.check_tokens(token_ids)
        if len(token_ids) != len(self.lengths):
            raise ArgumentError("token_ids", f"{len(token_ids)} tokens", f"{len(self.lengths)}, one per sequence")
        longest = int(self.lengths.max()) + 1
        if longest > self.plan.length():
            raise ArgumentError("token_ids", f"token {longest} of a sequence", f"max_seq_len={self.plan.length()}")
        step = _Step(self)
        hidden: Tensor = self.decoder.embed_tokens(token_ids)
        for layer in _layers(self.decoder):
            hidden = hidden + self._attention(layer, hidden, step)
            if layer.post_attention_layernorm is not None:
                hidden = hidden + self._feed_forward(layer, layer.post_attention_layernorm(hidden))
        self.lengths = self.lengths + 1
        return hidden

    @torch.no_grad()
    def greedy(self, hidden: Tensor) -> Tensor:
        """Most likely next tokens [B] int64 of hidden states [B, hidden].

        Each rank looks at its part of the vocabulary; all decide on the same gathered candidates.
        """
        part = share_of(self.decoder.config.vocab_size, self.tp_exchange.rank, self.tp_exchange.size)
        with self.measured.stage("next token", self.tp_exchange):
            best = self.decoder.logits(hidden, part).max(-1)
            candidates = torch.stack((best.values.double(), best.indices.double() + part.start))
            logits, tokens = self.tp_exchange.all_gather(candidates).unbind(1)
            return tokens.gather(0, logits.argmax(0)[None])[0].to(torch.int64)

    def _attention(self, layer: DecoderLayer, hidden: Tensor, step: _Step) -> Tensor:
        weights, config = self.weights[layer.index], self.decoder.config
        with self.measured.stage("attention block"), self._count():
            share, _, _ = attention_block_tkg(
                F.pad(hidden, (0, -hidden.shape[-1] % PARTITIONS))[:, None],
                K_cache=self.caches.k[layer.index],
                V_cache=self.caches.v[layer.index],
                rope_contiguous_layout=config.rope.order is RopeOrder.HALF_SPLIT,
                backend=self.backend,
                target=self.plan.target,
                swa_start_pos_ids=step.window_starts(config.sliding_window[layer.index]),
                KVDP_group=self.groups.kvdp if self.kvdp_exchange and self.groups else None,
                CP_group=self.groups.cp if self.cp_exchange and self.groups else None,
                **weights.arguments,
                **step.arguments,
                **self._fixed_arguments,
            )
        assert isinstance(share, Tensor)
        with self.measured.stage("all-reduce", self.tp_exchange):
            return all_reduce(self.tp_exchange, share)

    def _feed_forward(self, layer: DecoderLayer, hidden: Tensor) -> Tensor:
        """SwiGLU [B, hidden], its intermediate channels divided over the model copy as in prefill."""
        assert layer.mlp is not None
        exchange = self.tp_exchange
        channels = intermediate_share(self.decoder.config.intermediate, exchange.rank, exchange.size)
        with self.measured.stage("feed-forward"):
            share = layer.mlp.project(hidden, channels or slice(None))
        if channels is not None:
            with self.measured.stage("all-reduce", exchange):
                share = all_reduce(exchange, share)
        return add_bias(share, layer.mlp.down_proj)

    @cached_property
    def _fixed_arguments(self) -> dict[str, Any]:
        """What is the same in every layer and step."""
        return {
            "rmsnorm_QK_post_rope_enabled": False,
            "rmsnorm_QK_post_rope_eps": 0.0,
            "rmsnorm_QK_post_rope_W_Q": None,
            "rmsnorm_QK_post_rope_W_K": None,
            "K_cache_transposed": False,
            "active_blocks_table": self.active_blocks_table,
            "sink": None,
            "update_cache": True,
            "quantization_type_qkv": QuantizationType.NONE,
            "weight_dequant_scale_qkv": None,
            "input_dequant_scale_qkv": None,
            "quantization_type_out": QuantizationType.NONE,
            "weight_dequant_scale_out": None,
            "input_dequant_scale_out": None,
            "transposed_out": False,
            "out_in_sb": False,
            **self.caches.scales(),
            **self.view.decode_arguments(),
        }

    @contextmanager
    def _count(self) -> Iterator[None]:
        """Add what the operation's two exchanges send in the enclosed code."""
        exchanges = {"kvdp": self.kvdp_exchange, "cp": self.cp_exchange}
        before = {name: exchange.traffic() for name, exchange in exchanges.items() if exchange}
        yield
        for name, counts in before.items():
            exchange = exchanges[name]
            assert exchange is not None
            for collective, count in exchange.traffic().items():
                self.measured.sent[name, collective] += count - counts.get(collective, 0)

    def _check_caches(self) -> None:
        expected = self.view.cache_shape(self.caches.k[0].shape[0])
        for name in ("k", "v"):
            caches: Sequence[Tensor] = getattr(self.caches, name)
            if len(caches) != len(self.decoder.layers):
                raise ArgumentError(
                    f"caches.{name}", f"{len(caches)} caches", f"one for each of {len(self.decoder.layers)} layers"
                )
            for index, cache in enumerate(caches):
                if tuple(cache.shape) != expected:
                    raise ArgumentError(f"caches.{name}[{index}]", tuple(cache.shape), f"{expected}, as the plan says")


class _LayerWeights:
    """One layer's arguments of attention_block_tkg: this rank's slices of the weights."""

    def __init__(self, layer: DecoderLayer, view: RankView, adds_bias: bool) -> None:
        block = layer.self_attn
        projections = (block.q_proj, block.k_proj, block.v_proj)
        columns = view.qkv_columns().to(block.q_proj.weight.device)
        norm, spare = layer.input_layernorm, -block.q_proj.in_features % PARTITIONS
        output_bias = block.o_proj.bias if adds_bias else None
        self.arguments: dict[str, Any] = {
            "X_hidden_dim_actual": block.q_proj.in_features if spare else None,
            "rmsnorm_X_enabled": True,
            "rmsnorm_X_eps": norm.eps,
            "rmsnorm_X_gamma": F.pad(norm.weight, (0, spare))[None],
            "W_qkv": F.pad(torch.cat([p.weight for p in projections])[columns], (0, spare)).T.contiguous(),
            "bias_qkv": _biases(projections)[columns][None] if block.q_proj.bias is not None else None,
            "rmsnorm_QK_pre_rope_enabled": block.q_norm is not None,
            "rmsnorm_QK_pre_rope_eps": norm.eps,
            "rmsnorm_QK_pre_rope_W_Q": _gamma(block.q_norm),
            "rmsnorm_QK_pre_rope_W_K": _gamma(block.k_norm),
            "W_out": block.o_proj.weight[:, view.out_rows()].T.contiguous(),
            # Once in the sum of the ranks' shares.
            "bias_out": None if output_bias is None else output_bias[None],
        }


class _Step:
    """What all layers of one step share: where the tokens stand, and what they see."""

    def __init__(self, decode: KVParallelDecode) -> None:
        self.view, self.positions = decode.view, decode.lengths[:, None]
        weight = decode.decoder.embed_tokens.weight
        self.device = weight.device
        cos_sin = decode.decoder.config.rope.cos_sin(decode.lengths, decode.plan.length(), weight.dtype)
        cos, sin = (table.T[:, :, None].to(self.device) for table in cos_sin)
        self.arguments: dict[str, Any] = {
            "cos": cos,
            "sin": sin,
            "attention_mask": self.view.attention_mask(self.positions).to(self.device),
            "pos_ids": self.view.pos_ids(self.positions).to(self.device),
            "max_context_len": self.view.max_context_len(self.positions).to(self.device),
            "kv_cache_update_idx": self.view.kv_cache_update_idx(self.positions, decode.block_table).to(self.device),
        }
        self._starts: dict[int, Tensor | None] = {0: None}

    def window_starts(self, window: int) -> Tensor | None:
        """swa_start_pos_ids of a layer whose queries see `window` tokens; None where they see all."""
        if window not in self._starts:
            self._starts[window] = self.view.swa_start_pos_ids(self.positions, window).to(self.device)
        return self._starts[window]


def _layers(decoder: Decoder) -> Iterator[DecoderLayer]:
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer)
        yield layer


def _biases(projections: Sequence[Projection]) -> Tensor:
    return torch.cat([projection.bias for projection in projections])


def _gamma(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight[None]

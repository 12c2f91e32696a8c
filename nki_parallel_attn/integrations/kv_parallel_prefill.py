"""Prefill of a decoder with its KV cache dealt over ranks: what one rank projects, stores, attends and sends.

In every layer a rank projects K and V of the positions it owns alone, writes them to its paged cache by slot mapping,
projects its own Q heads at all positions, calls attention_kv_parallel_segmented_cte, and output_projection_cte with its
heads' rows of the weight. The ranks' shares are then summed. The feed-forward is split by intermediate channels and
summed in the same way if the ranks divide them; if not, every rank computes all of it. Hidden states are equal, bit for
bit, on all ranks (with a feed-forward that is not split: on ranks whose processors round alike).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from nki_parallel_attn.backends import Backend
from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.integrations.decoder import Decoder, DecoderLayer, SelfAttention, add_bias, share_of
from nki_parallel_attn.integrations.kv_caches import KVCaches
from nki_parallel_attn.kernels.collectives_torch import Exchange, exchange_for
from nki_parallel_attn.ops.attention_kv_parallel_segmented_cte import attention_kv_parallel_segmented_cte
from nki_parallel_attn.ops.output_projection_cte import output_projection_cte
from nki_parallel_attn.plan import ShardingPlan
from nki_parallel_attn.plan_groups import ProcessGroups
from nki_parallel_attn.topology.paged_cache import write_kv_cache
from nki_parallel_attn.topology.types import OProjAttentionLayout


@dataclass
class Measurements:
    """What a rank's prefill took: seconds by stage, and bytes it sent to peers by stage and collective."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)

    @contextmanager
    def stage(self, name: str, exchange: Exchange | None = None) -> Iterator[None]:
        """Add the time of the enclosed code to `name`, and the bytes that `exchange` sends in it."""
        before = exchange.traffic() if exchange else {}
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start
        for collective, count in (exchange.traffic() if exchange else {}).items():
            self.sent[name, collective] += count - before.get(collective, 0)


class KVParallelPrefill:
    """One rank's share of the prefill of one sequence, in one call or several.

    Args:
        decoder: the whole model; a rank reads its slices of the weights.
        plan: kvp ranks share KV, tp ranks divide the heads; max_seq_len sets the size of the caches.
        rank: this rank of the plan.
        groups: this rank's `plan.process_groups()`; None for one rank without torch.distributed.
        backend: of the attention operation and the output projection.
        physical_blocks: which blocks of the cache hold the local blocks 0, 1, ...; by default in order.
        caches: caches to write to, which other sequences may share in other blocks; by default new ones.

    Raises:
        ArgumentError: a plan whose shape is not the decoder's, or a plan for decoding.
    """

    def __init__(
        self,
        decoder: Decoder,
        plan: ShardingPlan,
        rank: int,
        *,
        groups: ProcessGroups | None = None,
        backend: Backend = "auto",
        physical_blocks: Sequence[int] | None = None,
        caches: KVCaches | None = None,
    ) -> None:
        if plan.shape != decoder.config.attention_shape():
            raise ArgumentError("plan", plan.shape, f"the decoder's shape {decoder.config.attention_shape()}")
        if plan.kvdp * plan.cp > 1:
            raise ArgumentError("plan", f"kvdp={plan.kvdp}, cp={plan.cp}", "a prefill plan, kvdp=cp=1")
        self.decoder = decoder
        self.plan = plan
        self.view = plan.rank(rank)
        self.backend = backend
        self.kv_group = groups.kv if groups else None
        weight = decoder.embed_tokens.weight
        self.kv_exchange = exchange_for(self.kv_group, weight.device)
        self.tp_exchange = exchange_for(groups.tp if groups else None, weight.device)
        self.measured = Measurements()
        self.length = 0
        # Padded queries lie beyond the sequence: the table goes as far as they do, with absent blocks.
        spare = -(-plan.seg_size // (plan.block_size * plan.kvp))
        width = plan.blocks_per_sequence() + spare
        self.block_table = self.view.block_table(plan.length(), physical_blocks, max_blocks=width)
        shape = self.view.cache_shape(max(plan.blocks_per_sequence(), int(self.block_table.max()) + 1))
        self.caches = caches or KVCaches.zeros(shape, len(decoder.layers), weight.dtype, weight.device)

    @property
    def cache_bytes(self) -> int:
        """Bytes of this rank's K and V caches over all layers."""
        return self.caches.nbytes

    @torch.no_grad()
    def extend(
        self, token_ids: Tensor, *, apc_mode: bool = False, after_layer: Callable[[], object] | None = None
    ) -> Tensor:
        """Read the next tokens of the sequence: hidden states [S, hidden], equal on all ranks of the model copy.

        Args:
            token_ids: [S] int64, the same on every rank; they follow what earlier calls read.
            apc_mode: pass the length of what is already cached as a run-time value (valid_num_prior_tokens).
            after_layer: called when a layer is done.

        Raises:
            ArgumentError: more tokens than plan.max_seq_len, or what the attention operation refuses.
        """
        stop = self.length + len(token_ids)
        if stop > self.plan.length():
            raise ArgumentError("token_ids", f"{stop} tokens in all", f"at most max_seq_len={self.plan.length()}")
        chunk = _Chunk(self, self.length, stop, apc_mode)
        hidden = self.decoder.run_layers(token_ids, chunk, after_layer)
        self.length = stop
        return hidden


class _Chunk:
    """One call's `Blocks`: the positions [start, stop) of the sequence."""

    def __init__(self, prefill: KVParallelPrefill, start: int, stop: int, apc_mode: bool) -> None:
        self.prefill = prefill
        config, view = prefill.decoder.config, prefill.view
        weight = prefill.decoder.embed_tokens.weight
        positions = torch.arange(start, stop)
        owned = view.owned_positions(start, stop)
        self.slots = view.slot_mapping(owned, prefill.block_table)
        self.rows = (owned - start).to(weight.device)
        self.padding = -(stop - start) % prefill.plan.seg_size
        self.arguments = view.kvp_arguments(start, apc_mode=apc_mode)
        cos_sin = config.rope.cos_sin(positions, prefill.plan.length(), weight.dtype)
        self.cos, self.sin = (table.to(weight.device) for table in cos_sin)

    def attention(self, layer: DecoderLayer, hidden: Tensor) -> Tensor:
        """KV-parallel attention [S, hidden]."""
        prefill, block = self.prefill, layer.self_attn
        with prefill.measured.stage("project Q, K, V"):
            q = block.project_q(hidden, self.cos, self.sin, prefill.view.q_heads)
            k, v = self._project_own_kv(block, hidden)
        with prefill.measured.stage("write cache"):
            caches = prefill.caches
            write_kv_cache(caches.k[layer.index], caches.stored(k), self.slots)
            write_kv_cache(caches.v[layer.index], caches.stored(v), self.slots)
        with prefill.measured.stage("attention", prefill.kv_exchange):
            attended = self._attend(layer, q)
        with prefill.measured.stage("project output"):
            share = self._project_output(block, attended)
        return self._sum(share)

    def feed_forward(self, layer: DecoderLayer, hidden: Tensor) -> Tensor:
        """SwiGLU [S, hidden], its intermediate channels divided over the model copy where that leaves no remainder."""
        assert layer.mlp is not None
        exchange, width = self.prefill.tp_exchange, self.prefill.decoder.config.intermediate
        channels = intermediate_share(width, exchange.rank, exchange.size)
        with self.prefill.measured.stage("feed-forward"):
            share = layer.mlp.project(hidden, channels or slice(None))
        return add_bias(share if channels is None else self._sum(share), layer.mlp.down_proj)

    def _project_own_kv(self, block: SelfAttention, hidden: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.rows
        return block.project_kv(hidden[rows], self.cos[rows], self.sin[rows], self.prefill.view.kv_heads)

    def _project_output(self, block: SelfAttention, attended: Tensor) -> Tensor:
        """This rank's share [S, hidden] of the output projection, the bias in that of one rank of the model copy."""
        prefill = self.prefill
        weight, bias = block.o_proj.weight, block.o_proj.bias if prefill.tp_exchange.rank == 0 else None
        return output_projection_cte(
            attended[None],
            weight[:, prefill.view.out_rows()].T,
            None if bias is None else bias[None],
            attention_layout=OProjAttentionLayout.BNSd,
            backend=prefill.backend,
        )[0]

    def _attend(self, layer: DecoderLayer, q: Tensor) -> Tensor:
        """[q_heads_per_rank, S, D], S padded to whole segments for the call and cut again."""
        prefill = self.prefill
        length = q.shape[1]
        attended = attention_kv_parallel_segmented_cte(
            F.pad(q, (0, 0, 0, self.padding)),
            prefill.caches.k[layer.index],
            prefill.caches.v[layer.index],
            prefill.block_table,
            scale=q.shape[-1] ** -0.5,
            sliding_window=prefill.decoder.config.sliding_window[layer.index],
            backend=prefill.backend,
            group=prefill.kv_group,
            **prefill.caches.scales(),
            **self.arguments,
        )
        return attended[:, :length]

    def _sum(self, share: Tensor) -> Tensor:
        exchange = self.prefill.tp_exchange
        with self.prefill.measured.stage("all-reduce", exchange):
            return all_reduce(exchange, share)


def intermediate_share(width: int, index: int, count: int) -> slice | None:
    """Channels that rank `index` of `count` computes of a feed-forward; None where each computes all of them: a rank
    alone, and a width that the ranks do not divide."""
    return share_of(width, index, count) if count > 1 and width % count == 0 else None


def all_reduce(exchange: Exchange, share: Tensor) -> Tensor:
    """Sum of the ranks' `share`, in rank order and with the same bits on all ranks.

    A reduce-scatter (all-to-all and a local sum) and an all-gather: 2*(size - 1)/size of the tensor is sent by each
    rank, the least that an all-reduce needs.
    """
    if exchange.size == 1:
        return share
    flat = F.pad(share.reshape(-1), (0, -share.numel() % exchange.size))
    summed = exchange.all_to_all(flat.view(exchange.size, -1)).sum(dim=0)
    return exchange.all_gather(summed).reshape(-1)[: share.numel()].view_as(share)

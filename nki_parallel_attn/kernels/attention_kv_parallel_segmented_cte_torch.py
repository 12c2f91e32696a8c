"""attention_kv_parallel_segmented_cte in torch: gather Q, attend to the local KV, exchange partials, merge.

    1. all-gather Q: this rank sees all heads of the group
    2. local partials: all heads against the local KV, normalised, with their log-sum-exp
    3. all-to-all: each rank receives its own heads' partials from every rank
    4. merge by log-sum-exp

The gradient takes the same way back: gather what the owners know of their heads (Q, output, its gradient, log-sum-exp),
run each call's backward with the *merged* statistics, which is exact, and return the partial gradients of Q. K and V
need no exchange. The exchange is passed in, so that ranks may be processes or threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nki_parallel_attn.kernels.collectives_torch import Exchange
from nki_parallel_attn.kernels.online_softmax_torch import attend, attend_backward, merge, stat_dtype
from nki_parallel_attn.kernels.paged_kv_torch import LocalKV, cache_gradient, read_local_kv
from nki_parallel_attn.kernels.visible_tiles_torch import (
    MAX_FUSED_ROWS,
    RowTile,
    VisibleSlots,
    tile_mask,
    visible_tiles,
)


@dataclass(frozen=True)
class PrefillCall:
    """Everything of one call but the differentiable tensors.

    Attributes:
        block_table: [1, max_blocks] integers.
        visible: what each query row sees of the table's logical slots.
        scale, block_size, fp8_packed, k_scale, v_scale, tp_out: as on the reference page.
        exchange: the collectives of this rank's group.
    """

    block_table: Tensor
    visible: VisibleSlots
    scale: float
    block_size: int
    exchange: Exchange
    tp_out: bool = False
    fp8_packed: bool = False
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def with_own_tensors(self) -> PrefillCall:
        """The same call, which keeps its meaning when the caller writes to its block table or scales."""
        table, k_scale, v_scale = (
            None if t is None else t.detach().clone() for t in (self.block_table, self.k_scale, self.v_scale)
        )
        assert table is not None
        return replace(self, block_table=table, k_scale=k_scale, v_scale=v_scale)

    def read_local_kv(self, k_cache: Tensor, v_cache: Tensor, dtype: torch.dtype) -> LocalKV:
        return read_local_kv(
            k_cache,
            v_cache,
            self.block_table,
            self.visible,
            self.block_size,
            dtype,
            fp8_packed=self.fp8_packed,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )


def attention_kv_parallel_segmented_cte(q: Tensor, k_cache: Tensor, v_cache: Tensor, call: PrefillCall) -> Tensor:
    """This rank's heads over the whole sequence: [Hq, S, D], or with tp_out [Hq, D, S]. Arguments are checked."""
    # Backward reads them again, and callers reuse their buffers for the next step.
    out: Tensor = _KVParallelAttention.apply(q, k_cache, v_cache, call.with_own_tensors())  # type: ignore[no-untyped-call]
    return out.transpose(1, 2) if call.tp_out else out


class _KVParallelAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k_cache: Tensor, v_cache: Tensor, call: PrefillCall) -> Tensor:
        heads, rows, dim = q.shape
        # All that can fail is inside the round, so that the peers hear of it.
        with call.exchange.round() as exchange:
            local = call.read_local_kv(k_cache, v_cache, q.dtype)
            q_all = exchange.all_gather(q).flatten(0, 1)
            outs = exchange.outbox((heads, rows, dim), q.dtype)
            lses = exchange.outbox((heads, rows), stat_dtype(q.dtype))
            local_partials(q_all, local, call.scale, outs, lses)
            out_parts, lse_parts = exchange.all_to_all(outs, lses)
            # In place of this rank's own part, which saves a buffer of the output's size.
            out = q.new_empty(heads, dim, rows).transpose(1, 2) if call.tp_out else outs[call.exchange.rank]
            lse = merge(out_parts, lse_parts, out)
        ctx.save_for_backward(q, k_cache, v_cache, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k_cache, v_cache, out, lse = ctx.saved_tensors
        call: PrefillCall = ctx.call
        with call.exchange.round() as exchange:
            local = call.read_local_kv(k_cache, v_cache, q.dtype)
            q_all, grad_all, out_all, lse_all = (exchange.all_gather(t).flatten(0, 1) for t in (q, grad_out, out, lse))
            outbox = exchange.outbox(q.shape, q.dtype)
            grad_k, grad_v = local_gradients(q_all, grad_all, out_all, lse_all, local, call.scale, outbox)
            (parts,) = exchange.all_to_all(outbox)
            grad_q = parts[0].to(lse.dtype)
            for part in parts[1:]:
                grad_q = grad_q + part
        k_scale = None if call.k_scale is None else call.k_scale[: q.shape[2], 0]
        v_scale = None if call.v_scale is None else call.v_scale[0, 0]
        return (
            grad_q.to(q.dtype),
            cache_gradient(grad_k, local, k_cache, k_scale),
            cache_gradient(grad_v, local, v_cache, v_scale),
            None,
        )


def local_partials(q_all: Tensor, local: LocalKV, scale: float, outs: list[Tensor], lses: list[Tensor]) -> None:
    """Attention of all heads to one rank's KV, written to that rank's outboxes.

    Args:
        q_all: [H, S, D], the heads of all ranks.
        outs, lses: for each rank, [Hq, S, D] and [Hq, S]; rows that see nothing here get 0 and -inf.
    """
    for lse in lses:
        lse.fill_(-torch.inf)
    hidden = (local.visible.stop == local.visible.first).nonzero()[:, 0].to(q_all.device)
    if len(hidden):
        for out in outs:
            out[:, hidden] = 0
    kv_heads = local.keys.shape[0]
    for tile in visible_tiles(local.visible, q_all.shape[0], kv_heads):
        rows = _on(tile.rows, q_all.device)
        for heads, kv in _head_chunks(tile, q_all.shape[0], kv_heads):
            out, lse = _tile_partial(q_all[heads, rows], local, tile, kv, scale)
            _deliver(out, outs, heads, rows)
            _deliver(lse, lses, heads, rows)
    if local.poisoned is not None:
        poisoned = local.poisoned.repeat_interleave(q_all.shape[0] // kv_heads, 0)
        for out, rows_of_peer in zip(outs, poisoned.chunk(len(outs)), strict=True):
            out.masked_fill_(rows_of_peer[..., None], torch.nan)


def local_gradients(
    q_all: Tensor,
    grad_all: Tensor,
    out_all: Tensor,
    lse_all: Tensor,
    local: LocalKV,
    scale: float,
    outbox: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Gradients of the local keys and values; the partial gradients of Q go to the outbox.

    Args:
        q_all, grad_all, out_all, lse_all: [H, S, D], and [H, S] for the merged log-sum-exp.
        outbox: for each rank, [Hq, S, D] in q's dtype; the fused backward rounds its parts to that dtype anyway.

    Returns:
        grad_keys, grad_values: [KVH, L, D] of `stat_dtype`.
    """
    # A row that saw a NaN slot has a NaN output, but its gradient is that of the zeroed slots: with a zero grad_out, as
    # padded queries have, it must not spoil the gradients of the others.
    out_all = out_all.nan_to_num(0.0)
    stat = stat_dtype(q_all.dtype)
    grad_k, grad_v = (torch.zeros(t.shape, dtype=stat, device=t.device) for t in (local.keys, local.values))
    for slot in outbox:
        slot.zero_()
    kv_heads = local.keys.shape[0]
    for tile in visible_tiles(local.visible, q_all.shape[0], kv_heads):
        rows = _on(tile.rows, q_all.device)
        for heads, kv in _head_chunks(tile, q_all.shape[0], kv_heads):
            q, grad, out, lse = (t[heads, rows] for t in (q_all, grad_all, out_all, lse_all))
            grad_q = torch.zeros(q.shape, dtype=stat, device=q.device)
            for keys, causal, mask in _calls(tile, local.visible, q.device):
                k, v = local.keys[kv, keys], local.values[kv, keys]
                parts = attend_backward(grad, q, k, v, out, lse, scale, causal=causal, mask=mask)
                grad_q += parts[0]
                grad_k[kv, keys] += parts[1]
                grad_v[kv, keys] += parts[2]
            _deliver(grad_q, outbox, heads, rows)
    return grad_k, grad_v


def _tile_partial(q: Tensor, local: LocalKV, tile: RowTile, kv: slice, scale: float) -> tuple[Tensor, Tensor]:
    """Output [h, n, D] and log-sum-exp [h, n] of some heads of one tile over everything that it sees."""
    outs, lses = [], []
    for keys, causal, mask in _calls(tile, local.visible, q.device):
        out, lse = attend(q, local.keys[kv, keys], local.values[kv, keys], scale, causal=causal, mask=mask)
        outs.append(out)
        lses.append(lse)
    if len(outs) == 1:
        return outs[0], lses[0]
    merged = torch.empty_like(q)
    return merged, merge(outs, lses, merged)


def _calls(tile: RowTile, visible: VisibleSlots, device: torch.device) -> Iterator[tuple[slice, bool, Tensor | None]]:
    """Keys, causal and mask of each call that a tile takes."""
    if tile.unmasked:
        yield tile.unmasked, False, None
    if tile.causal:
        yield tile.causal, True, None
    for keys in tile.masked:
        yield keys, False, tile_mask(tile, keys, visible).to(device)


def _head_chunks(tile: RowTile, heads: int, kv_heads: int) -> Iterator[tuple[slice, slice]]:
    """Heads to attend at once, with their KV heads: as many as bound the temporaries, of whole KV heads or of one.

    The fused op gives each thread an equal share of (head, row block) pairs, in order. A causal head's later rows cost
    more than its earlier ones, so that threads which share a head wait for the last: each gets whole heads.
    """
    step = max(MAX_FUSED_ROWS // tile.count, torch.get_num_threads() if tile.causal else 1)
    per_kv_head = heads // kv_heads
    if step >= per_kv_head:
        kv_step = step // per_kv_head
        for kv in range(0, kv_heads, kv_step):
            stop = min(kv + kv_step, kv_heads)
            yield slice(kv * per_kv_head, stop * per_kv_head), slice(kv, stop)
        return
    for kv in range(kv_heads):
        end = (kv + 1) * per_kv_head
        for start in range(kv * per_kv_head, end, step):
            yield slice(start, min(start + step, end)), slice(kv, kv + 1)


def _deliver(values: Tensor, outbox: list[Tensor], heads: slice, rows: slice | Tensor) -> None:
    """Write `values` [h, n, ...] of the group's heads to the outboxes of the ranks that own them."""
    per_rank = outbox[0].shape[0]
    for peer in range(heads.start // per_rank, (heads.stop - 1) // per_rank + 1):
        start, stop = max(heads.start, peer * per_rank), min(heads.stop, (peer + 1) * per_rank)
        mine = slice(start - peer * per_rank, stop - peer * per_rank)
        outbox[peer][mine, rows] = values[start - heads.start : stop - heads.start].to(outbox[peer].dtype)


def _on(rows: slice | Tensor, device: torch.device) -> slice | Tensor:
    return rows if isinstance(rows, slice) else rows.to(device)

"""The local K and V that a prefill call sees: gathered from a paged cache, dequantised, and the gradient's way back.

Only blocks with a visible slot are read, and of those only the visible range. Absent blocks (-1 in the table) are left
out, which keeps every row's visible slots one range. A block table that lists consecutive blocks copies nothing where
the cache has one KV head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nki_parallel_attn.kernels.online_softmax_torch import stat_dtype
from nki_parallel_attn.kernels.visible_tiles_torch import VisibleSlots
from nki_parallel_attn.topology.block_tables import ABSENT
from nki_parallel_attn.topology.kv_layout import RoundRobin
from nki_parallel_attn.topology.paged_cache import unpack_fp8_k


@dataclass(frozen=True)
class LocalKV:
    """What one rank attends to.

    Attributes:
        keys, values: [KVH, L, D] of the query's dtype, finite: see `poisoned`.
        visible: the rows' ranges in 0..L.
        poisoned: [KVH, S] bool, rows that see a slot with a NaN or an infinity; None when there is no such slot. Those
            slots are zeroed, because the fused op lets them leak into rows that must not see them.
        blocks: [n] int64, the physical block of every block that was read, on the cache's device.
        offset: place of slot 0 of `keys` in the concatenation of `blocks`.
    """

    keys: Tensor
    values: Tensor
    visible: VisibleSlots
    poisoned: Tensor | None
    blocks: Tensor
    offset: int


def round_robin_slots(rows: int, q_offset: int, rank: int, ranks: int, block_size: int, window: int) -> VisibleSlots:
    """Slots of `rank` that queries at positions q_offset .. q_offset+rows-1 see; window 0 means no window."""
    layout = RoundRobin().bind(ranks=ranks, block_size=block_size)
    seen = torch.arange(q_offset + 1, q_offset + rows + 1)
    stop = layout.filled_slots(rank, seen)
    first = layout.filled_slots(rank, (seen - window).clamp(min=0)) if window else torch.zeros_like(stop)
    return VisibleSlots(first, stop, layout.filled_slots(rank, q_offset))


def contiguous_slots(rows: int, q_offset: int, local_length: int, window: int) -> VisibleSlots:
    """Slots j <= q_offset + t of a shard of `local_length` tokens; q_offset is negative if the shard starts later."""
    seen = torch.arange(q_offset + 1, q_offset + rows + 1)
    stop = seen.clamp(0, local_length)
    first = (seen - window).clamp(0, local_length) if window else torch.zeros_like(stop)
    return VisibleSlots(first, stop, min(max(q_offset, 0), local_length))


def read_local_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    visible: VisibleSlots,
    block_size: int,
    dtype: torch.dtype,
    *,
    fp8_packed: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> LocalKV:
    """Gather the visible slots of both caches.

    Args:
        k_cache, v_cache, block_table, fp8_packed, k_scale, v_scale: as on the reference page.
        visible: ranges over the table's logical slots, on the CPU.
        dtype: of the result. Scaled values are rounded to it, which loses precision below float32.
    """
    first_block = int(visible.first[0]) // block_size
    last_block = max(first_block, -(-int(visible.stop[-1]) // block_size))
    table = block_table[0, first_block:last_block].cpu().to(torch.int64)
    present = table != ABSENT
    visible, offset, length = _leave_out_absent(visible, first_block * block_size, present, block_size)
    blocks = table[present].to(k_cache.device)
    keys = _gather(k_cache, blocks, fp8_packed)[:, offset : offset + length]
    values = _gather(v_cache, blocks, False)[:, offset : offset + length]
    keys = _dequantise(keys, None if k_scale is None else k_scale[: keys.shape[-1], 0], dtype)
    values = _dequantise(values, None if v_scale is None else v_scale[0, 0], dtype)
    poisoned = None
    if length and not (_all_finite(keys) and _all_finite(values)):
        broken = ~(keys.isfinite() & values.isfinite()).all(-1)
        keys, values = (t.masked_fill(broken[..., None], 0) for t in (keys, values))
        count = torch.nn.functional.pad(broken.cpu().to(torch.int64).cumsum(1), (1, 0))
        poisoned = (count[:, visible.stop] > count[:, visible.first]).to(keys.device)
    return LocalKV(keys, values, visible, poisoned, blocks, offset)


def cache_gradient(grad: Tensor, local: LocalKV, cache: Tensor, scale: Tensor | None) -> Tensor:
    """Scatter a gradient [KVH, L, D] of the gathered slots to the cache's shape; shared blocks accumulate.

    Args:
        grad: float32 or float64; accumulated in it, then rounded to the cache's dtype.
        cache: [num_blocks, KVH, block_size, D].
        scale: what the slots were multiplied with, broadcastable over D, or None.
    """
    result = torch.zeros_like(cache)
    if not len(local.blocks):
        return result
    if scale is not None:
        grad = grad * scale
    block_size = cache.shape[2]
    tail = len(local.blocks) * block_size - local.offset - grad.shape[1]
    padded = torch.nn.functional.pad(grad, (0, 0, local.offset, tail))
    per_block = torch.unflatten(padded, 1, (-1, block_size)).transpose(0, 1)
    unique, place = torch.unique(local.blocks, return_inverse=True)
    total = per_block.new_zeros((len(unique), *per_block.shape[1:])).index_add_(0, place, per_block)
    result[unique] = total.to(cache.dtype)
    return result


def _leave_out_absent(
    visible: VisibleSlots, base: int, present: Tensor, block_size: int
) -> tuple[VisibleSlots, int, int]:
    """Renumber slots from `base` on over the present blocks only.

    Returns:
        Ranges that start at slot 0, the place of that slot in the concatenated present blocks, and the last stop.
    """
    preceding = torch.nn.functional.pad(present.to(torch.int64).cumsum(0) * block_size, (1, 0))
    inside = torch.nn.functional.pad(present.to(torch.int64), (0, 1))

    def renumber(slots: Tensor) -> Tensor:
        block, place = (slots - base) // block_size, (slots - base) % block_size
        return preceding[block] + place * inside[block]

    first, stop, before = (renumber(t) for t in (visible.first, visible.stop, torch.tensor(visible.before)))
    offset = int(first[0])
    moved = replace(visible, first=first - offset, stop=stop - offset, before=int(before) - offset)
    return moved, offset, int(moved.stop[-1])


def _gather(cache: Tensor, blocks: Tensor, packed: bool) -> Tensor:
    """[KVH, n*block_size, D] of the cache's dtype."""
    count = len(blocks)
    start = int(blocks[0]) if count else 0
    if cache.shape[1] == 1 and bool((blocks == torch.arange(start, start + count, device=blocks.device)).all()):
        picked = cache[start : start + count].transpose(0, 1)
    else:
        # float8 moves as bytes: torch indexes few float8 formats on few devices.
        stored = cache.view(torch.uint8) if cache.element_size() == 1 else cache
        picked = stored.transpose(0, 1).index_select(1, blocks).view(cache.dtype)
    return (unpack_fp8_k(picked) if packed else picked).flatten(1, 2)


def _dequantise(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scale is None:
        return values.to(dtype)
    stat = stat_dtype(dtype)
    return (values.to(stat) * scale.to(stat)).to(dtype)


def _all_finite(values: Tensor) -> bool:
    low, high = values.aminmax()
    return bool(low.isfinite() & high.isfinite())

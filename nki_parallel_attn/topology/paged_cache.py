"""A paged cache as a tensor: write and read token slots, pack and unpack the fp8 layout of K.

Shapes: [num_blocks, kv_heads, block_size, D]; K packed for fp8 is [num_blocks, kv_heads, block_size // 2, D, 2], whose
last dim holds positions 2s and 2s+1 (page attention_kv_parallel_segmented_cte). Slots come from slot_mapping.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError
from nki_parallel_attn.topology.slot_mapping import SKIP_SLOT, check_slots


def write_kv_cache(cache: Tensor, new: Tensor, slots: Tensor, *, fp8_packed: bool = False) -> Tensor:
    """Write the K or V of T tokens into `cache`, in place; a token with slot -1 is not written.

    Args:
        cache: [num_blocks, kv_heads, block_size, D], or the packed form with fp8_packed.
        new: [kv_heads, T, D], the cache's dtype: rounding to it is the caller's choice.
        slots: [T] integers, block*block_size + offset.

    Returns:
        `cache`.

    Raises:
        ArgumentError: wrong shape or device, a slot outside the cache, two tokens with one slot; nothing is written.
        ArgumentTypeError: dtypes of `cache` and `new` differ.
    """
    block_size = _check_cache(cache, slots, fp8_packed)
    if new.dtype != cache.dtype:
        raise ArgumentTypeError("new", new.dtype, f"the cache's dtype {cache.dtype}")
    if new.device != cache.device:
        raise ArgumentError("new", new.device, f"the cache's device {cache.device}")
    expected = (cache.shape[1], len(slots), cache.shape[3])
    if tuple(new.shape) != expected:
        raise ArgumentError("new", tuple(new.shape), f"[kv_heads, T, D] = {expected}")
    slots = slots.to(cache.device, torch.int64)
    written = (slots != SKIP_SLOT).nonzero()[:, 0]
    index = _token_index(slots[written], block_size, fp8_packed)
    _token_view(cache, fp8_packed)[index] = _as_bytes(new)[:, written].transpose(0, 1)
    return cache


def read_kv_cache(cache: Tensor, slots: Tensor, *, fp8_packed: bool = False) -> Tensor:
    """Read T tokens from `cache`: [kv_heads, T, D] of its dtype, zeros for slot -1; the same slot may be read twice.

    Raises:
        ArgumentError: wrong shape, or a slot outside the cache.
    """
    block_size = _check_cache(cache, slots, fp8_packed, distinct=False)
    slots = slots.to(cache.device, torch.int64)
    index = _token_index(slots.clamp(min=0), block_size, fp8_packed)
    tokens = _token_view(cache, fp8_packed)[index].transpose(0, 1)
    # where, not a product: an unused slot may hold NaN.
    tokens = torch.where(
        (slots == SKIP_SLOT)[:, None], torch.zeros((), dtype=tokens.dtype, device=tokens.device), tokens
    )
    # view(dtype) cuts the gradient even where it changes nothing.
    return tokens if tokens.dtype == cache.dtype else tokens.view(cache.dtype)


def pack_fp8_k(k: Tensor) -> Tensor:
    """[..., block_size, D] to [..., block_size // 2, D, 2]: element [s, d, i] is position 2s + i.

    Raises:
        ArgumentError: an odd block_size.
    """
    if k.ndim < 2 or k.shape[-2] % 2:
        raise ArgumentError("k", tuple(k.shape), "[..., block_size, D] with an even block_size")
    return k.reshape(*k.shape[:-2], k.shape[-2] // 2, 2, k.shape[-1]).transpose(-1, -2).contiguous()


def unpack_fp8_k(packed: Tensor) -> Tensor:
    """[..., block_size // 2, D, 2] to [..., block_size, D]; the inverse of `pack_fp8_k`.

    Raises:
        ArgumentError: a last dim that is not 2.
    """
    if packed.ndim < 3 or packed.shape[-1] != 2:
        raise ArgumentError("packed", tuple(packed.shape), "[..., block_size // 2, D, 2]")
    return packed.transpose(-1, -2).flatten(-3, -2)


def _check_cache(cache: Tensor, slots: Tensor, fp8_packed: bool, distinct: bool = True) -> int:
    """Check shapes and slots; return the block size."""
    if cache.ndim != (5 if fp8_packed else 4) or (fp8_packed and cache.shape[-1] != 2):
        form = (
            "[num_blocks, kv_heads, block_size // 2, D, 2]" if fp8_packed else "[num_blocks, kv_heads, block_size, D]"
        )
        raise ArgumentError("cache", tuple(cache.shape), form)
    if slots.ndim != 1:
        raise ArgumentError("slots", tuple(slots.shape), "[T]")
    if slots.is_floating_point() or slots.dtype == torch.bool:
        raise ArgumentTypeError("slots", slots.dtype, "an integer dtype")
    block_size = cache.shape[2] * (2 if fp8_packed else 1)
    check_slots(slots.to(torch.int64), cache.shape[0] * block_size, distinct=distinct)
    return block_size


def _token_view(cache: Tensor, fp8_packed: bool) -> Tensor:
    """[num_blocks, block_size, kv_heads, D], or [num_blocks, block_size // 2, 2, kv_heads, D]: token dims first."""
    stored = _as_bytes(cache)
    return stored.permute(0, 2, 4, 1, 3) if fp8_packed else stored.permute(0, 2, 1, 3)


def _token_index(slots: Tensor, block_size: int, fp8_packed: bool) -> tuple[Tensor, ...]:
    offset = slots % block_size
    return (slots // block_size, offset // 2, offset % 2) if fp8_packed else (slots // block_size, offset)


def _as_bytes(tensor: Tensor) -> Tensor:
    """float8 as uint8: indexing moves bits, and torch indexes few float8 formats on few devices."""
    return tensor.view(torch.uint8) if tensor.dtype.is_floating_point and tensor.element_size() == 1 else tensor

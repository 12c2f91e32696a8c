"""The KV cache of decoding: quantise new tokens, read the prior in pieces, write the tokens once all else is done.

Two forms with one interface. A flat cache of the query's dtype is read in place, in pieces of which the fused call may
make a packed copy. What must be changed on the way (block tables, float8, a transposed K) goes through one scratch
buffer, which stays in the processor's cache for the fused call that follows, and in the thread for the next step.
Pieces and scratch have a fixed size: no step needs more memory for a longer context.

float8 tokens hold the e4m3 format; torch.float8_e4m3fn carries both its variants, uint8 the same bytes untyped.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nki_parallel_attn.kernels.attention_block_tkg_arguments import BlockArguments, BlockSizes
from nki_parallel_attn.kernels.float8_torch import widen
from nki_parallel_attn.kernels.online_softmax_torch import stat_dtype
from nki_parallel_attn.kernels.quantization_torch import FP8, to_fp8
from nki_parallel_attn.topology.block_tables import ABSENT
from nki_parallel_attn.topology.paged_cache import unpack_fp8_k

FP8_DTYPES = (FP8, torch.uint8)
# Slots that are read at once: K and V of 8192 x 128 in bfloat16 are 4 MiB, which a core's share of
# the last cache level holds. With fewer slots, merging takes a good part of the time that attention takes.
PIECE_SLOTS = 8192
SKIP_UPDATE = torch.iinfo(torch.uint32).max


class Piece(NamedTuple):
    """Consecutive slots: k, v [n, KVH, m, d] of the query's dtype; present [n, KVH, m] bool, None when all are."""

    k: Tensor
    v: Tensor
    present: Tensor | None = None


def quantise(tokens: Tensor, scale: Tensor, maximum: float, dtype: torch.dtype) -> Tensor:
    """clamp(tokens * scale) as float8, in a cache's dtype."""
    scaled = tokens.to(stat_dtype(tokens.dtype)) * scale.flatten()[0].to(stat_dtype(tokens.dtype))
    return to_fp8(scaled, maximum).view(dtype)


class PriorCache:
    """Reads slots of a cache as `Piece`s; slots count from 0 within a sequence.

    Attributes:
        batched: several sequences may be read at once, in place.
    """

    batched = False

    def read(self, rows: slice, start: int, stop: int, *, widened: bool = False) -> Iterator[Piece]:
        """Slots [start, stop) of the sequences `rows` (one, unless `batched`), in order.

        A piece has at most PIECE_SLOTS; over all KV heads where it lies in scratch, and must be used before the next
        one, or where it will be `widened` by the caller; else of each.
        """
        raise NotImplementedError


class FlatPrior(PriorCache):
    """[B, KVH, S_max, d], or K [B, KVH, d, S_max]."""

    def __init__(self, args: BlockArguments, dtype: torch.dtype) -> None:
        k = _typed(args.K_cache)
        self.k = k.transpose(2, 3) if args.K_cache_transposed else k
        self.v = _typed(args.V_cache)
        # The fused call takes a last dim of any stride for one of stride 1.
        dense = self.k.stride(3) == 1 and self.v.stride(3) == 1
        self.batched = dense and self.k.dtype == dtype
        self.step = max(128, PIECE_SLOTS // self.k.shape[1])
        self.scratch = None if self.batched else _scratch(self.k.shape[1], self.step, self.k.shape[3], dtype, self.k)

    def read(self, rows: slice, start: int, stop: int, *, widened: bool = False) -> Iterator[Piece]:
        step = self.step if widened or self.scratch is not None else PIECE_SLOTS
        for at in range(start, stop, step):
            end = min(at + step, stop)
            k, v = self.k[rows, :, at:end], self.v[rows, :, at:end]
            if self.scratch is not None:
                k, v = (_copy(t, kept[:, :, : end - at]) for t, kept in zip((k, v), self.scratch, strict=True))
            yield Piece(k, v)


class BlockPrior(PriorCache):
    """[num_blocks, KVH, block_len, d], or without KVH; K packed in pairs for float8; read through a block table."""

    def __init__(self, args: BlockArguments, sizes: BlockSizes, dtype: torch.dtype) -> None:
        assert args.active_blocks_table is not None and sizes.block_len is not None
        table = args.active_blocks_table.to(torch.int64)
        self.table = table if table.ndim == 3 else table[:, None]
        self.block_len, self.kv_heads, self.dim = sizes.block_len, sizes.kv_heads, sizes.head_dim
        self.k, self.v = entries(args.K_cache, args.fp8_packed), entries(args.V_cache, False)
        self.packed, self.dtype = args.fp8_packed, dtype
        self.fp8 = args.K_cache.dtype in FP8_DTYPES
        self.blocks = max(1, PIECE_SLOTS // self.kv_heads // self.block_len)
        slots = self.blocks * self.block_len
        self.scratch = _scratch(self.kv_heads, slots, self.dim, dtype, self.k)
        self.bytes = _scratch(self.kv_heads, slots, self.dim, torch.uint8, self.k)[0] if self.fp8 else self.k

    def read(self, rows: slice, start: int, stop: int, *, widened: bool = False) -> Iterator[Piece]:
        if stop <= start:
            return
        first, last = start // self.block_len, -(-stop // self.block_len)
        table = self.table[rows.start, :, first:last]
        listed = table[0]
        in_place = self.kv_heads == 1 and not self.fp8 and int(listed[0]) >= 0
        if in_place and bool((listed == torch.arange(last - first, device=table.device) + listed[0]).all()):
            # Consecutive blocks are one run of memory.
            run = slice(int(listed[0]), int(listed[0]) + last - first)
            whole = [t[run].reshape(1, 1, -1, self.dim) for t in (self.k, self.v)]
            step = self.blocks * self.block_len
            for at in range(start - first * self.block_len, stop - first * self.block_len, step):
                end = min(at + step, stop - first * self.block_len)
                yield Piece(*(t[:, :, at:end] for t in whole))
            return
        for block in range(first, last, self.blocks):
            numbers = table[:, block - first : block - first + self.blocks]
            low = max(start - block * self.block_len, 0)
            high = min(stop - block * self.block_len, numbers.shape[1] * self.block_len)
            absent = numbers == ABSENT
            present = None
            if bool(absent.any()):
                present = (~absent).repeat_interleave(self.block_len, 1)[None, :, low:high]
            index = numbers.clamp(min=0).reshape(-1)
            k = self._gather(self.k, index, self.scratch[0], self.packed)
            v = self._gather(self.v, index, self.scratch[1], False)
            yield Piece(k[:, :, low:high], v[:, :, low:high], present)

    def _gather(self, source: Tensor, index: Tensor, scratch: Tensor, packed: bool) -> Tensor:
        """[1, KVH, blocks*block_len, d] of the query's dtype, in scratch."""
        elements = len(index) * self.block_len * self.dim
        shape = (1, self.kv_heads, -1, self.dim)
        flat = source.view(len(source), -1)
        target = scratch.view(-1)[:elements].view(len(index), -1)
        if not self.fp8:
            return torch.index_select(flat, 0, index, out=target).view(shape)
        picked = torch.index_select(flat, 0, index, out=self.bytes.view(-1)[:elements].view(len(index), -1))
        blocks = picked.view(FP8).view(len(index), *source.shape[1:])
        spread = target.view(len(index), self.block_len, self.dim)
        return widen(unpack_fp8_k(blocks) if packed else blocks, spread).view(shape)


def write_flat(args: BlockArguments, index: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k and v [B, KVH, S, d], of the cache's dtype, at start slots `index` [B] int64, uint32 maximum to skip."""
    rows = (index != SKIP_UPDATE).nonzero()[:, 0]
    slots = index[rows][:, None] + torch.arange(k.shape[2], device=index.device)
    k_cache = args.K_cache.transpose(2, 3) if args.K_cache_transposed else args.K_cache
    for cache, new in ((k_cache, k), (args.V_cache, v)):
        _as_bytes(cache).transpose(1, 2)[rows[:, None], slots] = _as_bytes(new)[rows].transpose(1, 2)


def write_blocks(args: BlockArguments, sizes: BlockSizes, index: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k and v [B, KVH, S, d] at slots `index` [B, KVH, S] int64, entry*block_len + offset."""
    assert sizes.block_len is not None
    written = index != SKIP_UPDATE
    entry, offset = index[written] // sizes.block_len, index[written] % sizes.block_len
    keys = entries(args.K_cache, args.fp8_packed)
    if args.fp8_packed:
        keys[entry, offset // 2, :, offset % 2] = _as_bytes(k)[written]
    else:
        keys[entry, offset] = _as_bytes(k)[written]
    entries(args.V_cache, False)[entry, offset] = _as_bytes(v)[written]


def entries(cache: Tensor, packed: bool) -> Tensor:
    """A view with one leading dim, the table's entries: block, or block*kv_heads + head; float8 as bytes."""
    cache = _as_bytes(cache)
    return cache if cache.ndim == (4 if packed else 3) else cache.view(-1, *cache.shape[2:])


def _as_bytes(tensor: Tensor) -> Tensor:
    """torch indexes few float8 formats on few devices."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def _typed(cache: Tensor) -> Tensor:
    return cache.view(FP8) if cache.dtype == torch.uint8 else cache


def _copy(source: Tensor, target: Tensor) -> Tensor:
    return widen(source, target) if source.dtype == FP8 else target.copy_(source)


class _Scratch(threading.local):
    """Memory of this thread's last step on the CPU: fresh pages at every step cost more than the copy into them."""

    def __init__(self) -> None:
        self.by_dtype: dict[torch.dtype, Tensor] = {}


_kept = _Scratch()


def _scratch(kv_heads: int, slots: int, dim: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    """[2, 1, kv_heads, slots, dim], of which a thread uses one of a dtype at a time."""
    shape = (2, 1, kv_heads, slots, dim)
    if like.device.type != "cpu":  # other devices' allocators keep memory themselves, in step with their streams
        return torch.empty(shape, dtype=dtype, device=like.device)
    elements = math.prod(shape)
    kept = _kept.by_dtype.get(dtype)
    if kept is None or len(kept) < elements:
        with torch.inference_mode(False):  # what is made in inference mode cannot be written outside
            kept = _kept.by_dtype[dtype] = torch.empty(elements, dtype=dtype)
    return kept[:elements].view(shape)

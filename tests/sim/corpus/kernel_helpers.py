"""What many corpus kernels begin with: a tile that is written, and an array of HBM brought into SBUF."""

from __future__ import annotations

from typing import Any

from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl


def tile(shape: tuple[int, ...], dtype: Any = nl.float32, value: float = 1, buffer: Any = nl.sbuf) -> Any:
    """A tile filled with one value."""
    t = nl.ndarray(shape, dtype=dtype, buffer=buffer)
    nisa.memset(dst=t, value=value)
    return t


def load(x: Any, dtype: Any = None) -> Any:
    """x in SBUF, cast on the way when a dtype is given."""
    t = nl.ndarray(x.shape, dtype=dtype or x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=t, src=x)
    return t


def store(t: Any) -> Any:
    """A new shared HBM tensor with the tile's content."""
    out = nl.ndarray(t.shape, dtype=t.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=t)
    return out


def evict(p: Any, dtype: Any = nl.float32) -> Any:
    """A PSUM tile copied to SBUF and then to shared HBM."""
    t = nl.ndarray(p.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=t, src=p)
    return store(t)

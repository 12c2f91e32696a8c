"""Tiled matrix multiplication, K accumulated in PSUM."""

from __future__ import annotations

import nki_parallel_attn.sim.isa as nisa
import nki_parallel_attn.sim.language as nl
from nki_parallel_attn.sim import jit


@jit
def tiled_matmul(lhs_t, rhs):
    """`lhs_t` [K, M] transposed times `rhs` [K, N]; K and M multiples of 128, N of 512. LNC cores divide the rows."""
    k_size, m_size = lhs_t.shape
    n_size = rhs.shape[1]
    tile_m, tile_k, tile_n = nl.tile_size.gemm_stationary_fmax, nl.tile_size.pmax, nl.tile_size.gemm_moving_fmax
    out = nl.ndarray((m_size, n_size), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    for m in range(nl.program_id(0), m_size // tile_m, nl.num_programs(0)):
        for n in range(n_size // tile_n):
            acc = nl.ndarray((tile_m, tile_n), dtype=nl.float32, buffer=nl.psum)
            for k in range(k_size // tile_k):
                left = nl.ndarray((tile_k, tile_m), dtype=lhs_t.dtype, buffer=nl.sbuf)
                right = nl.ndarray((tile_k, tile_n), dtype=rhs.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=left, src=lhs_t[nl.ds(k * tile_k, tile_k), nl.ds(m * tile_m, tile_m)])
                nisa.dma_copy(dst=right, src=rhs[nl.ds(k * tile_k, tile_k), nl.ds(n * tile_n, tile_n)])
                nisa.nc_matmul(dst=acc, stationary=left, moving=right)
            result = nl.ndarray((tile_m, tile_n), dtype=out.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=result, src=acc)
            nisa.dma_copy(dst=out[nl.ds(m * tile_m, tile_m), nl.ds(n * tile_n, tile_n)], src=result)
    return out

"""Causal flash attention: 128 x 512 score tiles, online softmax, one head after the other."""

from __future__ import annotations

import math

import nki_parallel_attn.sim.isa as nisa
import nki_parallel_attn.sim.language as nl
from nki_parallel_attn.sim import jit

Q_TILE = 128
K_TILE = 512
FP32_MIN = -3.4028235e38


@jit
def flash_attention(q_t, k_t, v):
    """Attention of `q_t`, `k_t` [heads, d, seqlen] over `v` [heads, seqlen, d], d <= 128; to [heads, seqlen, d].

    LNC cores divide the heads.
    """
    heads, d, seqlen = q_t.shape
    out = nl.ndarray((heads, seqlen, d), dtype=v.dtype, buffer=nl.shared_hbm)
    for head in range(nl.program_id(0), heads, nl.num_programs(0)):
        k_sb = nl.ndarray((d, seqlen), dtype=k_t.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=k_sb, src=k_t[head])
        v_sb = nl.ndarray((Q_TILE, seqlen // Q_TILE, d), dtype=v.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=v_sb, src=v[head].reshape_dim(0, (seqlen // Q_TILE, Q_TILE)).permute((1, 0, 2)))
        for i in range(seqlen // Q_TILE):
            q_sb = nl.ndarray((d, Q_TILE), dtype=q_t.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=q_sb, src=q_t[head, :, nl.ds(i * Q_TILE, Q_TILE)])
            tile = attend(q_sb, k_sb, v_sb, i * Q_TILE)
            nisa.dma_copy(dst=out[head, nl.ds(i * Q_TILE, Q_TILE), :], src=tile)
    return out


def attend(q_sb, k_sb, v_sb, q_start):
    """One tile of queries, at positions q_start onwards, against every key up to its own position."""
    d = q_sb.shape[0]
    top = nl.full((Q_TILE, 1), FP32_MIN, dtype=nl.float32, buffer=nl.sbuf)
    total = nl.zeros((Q_TILE, 1), dtype=nl.float32, buffer=nl.sbuf)
    acc = nl.zeros((Q_TILE, d), dtype=nl.float32, buffer=nl.sbuf)
    for k_start in range(0, q_start + Q_TILE, K_TILE):
        scores_psum = nl.ndarray((Q_TILE, K_TILE), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=scores_psum, stationary=q_sb, moving=k_sb[:, nl.ds(k_start, K_TILE)])
        scores = nl.ndarray((Q_TILE, K_TILE), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=scores, data=scores_psum, op0=nl.multiply, operand0=1.0 / math.sqrt(d))
        if k_start + K_TILE > q_start:
            nisa.affine_select(
                dst=scores, pattern=[[-1, K_TILE]], channel_multiplier=1, offset=q_start - k_start, on_true_tile=scores,
                on_false_value=FP32_MIN, cmp_op=nl.greater_equal,
            )  # fmt: skip
        tile_top = nl.ndarray((Q_TILE, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=tile_top, op=nl.maximum, data=scores, axis=1)
        new_top = nl.ndarray((Q_TILE, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=new_top, data1=top, data2=tile_top, op=nl.maximum)
        negated = nl.ndarray((Q_TILE, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=negated, data=new_top, op0=nl.multiply, operand0=-1.0)
        rescale = nl.ndarray((Q_TILE, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=rescale, op=nl.exp, data=top, bias=negated)
        weights = nl.ndarray((Q_TILE, K_TILE), dtype=nl.float32, buffer=nl.sbuf)
        tile_total = nl.ndarray((Q_TILE, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(
            dst=weights, op=nl.exp, data=scores, bias=negated, reduce_op=nl.add,
            reduce_cmd=nisa.reduce_cmd.reset_reduce, reduce_res=tile_total,
        )  # fmt: skip
        nisa.tensor_scalar(dst=total, data=total, op0=nl.multiply, operand0=rescale, op1=nl.add, operand1=tile_total)
        nisa.tensor_scalar(dst=acc, data=acc, op0=nl.multiply, operand0=rescale)
        part = nl.ndarray((Q_TILE, d), dtype=nl.float32, buffer=nl.psum)
        for j in range(K_TILE // Q_TILE):
            transposed_psum = nl.ndarray((Q_TILE, Q_TILE), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_transpose(dst=transposed_psum, data=weights[:, nl.ds(j * Q_TILE, Q_TILE)])
            transposed = nl.ndarray((Q_TILE, Q_TILE), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=transposed, src=transposed_psum)
            nisa.nc_matmul(
                dst=part, stationary=transposed, moving=v_sb[:, k_start // Q_TILE + j, :], accumulate=(j > 0)
            )
        nisa.tensor_tensor(dst=acc, data1=acc, data2=part, op=nl.add)
        top = new_top
    inverse = nl.ndarray((Q_TILE, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=inverse, data=total, op0=nl.reciprocal, operand0=None)
    result = nl.ndarray((Q_TILE, d), dtype=v_sb.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=acc, op0=nl.multiply, operand0=inverse)
    return result

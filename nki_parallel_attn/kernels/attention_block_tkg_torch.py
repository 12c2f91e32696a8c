"""attention_block_tkg in torch: X -> QKV -> norms and RoPE -> attention over cache and active tokens -> projection.

    1. projection            decode_projection_torch.py
    2. norms, RoPE, float8   here, rope_torch.py, decode_cache_torch.py
    3. KVDP, CP              decode_collectives_torch.py
    4. attention             decode_attention_torch.py
    5. way back, projection
    6. cache update          last, after everything that can fail has passed on every rank

Precision: projections, Q and K after norms and RoPE, partial outputs and the attention output are rounded to X's dtype,
everything between in float32. The exchanges are passed in, so that ranks may be processes or threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nki_parallel_attn.kernels import decode_attention_torch as attention
from nki_parallel_attn.kernels import decode_cache_torch as cache
from nki_parallel_attn.kernels import decode_collectives_torch as collectives
from nki_parallel_attn.kernels import decode_projection_torch as projection
from nki_parallel_attn.kernels.attention_block_tkg_arguments import BlockArguments, BlockSizes
from nki_parallel_attn.kernels.collectives_torch import Exchange
from nki_parallel_attn.kernels.decode_projection_torch import rms_norm
from nki_parallel_attn.kernels.online_softmax_torch import stat_dtype
from nki_parallel_attn.kernels.quantization_torch import FP8, fp8_max
from nki_parallel_attn.kernels.rope_torch import apply_rope
from nki_parallel_attn.topology.types import KVDPCollectiveMode

Output = Tensor | tuple[Tensor, ...]


@torch.no_grad()
def attention_block_tkg(
    args: BlockArguments, sizes: BlockSizes, kvdp_exchange: Exchange | None, cp_exchange: Exchange | None
) -> tuple[Output, Tensor, Tensor]:
    """The page's three results; arguments are checked. An exchange is None where its degree is 1."""
    # Open before the first product: peers already wait, and must hear of whatever fails here.
    with collectives.open_groups(kvdp_exchange, cp_exchange) as (kvdp, cp):
        q, k, v = new_tokens(args, sizes)
        if kvdp is not None:
            rows = slice(kvdp.rank * sizes.batch_attn, (kvdp.rank + 1) * sizes.batch_attn)
            k, v = k[rows], v[rows]
        fp8 = args.k_scale is not None
        if args.k_scale is not None and args.v_scale is not None:
            maximum = fp8_max(args.dtype_mode, args.target)
            k = cache.quantise(k, args.k_scale, maximum, args.K_cache.dtype)
            v = cache.quantise(v, args.v_scale, maximum, args.V_cache.dtype)
        out = q
        if not args.skip_attention:
            mode = args.KVDP_collective_mode or KVDPCollectiveMode.ALL_GATHER_SLICE
            if kvdp is not None:
                q = collectives.heads_for_batch(q, kvdp, mode)
            if cp is not None:
                q = collectives.gather_heads(q, cp)
            active_k, active_v = (t.view(FP8).to(q.dtype) if fp8 else t for t in (k, v))
            partial, lse = attend(q, active_k, active_v, args, sizes)
            out = collectives.combine(partial, lse, args.sink, q.dtype, cp)
            if kvdp is not None:
                out = collectives.batch_for_heads(out, kvdp, mode)
        result = projection.project_out(out, args, sizes)
        if args.update_cache:
            collectives.wait_for_all(kvdp_exchange, cp_exchange)
    if not args.update_cache:
        new_k = k.permute(3, 0, 1, 2)
        return result, (new_k.squeeze(2) if sizes.kv_heads == 1 else new_k).contiguous(), v.contiguous()
    assert args.kv_cache_update_idx is not None
    index = args.kv_cache_update_idx.to(torch.int64)
    if sizes.block_len is None:
        cache.write_flat(args, index[:, 0], k, v)
    else:
        cache.write_blocks(args, sizes, index.view(k.shape[:3]), k, v)
    return result, args.K_cache, args.V_cache


def new_tokens(args: BlockArguments, sizes: BlockSizes) -> tuple[Tensor, Tensor, Tensor]:
    """Q [B, q_heads, S_tkg, d], K and V [B, kv_heads, S_tkg, d] of the active tokens, ready for attention."""
    q, k, v = projection.project_qkv(projection.hidden_states(args, sizes), args, sizes)
    gammas = (
        (args.rmsnorm_QK_pre_rope_W_Q, args.rmsnorm_QK_post_rope_W_Q),
        (args.rmsnorm_QK_pre_rope_W_K, args.rmsnorm_QK_post_rope_W_K),
    )
    q, k = (_norms_and_rope(t, *gamma, args) for t, gamma in zip((q, k), gammas, strict=True))
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, args: BlockArguments, sizes: BlockSizes) -> tuple[Tensor, Tensor]:
    """Attention of all gathered heads to this rank's keys.

    Args:
        q: [B_attn, q_heads_attn, S_tkg, d]; k, v: [B_attn, kv_heads, S_tkg, d], the active tokens.

    Returns:
        [B_attn, q_heads_attn, S_tkg, d] of `stat_dtype`, normalised, and its log-sum-exp [B_attn, q_heads_attn, S_tkg].
    """
    assert args.attention_mask is not None
    scale = softmax_scale(args, sizes)
    rows = attention.fold_heads(q, sizes.kv_heads)
    state = attention.RunningSoftmax(rows)
    prior: cache.PriorCache
    prior = cache.FlatPrior(args, q.dtype) if sizes.block_len is None else cache.BlockPrior(args, sizes, q.dtype)
    mask = args.attention_mask != 0
    if args.pos_ids is not None:
        stop = args.pos_ids[:, 0].cpu().to(torch.int64)
        starts = args.swa_start_pos_ids
        first = stop.new_zeros(len(stop), 1) if starts is None else starts.cpu().to(torch.int64)
        attention.attend_prefix(state, rows, prior, first, stop, scale)
    else:
        mask = mask.movedim(-1, 0) if args.is_qk_swapped else mask
        attention.attend_full_mask(state, rows, prior, mask[: -sizes.tokens], scale)
    attention.attend_active(state, rows, k, v, mask[-sizes.tokens :], scale)
    return state.out.view(q.shape), state.lse.view(q.shape[:3])


def softmax_scale(args: BlockArguments, sizes: BlockSizes) -> float:
    """As given, else 1/sqrt(d), divided by k_scale for a float8 cache."""
    if args.softmax_scale is not None:
        return args.softmax_scale
    scale: float = sizes.head_dim**-0.5
    return scale if args.k_scale is None else scale / float(args.k_scale.flatten()[0])


def _norms_and_rope(x: Tensor, pre: Tensor | None, post: Tensor | None, args: BlockArguments) -> Tensor:
    """One rounding, at the end."""
    rounded, x = x.dtype, x.to(stat_dtype(x.dtype))
    if args.rmsnorm_QK_pre_rope_enabled:
        x = rms_norm(x, pre, args.rmsnorm_QK_pre_rope_eps)
    if args.cos is not None and args.sin is not None:
        x = apply_rope(x, args.cos, args.sin, args.rope_contiguous_layout)
    if args.rmsnorm_QK_post_rope_enabled:
        x = rms_norm(x, post, args.rmsnorm_QK_post_rope_eps)
    return x.to(rounded)

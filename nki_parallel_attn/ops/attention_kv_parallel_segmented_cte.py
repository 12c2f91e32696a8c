"""attention_kv_parallel_segmented_cte: prefill attention over a KV cache that is dealt over the ranks of a group.

The signature and shapes are the reference page's. This module makes sure that all ranks go on or none does, and hands
over to a backend; what is wrong with arguments is in attention_kv_parallel_segmented_cte_checks.py.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch.distributed as dist
from torch import Tensor

from nki_parallel_attn.backends import Backend, backend_name, load_backend
from nki_parallel_attn.ops.attention_kv_parallel_segmented_cte_checks import (
    PrefillArguments,
    check_first_shard,
    ranks_of_list,
    world_rank,
)
from nki_parallel_attn.ops.rank_agreement import CheckRanks, agree, check_check_ranks
from nki_parallel_attn.sim.replica_group import ReplicaGroup


def attention_kv_parallel_segmented_cte(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    kvp_q_offset: Tensor,
    replica_groups: ReplicaGroup,
    group_size: int,
    block_size: int,
    seg_size: int,
    scale: float = 1.0,
    global_q_offset: int = 0,
    tp_out: bool = False,
    sliding_window: int = 0,
    kvp_rank_id: Tensor | None = None,
    kvp_group_size: int = 0,
    apc_mode: bool = False,
    valid_num_prior_tokens: Tensor | None = None,
    fp8_packed: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    backend: Backend = "auto",
    lnc: int = 1,
    target: str = "trn2",
    group: dist.ProcessGroup | None = None,
    check_ranks: CheckRanks | None = None,
) -> Tensor:
    """Causal attention of this rank's Q heads over a sequence whose KV cache is shared by a group of G ranks.

    Q is gathered over the group, each rank attends all heads to its own KV, and the partial outputs are exchanged and
    merged by log-sum-exp. A key is visible when its position is at or before the query's and, with a sliding window W,
    among the last W (the query's own included). A query that sees nothing at all gives 0. Differentiable in q, k_cache
    and v_cache (torch backend); all ranks of the group then call backward together.

    Args:
        q: [q_heads_per_rank, S, D] bfloat16, float16, float32 or float64; S a multiple of seg_size (pad it: padding
            writes no KV), D at most 128.
        k_cache: [num_blocks, num_kv_heads, block_size, D] of q's dtype or float8_e4m3fn, or with fp8_packed
            [num_blocks, num_kv_heads, block_size // 2, D, 2] float8_e4m3fn, whose last dim holds positions 2s and 2s+1.
            Head h of the gathered Q reads KV head h // (total_heads // num_kv_heads).
        v_cache: [num_blocks, num_kv_heads, block_size, D] of q's dtype or float8_e4m3fn.
        block_tables: [1, max_blocks] int32. Entry j is the physical block of local block j; -1 means absent. Longer
            than what is visible is fine, shorter is an error; contiguous tables hold no block beyond the shard. On sim
            and neuron an absent block that queries see counts for the softmax's shift as a score of 0, with weight 0:
            where all scaled scores of a row are below about -40 it loses precision (docs/kv_parallel_prefill.md).
        kvp_q_offset: [1, 1] int32. Contiguous: -rank_id * local_kv_len + global_q_offset, so that local slot j is
            visible to Q token t iff j <= kvp_q_offset + t. Round-robin: the position of Q token 0.
        replica_groups: one list of it holds this rank (ascending world ranks).
        group_size: G, the length of that list.
        block_size: tokens of a block.
        seg_size: tokens of a segment, a multiple of block_size. Never changes the result.
        scale: multiplies Q.K^T.
        global_q_offset: position of Q token 0 as a compile-time value; 0 in apc_mode.
        tp_out: return [q_heads_per_rank, D, S].
        sliding_window: W in tokens; 0 for none.
        kvp_rank_id: [1, 1] int32, this rank's index in its list; required in round-robin mode.
        kvp_group_size: R > 0 turns on round-robin mode, where rank r holds global blocks r, r+R, r+2R, ...; R == G.
        apc_mode: the prior length is known at run time only: valid_num_prior_tokens is required, round-robin only.
        valid_num_prior_tokens: [1, 1] int32, local tokens in blocks that lie wholly at or before Q token 0, whatever
            the window; a multiple of block_size.
        fp8_packed: k_cache has the packed layout.
        k_scale: [128, 1], K[..., d] = k_cache[..., d] * k_scale[d, 0]. Rounded to q's dtype afterwards.
        v_scale: [128, 1], one repeated value that multiplies v_cache. Rounded to q's dtype afterwards.
        backend: "auto" is "neuron" on a Neuron device, else "torch"; NKI_PARALLEL_ATTN_BACKEND overrides "auto".
        lnc: logical core size, 1 or 2; of no effect on torch.
        target: "trn2" or "trn3"; of no effect on torch.
        group: a torch process group of exactly this rank's list, instead of one made from replica_groups.
        check_ranks: "always" (default for CPU tensors) has the ranks of the group compare notes before the first
            collective, so that a bad argument on one raises on all; "first" (default elsewhere) does so once for each
            set of arguments; "never" leaves peers of a failing rank waiting for their timeout. The same on all ranks:
            those that compare wait for those that do not.

    Returns:
        [q_heads_per_rank, S, D], or [q_heads_per_rank, D, S] with tp_out, q's dtype. A query that sees a slot holding a
        NaN or an infinity gives NaN; slots that no query sees have no effect.

    Raises:
        ArgumentError, ArgumentTypeError: a bad argument on this rank.
        PeerError: a bad argument on another rank, or a rank that did not arrive in time.
        RankMismatchError: arguments that must be equal on all ranks are not.
        UnsupportedFeatureError, BackendUnavailableError: the backend cannot do this, or is not installed.

    Source: API reference page attention_kv_parallel_segmented_cte; docs/kv_parallel_prefill.md has what it leaves open.
    """
    call = PrefillArguments(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=block_tables,
        kvp_q_offset=kvp_q_offset,
        replica_groups=replica_groups,
        group_size=group_size,
        block_size=block_size,
        seg_size=seg_size,
        scale=scale,
        global_q_offset=global_q_offset,
        tp_out=tp_out,
        sliding_window=sliding_window,
        kvp_rank_id=kvp_rank_id,
        kvp_group_size=kvp_group_size,
        apc_mode=apc_mode,
        valid_num_prior_tokens=valid_num_prior_tokens,
        fp8_packed=fp8_packed,
        k_scale=k_scale,
        v_scale=v_scale,
        lnc=lnc,
        target=target,
        group=group,
    )
    ranks: tuple[int, ...] | None = None
    shared: dict[str, object] = {}
    partly_known: dict[str, object] = {}
    error: Exception | None = None
    module: Any = None
    if check_ranks is None:
        check_ranks = "always" if not isinstance(q, Tensor) or q.device.type == "cpu" else "first"
    # Whatever is wrong here, the peers must hear of it.
    try:
        ranks = ranks_of_list(replica_groups)
        check_check_ranks(check_ranks)
        call.check(ranks)
        name = backend_name(backend, q)
        module = load_backend(name)
        shared = {**call.shared(ranks), "backend": name, "check_ranks": check_ranks}
        partly_known = call.partly_known(ranks.index(world_rank()))
    except Exception as problem:
        error = problem
    agree("attention_kv_parallel_segmented_cte", ranks, shared, error, check_ranks, partly_known, check_first_shard)
    assert ranks is not None
    arguments = {field.name: getattr(call, field.name) for field in fields(call)}
    out: Tensor = module.attention_kv_parallel_segmented_cte(**arguments, ranks=ranks, index=ranks.index(world_rank()))
    return out

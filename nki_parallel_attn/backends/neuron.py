"""Backend "neuron": the NKI kernels in kernels/, compiled and run on device by the nki package. Never run so far."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from nki_parallel_attn.backends.nki_binding import compiled
from nki_parallel_attn.backends.nki_limits import refuse_what_nki_lacks
from nki_parallel_attn.errors import UnsupportedFeatureError
from nki_parallel_attn.kernels.output_projection_cte_arguments import ProjectionArguments, kernel_arguments
from nki_parallel_attn.nki import require_nki
from nki_parallel_attn.sim.replica_group import ReplicaGroup
from nki_parallel_attn.topology.types import AttentionLayout


def attention_kv_parallel_segmented_cte(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    kvp_q_offset: Tensor,
    replica_groups: ReplicaGroup,
    *,
    lnc: int,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    target: str,
    group: dist.ProcessGroup | None,
    ranks: tuple[int, ...],
    index: int,
    **arguments: object,
) -> Tensor:
    """Checked arguments; the target is the device, and the collectives are the kernel's own.

    Raises:
        UnsupportedFeatureError: float64, or a gradient is asked for.
    """
    require_nki()
    refuse_what_nki_lacks(q, k_cache, v_cache)
    from nki_parallel_attn.kernels.attention_kv_parallel_segmented_cte import attention_kv_parallel_segmented_cte
    from nki_parallel_attn.nki import ncc

    out: Tensor = compiled(attention_kv_parallel_segmented_cte, lnc)(
        q,
        k_cache,
        v_cache,
        block_tables,
        kvp_q_offset,
        ncc.ReplicaGroup([list(ranks) for ranks in replica_groups.groups]),
        k_scale=None if k_scale is None else k_scale.float(),
        v_scale=None if v_scale is None else v_scale.float(),
        **arguments,
    )
    return out


def attention_const_max(
    q_hbm: Tensor,
    k_hbm: Tensor,
    v_hbm: Tensor,
    softmax_max: float | Tensor,
    softmax_scale: float,
    q_layout: AttentionLayout,
    k_layout: AttentionLayout,
    *,
    lnc: int,
    **_: object,
) -> Tensor:
    """Checked arguments, the scale resolved; the target is the device."""
    require_nki()
    from nki_parallel_attn.kernels.attention_const_max import attention_const_max as const_max

    out: Tensor = compiled(const_max, lnc)(q_hbm, k_hbm, v_hbm, softmax_max, softmax_scale, q_layout, k_layout)
    return out


def output_projection_cte(args: ProjectionArguments) -> Tensor:
    """Checked arguments; the target is the device."""
    require_nki()
    from nki_parallel_attn.kernels.output_projection_cte import output_projection_cte as project
    from nki_parallel_attn.nki import nl

    # A dtype that is no tensor's has to be NKI's.
    named = replace(args, output_dtype=getattr(nl, str(args.output_dtype).removeprefix("torch.")))
    out: Tensor = compiled(project, args.lnc)(*kernel_arguments(named))
    return out


def attention_block_tkg(*_: object, **__: object) -> tuple[Tensor, Tensor, Tensor]:
    require_nki()
    raise UnsupportedFeatureError("attention_block_tkg has no NKI kernel yet; use backend='torch'")

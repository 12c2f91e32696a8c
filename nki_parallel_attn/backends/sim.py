"""Backend "sim": the NKI kernels in kernels/, run by the interpreter in sim/.

Each process is its rank of the simulated world, and the ranks of a replica group meet through the torch process group;
without one, this process is a world of one rank. All ranks of the world launch the same kernels in the same order, as
on a device.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from nki_parallel_attn.backends.nki_binding import simulated
from nki_parallel_attn.backends.nki_limits import refuse_what_nki_lacks
from nki_parallel_attn.errors import UnsupportedFeatureError
from nki_parallel_attn.kernels.output_projection_cte_arguments import ProjectionArguments, kernel_arguments
from nki_parallel_attn.sim import simulate
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
    target: str,
    group: dist.ProcessGroup | None,
    ranks: tuple[int, ...],
    index: int,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    **arguments: object,
) -> Tensor:
    """Checked arguments; `ranks` is this rank's list and `index` its place there. `group` has nothing to add.

    Raises:
        UnsupportedFeatureError: float64, or a gradient is asked for.
    """
    from nki_parallel_attn.kernels.attention_kv_parallel_segmented_cte import attention_kv_parallel_segmented_cte

    refuse_what_nki_lacks(q, k_cache, v_cache)
    out: Tensor = simulate(simulated(attention_kv_parallel_segmented_cte), lnc=lnc, target=target)(
        q,
        k_cache,
        v_cache,
        block_tables,
        kvp_q_offset,
        replica_groups,
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
    target: str,
) -> Tensor:
    """Checked arguments, the scale resolved. Without collectives: each rank runs it for itself."""
    from nki_parallel_attn.kernels.attention_const_max import attention_const_max

    arguments = (q_hbm, k_hbm, v_hbm, softmax_max, softmax_scale, q_layout, k_layout)
    out: Tensor = simulate(simulated(attention_const_max), world_size=1, lnc=lnc, target=target)([arguments])[0]
    return out


def output_projection_cte(args: ProjectionArguments) -> Tensor:
    """Checked arguments. Without collectives: each rank runs it for itself."""
    from nki_parallel_attn.kernels.output_projection_cte import output_projection_cte

    run = simulate(simulated(output_projection_cte), world_size=1, lnc=args.lnc, target=args.target)
    out: Tensor = run([kernel_arguments(args)])[0]
    return out


def attention_block_tkg(*_: object, **__: object) -> tuple[Tensor, Tensor, Tensor]:
    raise UnsupportedFeatureError("attention_block_tkg has no NKI kernel yet; use backend='torch'")

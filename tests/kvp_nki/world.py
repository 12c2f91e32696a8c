"""The NKI kernel on all ranks of a prefill case in one process, every check on, against the dense oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nki_parallel_attn.kernels.attention_kv_parallel_segmented_cte import attention_kv_parallel_segmented_cte
from nki_parallel_attn.sim import simulate
from tests.kvp.case import Case
from tests.tolerance import attention_tolerance


def run(
    arguments: list[dict[str, Any]], *, lnc: int = 1, target: str = "trn2", seed: int | None = None
) -> list[Tensor]:
    """Each rank's output from each rank's arguments."""
    world = simulate(attention_kv_parallel_segmented_cte, world_size=len(arguments), lnc=lnc, target=target, seed=seed)
    return world(arguments)


def deviation(case: Case, outs: list[Tensor]) -> float:
    """Largest distance from the oracle over the real queries of all heads; NaN if there is one."""
    for out in outs:
        assert out.dtype == case.dtype
    out = torch.cat([out.transpose(1, 2) for out in outs] if case.tp_out else outs)
    assert out.shape == case.q.shape
    return float((out[:, : case.rows - case.padding].double() - case.expected()).abs().max())


def check(case: Case, *, lnc: int = 1, target: str = "trn2", seed: int | None = None, **overrides: Any) -> None:
    """Run the case and compare."""
    outs = run([case.arguments(rank) | overrides for rank in range(case.ranks)], lnc=lnc, target=target, seed=seed)
    assert deviation(case, outs) <= attention_tolerance(case.dtype, case.v, case.head_dim), case

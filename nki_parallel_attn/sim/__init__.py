"""A simulator of NKI with collectives. It imports nothing of the rest of the project.

    from nki_parallel_attn.sim import simulate
    import nki_parallel_attn.sim.language as nl
    import nki_parallel_attn.sim.isa as nisa

The parts that need torch are imported when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import (
    CapacityError,
    DeadlockError,
    DivergenceError,
    NkiValidationError,
    OutOfBoundsError,
    RaceError,
    ReplicaGroupError,
    UninitializedReadError,
    UnsupportedInstructionError,
)
from .replica_group import ReplicaGroup, rg_partition_op

if TYPE_CHECKING:
    from .arguments import ShapeOnly
    from .core import Checks
    from .kernel import jit
    from .profiling import profile
    from .report import CostReport
    from .serve import as_nki
    from .simulation import simulate

__all__ = [
    "CapacityError",
    "Checks",
    "CostReport",
    "DeadlockError",
    "DivergenceError",
    "NkiValidationError",
    "OutOfBoundsError",
    "RaceError",
    "ReplicaGroup",
    "ReplicaGroupError",
    "ShapeOnly",
    "UninitializedReadError",
    "UnsupportedInstructionError",
    "as_nki",
    "jit",
    "profile",
    "rg_partition_op",
    "simulate",
]

_LAZY = {
    "Checks": "core",
    "CostReport": "report",
    "ShapeOnly": "arguments",
    "as_nki": "serve",
    "jit": "kernel",
    "profile": "profiling",
    "simulate": "simulation",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value

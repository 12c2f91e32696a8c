"""The table of broken kernels of one core: each breaks one documented rule, on the line marked `# <- breaks`.

A kernel without a marker breaks its rule when it returns. Rules: docs/simulator_rules.md. Kernels of several cores and
ranks are in broken_cores.py.
"""

from __future__ import annotations

from . import broken_dma, broken_engines, broken_memory, broken_tensor_engine
from .cases import Case

BROKEN: list[Case] = [
    *broken_memory.CASES,
    *broken_engines.CASES,
    *broken_tensor_engine.CASES,
    *broken_dma.CASES,
]

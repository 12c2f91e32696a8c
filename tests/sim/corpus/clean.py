"""The table of correct kernels, on which nothing may be reported; each reaches a limit that a broken one passes."""

from __future__ import annotations

from . import clean_compute, clean_cores
from .cases import Case

CLEAN: list[Case] = [*clean_compute.CASES, *clean_cores.CASES]

"""Errors of the simulator, and the root of the package's hierarchy.

Every error is also the builtin exception that a Python user would catch (ValueError, IndexError, RuntimeError ...), so
code that does not know this package still handles it. They live here because the simulator imports nothing else of the
project; `nki_parallel_attn.errors` re-exports them.
"""

from __future__ import annotations


class NkiParallelAttnError(Exception):
    """Root of every error this package raises."""


class ReplicaGroupError(NkiParallelAttnError, ValueError):
    """A replica group overlaps, has gaps, has lists of unequal size, or names a rank outside the world."""


class NkiValidationError(NkiParallelAttnError, ValueError):
    """A kernel broke a rule of the hardware.

    Attributes:
        rule: short stable name of the rule, e.g. "partition-limit".
        location: "file:line" in the kernel, or None when the call did not come from one.
    """

    def __init__(self, message: str, *, rule: str, location: str | None = None) -> None:
        self.rule = rule
        self.location = location
        where = f"{location}: " if location else ""
        super().__init__(f"{where}[{rule}] {message}")


class UninitializedReadError(NkiValidationError):
    """An instruction read an element that nothing had written."""


class OutOfBoundsError(NkiValidationError, IndexError):
    """An access reached outside its tensor."""


class CapacityError(NkiValidationError, MemoryError):
    """SBUF, PSUM or HBM of the target is full; the message holds the allocation map."""


class RaceError(NkiValidationError, RuntimeError):
    """Two cores, or a core and a collective, touched the same bytes without synchronisation."""


class DivergenceError(NkiParallelAttnError, RuntimeError):
    """Ranks did not reach the same collective; the message names ranks, calls and lines."""


class DeadlockError(DivergenceError):
    """Every rank or core waits for another one."""


class UnsupportedInstructionError(NkiParallelAttnError, NotImplementedError):
    """An instruction, or a form of it, that the simulator does not implement; the message names it."""

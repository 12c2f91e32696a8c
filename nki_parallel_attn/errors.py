"""The error hierarchy: one root, and every error also the builtin that a Python user would catch."""

from __future__ import annotations

from collections.abc import Mapping

from nki_parallel_attn.sim.errors import (
    CapacityError,
    DeadlockError,
    DivergenceError,
    NkiParallelAttnError,
    NkiValidationError,
    OutOfBoundsError,
    RaceError,
    ReplicaGroupError,
    UninitializedReadError,
    UnsupportedInstructionError,
)

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BackendUnavailableError",
    "CapacityError",
    "DeadlockError",
    "DivergenceError",
    "NkiParallelAttnError",
    "NkiValidationError",
    "OutOfBoundsError",
    "PeerError",
    "PlanError",
    "RaceError",
    "RankFailedError",
    "RankMismatchError",
    "RankTimeoutError",
    "ReplicaGroupError",
    "SoftmaxRangeError",
    "UninitializedReadError",
    "UnsupportedFeatureError",
    "UnsupportedInstructionError",
]


class ArgumentError(NkiParallelAttnError, ValueError):
    """One argument is wrong: its name, what came and what was expected.

    Attributes:
        argument: name of the parameter.
    """

    def __init__(self, argument: str, got: object, expected: str, hint: str = "") -> None:
        self.argument = argument
        super().__init__(f"{argument}: got {got}, expected {expected}" + (f"; {hint}" if hint else ""))


class ArgumentTypeError(ArgumentError, TypeError):
    """One argument has the wrong type or dtype."""


class SoftmaxRangeError(ArgumentError, ArithmeticError):
    """A constant softmax maximum with which the exponentials of a row overflow or vanish."""


class PlanError(NkiParallelAttnError, ValueError):
    """A sharding plan that no arrangement of ranks can satisfy.

    Attributes:
        rule: the rule that does not hold, as an expression in the plan's own parameter names.
        nearest: feasible values nearest to what was asked for, by parameter name.
    """

    def __init__(self, rule: str, got: str, nearest: dict[str, list[int | str]] | None = None) -> None:
        self.rule = rule
        self.nearest = nearest or {}
        near = "; ".join(
            f"nearest feasible {name}: {', '.join(map(str, values))}" for name, values in self.nearest.items()
        )
        super().__init__(f"rule: {rule}; got {got}" + (f"; {near}" if near else ""))


class UnsupportedFeatureError(NkiParallelAttnError, NotImplementedError):
    """A documented parameter that the chosen backend cannot honour; nothing is silently dropped."""


class BackendUnavailableError(NkiParallelAttnError, ImportError):
    """The backend's package is missing, or is a placeholder; the message says what to install."""


class RankMismatchError(NkiParallelAttnError, RuntimeError):
    """Ranks disagree on something that must be equal on all of them."""


class PeerError(NkiParallelAttnError, RuntimeError):
    """Another rank of the group refused its arguments or died, so this rank stops too."""


class RankFailedError(NkiParallelAttnError, RuntimeError):
    """One or more ranks of a job raised; the message holds every failing rank's traceback.

    Attributes:
        exceptions: what the ranks raised, by rank; without those that died or whose exception cannot be pickled.
    """

    def __init__(self, message: str, exceptions: Mapping[int, BaseException] | None = None) -> None:
        self.exceptions = dict(exceptions or {})
        super().__init__(message)


class RankTimeoutError(RankFailedError, TimeoutError):
    """A rank of a job did not finish in time; the message holds every rank's stack."""

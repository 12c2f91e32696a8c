"""The execution context of one NeuronCore: which core of which rank runs, on what target, with which checks.

Each core of each rank runs in its own thread; `current_core()` answers for the calling thread.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from . import location
from .enums import MemoryRegion
from .errors import NkiValidationError
from .rules import RULES
from .targets import Target

if TYPE_CHECKING:
    from .instruction import Observer
    from .memory import Arena, Pool
    from .rendezvous import World
    from .scheduler import Scheduler


@dataclass(frozen=True)
class Checks:
    """Which kinds of checks run; all by default. `Checks.none()` turns every optional check off.

    Attributes:
        hardware: what engines, memories, dtypes and tile sizes allow.
        capacity: SBUF, PSUM and HBM sizes.
        uninitialised: reads of elements that nothing wrote.
        outputs: returned tensors are in shared HBM and written in full.
        activation_range: inputs of Scalar Engine functions lie in the documented range.
        races: unsynchronised accesses between cores and collectives.
        collectives: rules of nki.collectives that no instruction needs to work.
    """

    hardware: bool = True
    capacity: bool = True
    uninitialised: bool = True
    outputs: bool = True
    activation_range: bool = True
    races: bool = True
    collectives: bool = True

    @classmethod
    def none(cls) -> Checks:
        """No optional check."""
        return cls(**{f.name: False for f in fields(cls)})

    @classmethod
    def of(cls, value: bool | Checks) -> Checks:
        """`value`, where True means all checks and False none."""
        if isinstance(value, Checks):
            return value
        return cls() if value else cls.none()


@dataclass(eq=False)
class LoopScope:
    """One execution of a dynamic loop."""

    parent: LoopScope | None
    ended: bool = False

    def encloses(self, other: LoopScope | None) -> bool:
        """Whether `other` is this loop or inside it."""
        while other is not None and other is not self:
            other = other.parent
        return other is self


@dataclass(eq=False)
class Rank:
    """What the cores of one rank share: HBM and the tensors allocated in it.

    Attributes:
        index: rank in the world.
        lnc: physical cores of the rank.
        unwritten: errors of reads of shared HBM that nothing had written yet; raised at the end, because a write of the
            other core that comes later makes it a race, which says more.
        state: room for other modules, keyed by module.
    """

    index: int
    lnc: int
    hbm: Pool
    shared: list[Any] = field(default_factory=list)
    unwritten: list[NkiValidationError] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Core:
    """One program instance.

    Attributes:
        world: where the ranks meet for collectives.
        program_id: index of the core within its rank, 0 <= program_id < rank.lnc.
        grid: the launch grid, () when the kernel was launched without one.
        computes: False in cost-only mode, where instructions are checked and observed but move no data.
        unknown_value: what a number read from a tensor is taken to be in cost-only mode.
        precise: False when NKI_PRECISE_FP=0 keeps low-precision floats in float32.
        observers: called for every instruction; see instruction.Observer.
        state: per-core state of other modules (engine accumulators, random generators), keyed by module.
    """

    rank: Rank
    world: World
    program_id: int
    grid: tuple[int, ...]
    target: Target
    checks: Checks
    precise: bool
    computes: bool
    scheduler: Scheduler
    observers: list[Observer]
    pools: dict[MemoryRegion, Pool]
    arenas: dict[MemoryRegion, Arena] = field(default_factory=dict)
    shared_count: int = 0
    unknown_value: int = 0
    no_reorder_depth: int = 0
    loop: LoopScope | None = None
    generator: torch.Generator = field(default_factory=torch.Generator)
    names: itertools.count[int] = field(default_factory=itertools.count)
    state: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world_size = self.world.size
        self.checking = self.checks.hardware
        self.shadowing = self.checks.uninitialised or self.checks.outputs


class _Current(threading.local):
    core: Core | None = None


_current = _Current()


def current_core() -> Core:
    """The core that the calling thread runs.

    Raises:
        NkiValidationError: no kernel is running in this thread.
    """
    core = _current.core
    if core is None:
        fail("outside-kernel", "call this inside a kernel that simulate() or a @nki.jit function runs")
    return core


def running_core() -> Core | None:
    """The core that the calling thread runs, or None outside a kernel."""
    return _current.core


def run_as(core: Core, function: Callable[[], Any]) -> Any:
    """Call `function` as `core` in this thread."""
    previous, _current.core = _current.core, core
    try:
        return function()
    finally:
        _current.core = previous


def error_of(rule: str, message: str) -> NkiValidationError:
    """The error of `rule` at the kernel line that is being executed."""
    return RULES[rule].error(message, rule=rule, location=location.show(location.caller()))


def fail(rule: str, message: str) -> NoReturn:
    """Raise the error of `rule` at the kernel line that is being executed."""
    raise error_of(rule, message)

"""simulate(): run a kernel on the CPU, on every core of one rank or of a whole world."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .argument_overlap import note_overlaps
from .arguments import Arguments
from .core import Checks, Core, Rank, fail, run_as
from .enums import MemoryRegion
from .integers import is_integer
from .kernel import Kernel
from .memory import Pool
from .process_transport import process_transport
from .races import RaceDetector
from .rendezvous import InProcess, Transport, World
from .results import check_results
from .scheduler import Scheduler, Task
from .targets import Target, get_target

if TYPE_CHECKING:
    from .instruction import Observer

PRECISE_VARIABLE = "NKI_PRECISE_FP"


class Simulation:
    """A kernel with the options of `simulate`; call it with the kernel's arguments.

    Attributes:
        unknown_value: what a number read from a tensor is taken to be when no data is computed.
        cores: the program instances of the last run, in rank-major order.
    """

    def __init__(
        self,
        kernel: Kernel,
        world_size: int | None,
        target: Target,
        checks: Checks,
        seed: int | None,
        precise: bool,
        compute: bool,
        observers: Sequence[Observer],
    ) -> None:
        self.kernel = kernel
        self.world_size = world_size
        self.target = target
        self.checks = checks
        self.seed = seed
        self.precise = precise
        self.compute = compute
        self.observers = list(observers)
        self.unknown_value = 0
        self.cores: list[Core] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel.

        Without world_size: called as the kernel is, returns the kernel's result. With it: called with one sequence of
        world_size entries, each a rank's positional arguments (tuple) or keyword arguments (dict); returns the list of
        the ranks' results.
        """
        if self.world_size is None:
            return self._run_here(args, kwargs)
        if len(args) != 1 or kwargs or not isinstance(args[0], Sequence) or len(args[0]) != self.world_size:
            raise TypeError(f"with world_size={self.world_size}, pass one sequence with the arguments of each rank")
        calls = [((), entry) if isinstance(entry, dict) else (tuple(entry), {}) for entry in args[0]]
        return self.run(calls, InProcess(range(len(calls))), len(calls))

    def _run_here(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One rank: this process's, where there is a process group."""
        transport = process_transport()
        if transport is None:
            return self.run([(args, kwargs)], InProcess((0,)), 1)[0]
        transport.begin()
        try:
            result = self.run([(args, kwargs)], transport, transport.size)[0]
        except BaseException as error:
            transport.end(error)
            raise
        transport.end(None)
        return result

    def run(
        self, calls: list[tuple[tuple[Any, ...], dict[str, Any]]], transport: Transport, world_size: int
    ) -> list[Any]:
        """Run the transport's local ranks with their (positional, keyword) arguments; returns their results."""
        scheduler = Scheduler(self.seed)
        lnc = self.kernel.grid[0] if self.kernel.grid else 1
        self.cores = []
        tasks: list[Task] = []
        arguments: list[Arguments] = []
        observers = [*self.observers, RaceDetector()] if lnc > 1 and self.checks.races else self.observers
        world = World(world_size, lnc, transport)
        for index, (args, kwargs) in zip(transport.local_ranks, calls, strict=True):
            rank = Rank(index, lnc, Pool("hbm-capacity", self.target.hbm_bytes, enforced=self.checks.capacity))
            cores = [self._core(rank, program, world, scheduler, observers) for program in range(lnc)]
            given = Arguments(cores[0])
            wrapped = given.wrap(list(args)), given.wrap(kwargs)
            arguments.append(given)
            self.cores += cores
            for core in cores:
                name = f"rank {index} core {core.program_id}" if lnc > 1 else f"rank {index}"
                tasks.append(Task(name, self._program(core, *wrapped)))
        note_overlaps(argument for given in arguments for argument in given.placed)
        results = scheduler.run(tasks)
        for core in self.cores[::lnc]:
            if core.rank.unwritten:
                raise core.rank.unwritten[0]
        of_ranks = [results[first : first + lnc] for first in range(0, len(results), lnc)]
        for core, of_cores in zip(self.cores[::lnc], of_ranks, strict=True):
            if self.checks.outputs:
                check_results(core.rank, of_cores, self.kernel.function)
        for given in arguments:
            given.finish()
        return [given.unwrap(result) for given, (result, *_) in zip(arguments, of_ranks, strict=True)]

    def _core(self, rank: Rank, program: int, world: World, scheduler: Scheduler, observers: list[Observer]) -> Core:
        target, enforced = self.target, self.checks.capacity
        core = Core(
            rank=rank,
            world=world,
            program_id=program,
            grid=self.kernel.grid,
            target=target,
            checks=self.checks,
            precise=self.precise,
            computes=self.compute,
            unknown_value=self.unknown_value,
            scheduler=scheduler,
            observers=observers,
            pools={
                MemoryRegion.sbuf: Pool("sbuf-capacity", target.partition_bytes, enforced=enforced),
                MemoryRegion.psum: Pool(
                    "psum-capacity", target.psum_partition_bytes, target.psum_bank_bytes, enforced=enforced
                ),
                MemoryRegion.private_hbm: rank.hbm,
                MemoryRegion.shared_hbm: rank.hbm,
            },
        )
        core.generator.manual_seed(0 if self.seed is None else self.seed)
        return core

    def _program(self, core: Core, args: list[Any], kwargs: dict[str, Any]) -> Callable[[], Any]:
        return lambda: run_as(core, lambda: self.kernel.function(*args, **kwargs))


def simulate(
    kernel: Kernel | Callable[..., Any],
    *,
    world_size: int | None = None,
    lnc: int | None = None,
    target: str | Target | None = None,
    checks: bool | Checks = True,
    seed: int | None = None,
    precise: bool | None = None,
    compute: bool = True,
    observers: Sequence[Observer] = (),
) -> Simulation:
    """Prepare to run a kernel on the CPU.

    Args:
        kernel: a @nki.jit function, `kernel[lnc]`, or a plain function.
        world_size: number of ranks to run in this process. None runs one, called as the kernel is: alone, or, where a
            torch process group is initialised (torchrun), as this process's rank; then all ranks launch the same
            kernels in the same order.
        lnc: cores per rank; the same as `kernel[lnc]`.
        target: "trn1", "trn2" or "trn3"; by default what NEURON_PLATFORM_TARGET_OVERRIDE says, else trn3.
        checks: True for all, False for none, or Checks.
        seed: None schedules the first core that can run; a number picks at random, reproducibly.
        precise: False keeps low-precision floats in float32; by default what NKI_PRECISE_FP says, else True.
        compute: False checks and observes the instructions without computing data.
        observers: see every instruction; instruction.Observer.

    Raises:
        NkiValidationError: more cores than the target's logical core joins.
        TypeError: world_size is no positive integer.
    """
    if world_size is not None and (not is_integer(world_size) or world_size < 1):
        raise TypeError(f"world_size is {world_size!r}, expected None or a positive number of ranks")
    prepared = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
    if lnc is not None:
        prepared = prepared[lnc]
    chosen = get_target(target)
    cores = prepared.grid[0] if prepared.grid else 1
    if cores > chosen.max_lnc:
        fail("lnc", f"{cores} cores on {chosen.name}, whose logical core joins at most {chosen.max_lnc}")
    if precise is None:
        precise = os.environ.get(PRECISE_VARIABLE, "1") != "0"
    return Simulation(prepared, world_size, chosen, Checks.of(checks), seed, precise, compute, observers)

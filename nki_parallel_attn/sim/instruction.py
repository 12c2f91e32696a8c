"""The machinery of nki.isa: how an instruction is declared, checked, executed and observed.

An instruction is a function with the documented signature, preceded by `call`, under the `@instruction` decorator,
which states where it runs and which operands it reads and writes:

    @instruction(engine=engine.vector, reads=("data",), writes=("dst",), elementwise=("dst", "data"))
    def reciprocal(call: Call, dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
        call.emit(torch.reciprocal, dst, data.f32())

Calling it resolves run-time addresses, runs the checks that follow from the declaration, runs the body (its own checks
and the computation), marks what was written, and tells the core's observers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, cast

import torch

from . import location
from .core import Core, LoopScope, current_core, error_of, fail
from .dtypes import FLOAT32, DType
from .enums import MemoryRegion, engine, oob_mode
from .indirect import ScalarOffset, index_of, resolve
from .operand_checks import check_operand, check_together
from .parameters import parameters_of
from .psum import note_other_write
from .tensor import NkiTensor

P = ParamSpec("P")
Engine = engine


class NkiInstruction:
    """What an instruction returns: a handle for scheduling hints, which do not change results.

    Attributes:
        name: the `name` argument, or None.
        mnemonic: the instruction's function name.
    """

    __slots__ = ("_loop", "mnemonic", "name")

    def __init__(self, mnemonic: str, name: str | None, loop: LoopScope | None = None) -> None:
        self.mnemonic = mnemonic
        self.name = name
        self._loop = loop

    def depends_on(self, *producers: NkiInstruction) -> NkiInstruction:
        """Run after `producers`, in the same dynamic loop or around it. Program order already does so here."""
        for producer in producers:
            if producer._loop is not None and not producer._loop.encloses(self._loop):
                fail("dependency-loop", f"{self.mnemonic} depends on {producer.mnemonic}, which is inside another loop")
        return self


class Observer(Protocol):
    """Sees every instruction of every core, in execution order (race detection, cost model, tracing)."""

    def on_instruction(self, call: Call) -> None:
        """Called after the instruction took effect, still inside it, so `call.location` finds the kernel's line."""


class Call:
    """One execution of an instruction.

    Attributes:
        core: where it runs.
        declaration: the instruction.
        engine: the engine that executes it.
        reads, writes: tensors it reads and writes, with run-time addresses resolved. The index tensors of indirect
            operands are among the reads. The body may add to them.
        arguments: its arguments by name.
        work: facts for the cost model that the operands do not show; filled by the body.
        skipped: an out-of-bounds access under oob_mode.skip left nothing to do.
        dynamic: an operand starts at an address known at run time (a scalar offset or a dynamic index).
        marked: the body has noted itself which elements it wrote.
        meeting: where it met other cores, or None; `meeting.arrived` has the (rank, core) pairs.
    """

    __slots__ = (
        "_bound", "core", "declaration", "dynamic", "engine", "marked", "meeting", "reads", "skipped", "work", "writes",
    )  # fmt: skip

    def __init__(self, core: Core, declaration: Instruction, bound: list[Any]) -> None:
        self.core = core
        self.declaration = declaration
        self.engine = Engine.unknown
        self._bound = bound
        self.reads: list[NkiTensor] = []
        self.writes: list[NkiTensor] = []
        self.work: dict[str, Any] = {}
        self.skipped = False
        self.dynamic = False
        self.marked = False
        self.meeting: Any = None

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments by parameter name."""
        return dict(zip(self.declaration.parameters, self._bound, strict=True))

    def argument(self, name: str) -> Any:
        """One argument."""
        return self._bound[self.declaration.position[name]]

    @property
    def name(self) -> str:
        """The instruction's function name."""
        return self.declaration.name

    @property
    def location(self) -> tuple[str, int] | None:
        """File and line in the kernel; ask while the instruction executes."""
        return location.caller()

    def fail(self, rule: str, message: str) -> NoReturn:
        """Raise the error of `rule`, naming the instruction and the kernel's line."""
        fail(rule, f"{self.name}: {message}")

    def require(self, condition: bool, rule: str, message: str) -> None:
        """Raise the error of a hardware rule unless `condition` holds or hardware checks are off."""
        if not condition and self.core.checking:
            self.fail(rule, message)

    def require_target(self, version: Any, what: str) -> None:
        """Demand that the target is of generation `version` or newer for `what`."""
        if not self.core.target.at_least(version):
            self.require(
                False, "target", f"{what} needs {version.name} or newer, the target is {self.core.target.name}"
            )

    def emit(self, function: Callable[..., torch.Tensor], dst: NkiTensor, *args: Any, **kwargs: Any) -> None:
        """dst = function(*args, **kwargs) in float32, rounded to dst's dtype; straight into dst when that is possible.

        `function` takes `out=`. Skipped in cost-only mode.
        """
        if dst.format is FLOAT32 and type(dst) is NkiTensor:
            target = dst.target()
            first = args[0]
            if first.shape == target.shape and not self._reads_elsewhere(dst):
                try:
                    function(*args, **kwargs, out=target)
                except RuntimeError as error:
                    if "single memory location" not in str(error):
                        raise
                    target.copy_(function(*args, **kwargs))
                return
        dst.put(function(*args, **kwargs))

    def _reads_elsewhere(self, dst: NkiTensor) -> bool:
        """Whether an operand may be other elements of dst's memory, some of which dst covers."""
        for tensor in self.reads:
            if tensor.storage is dst.storage:
                if tensor.offset != dst.offset or tensor.strides != dst.strides:
                    return True
            elif tensor.storage.arena is not None and tensor.storage.on_bytes_of(dst.storage):
                return True
        return False

    def mark_written_where(self, dst: NkiTensor, chosen: torch.Tensor) -> None:
        """Note that the instruction writes only the elements of dst where `chosen`, bool in dst's shape."""
        dst.mark_written_where(chosen)
        if dst.storage.region is MemoryRegion.psum:
            note_other_write(dst)
        self.marked = True

    def check_written(self, operand: str, tensor: NkiTensor) -> None:
        """Raise if an element of `tensor` is read before anything wrote it."""
        where = tensor.unwritten()
        if where is None:
            return
        error = error_of(
            "uninitialised-read",
            f"{self.name}: {operand} reads element {list(where)} of {tensor.name} {list(tensor.shape)}, "
            "which was never written",
        )
        core = self.core
        if tensor.storage.region is MemoryRegion.shared_hbm and core.rank.lnc > 1 and core.checks.races:
            core.rank.unwritten.append(error)
        else:
            raise error


class Instruction:
    """A declared instruction.

    Attributes:
        engines: where it may run; the first is the default.
        reads, writes: names of the parameters that are tensors (or lists of tensors, or None, or numbers).
        elementwise: parameters with equal partitions and equal elements per partition.
        vectors: parameters that are [P, 1] tensors when they are tensors, P as in the first elementwise parameter.
        not_both_psum: two parameters that may not both be in PSUM.
        any_partition: parameters that may start at any partition.
        dtypes: allowed dtypes by parameter.
        indirect: parameters that take tensor indirection.
        deferred_read: the body checks that what it reads has been written, when it reads it.
        position: index of each parameter.
    """

    def __init__(self, body: Callable[..., None], engine: Any, **roles: Any) -> None:
        self.body = body
        self.name = body.__name__
        parameters = list(inspect.signature(body).parameters.values())[1:]
        self.parameters = [p.name for p in parameters]
        self.position = {name: i for i, name in enumerate(self.parameters)}
        self._defaults = [_MISSING if p.default is inspect.Parameter.empty else p.default for p in parameters]
        self._engine = engine
        self.reads: tuple[str, ...] = roles.pop("reads", ())
        self.writes: tuple[str, ...] = roles.pop("writes", ())
        self.elementwise: tuple[str, ...] = roles.pop("elementwise", ())
        self.vectors: tuple[str, ...] = roles.pop("vectors", ())
        self.not_both_psum: tuple[str, ...] = roles.pop("not_both_psum", ())
        self.any_partition: tuple[str, ...] = roles.pop("any_partition", ())
        self.indirect: tuple[str, ...] = roles.pop("indirect", ())
        self.dtypes: Mapping[str, Sequence[DType]] = roles.pop("dtypes", {})
        self.deferred_read: bool = roles.pop("deferred_read", False)
        self.engines: tuple[Engine, ...] = roles.pop("engines", ()) or (engine,)
        assert not roles, f"unknown roles {roles}"
        self.operands = [(name, self.position[name]) for name in (*self.reads, *self.writes)]
        self._reads = [(name, self.position[name]) for name in self.reads]
        self._writes = [(name, self.position[name]) for name in self.writes]
        self._enums = [(i, type(p.default)) for i, p in enumerate(parameters) if isinstance(p.default, Enum)]
        self._checked = parameters_of(parameters, (*self.reads, *self.writes))
        self._required = [i for i, default in enumerate(self._defaults) if default is _MISSING]
        self._oob = self.position.get("oob_mode")
        self._name = self.position.get("name")

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Arguments in the order of the parameters, defaults filled in."""
        bound = self._defaults.copy()
        bound[: len(args)] = args
        position = self.position
        try:
            for name, value in kwargs.items():
                bound[position[name]] = value
        except KeyError:
            raise TypeError(f"{self.name}() got an unexpected keyword argument {name!r}") from None
        if len(bound) != len(position):
            raise TypeError(f"{self.name}() takes {len(position)} arguments but {len(args)} were given")
        for i in self._required:
            if bound[i] is _MISSING:
                missing = [self.parameters[j] for j in self._required if bound[j] is _MISSING]
                raise TypeError(f"{self.name}() missing arguments {missing}")
        return bound

    def issue(self, *args: Any, **kwargs: Any) -> NkiInstruction:
        """Execute on the current core."""
        core = current_core()
        bound = self.bind(args, kwargs)
        call = Call(core, self, bound)
        for i, kind in self._enums:
            if type(bound[i]) is not kind:
                call.fail(
                    "enum-argument", f"{self.parameters[i]} is {bound[i]!r}, expected a member of {kind.__name__}"
                )
        for parameter in self._checked:
            value = bound[parameter.position]
            if type(value) not in parameter.plain:
                bound[parameter.position] = parameter.checked(call, value)
        unit = call.engine = self._engine if type(self._engine) is Engine else self._engine(*bound)
        if core.checking and unit not in self.engines:
            allowed = ", ".join(choice.name for choice in self.engines)
            call.fail("engine-choice", f"engine is {unit.name}, expected {allowed}")
        named = self._collect(call, bound)
        if core.checking:
            for operand, tensor, written in named:
                check_operand(call, operand, tensor, written)
        check_together(call, bound, self.position)
        if core.checks.uninitialised and not self.deferred_read:
            for operand, tensor, written in named:
                if not written and not tensor.storage.full:
                    call.check_written(operand, tensor)
        if not call.skipped:
            for tensor in call.writes:
                if tensor.storage.shares_with:
                    call.fail(
                        "argument-overlap",
                        f"writes to {tensor.name}, which shares memory with {tensor.storage.shares_with}; "
                        "on the device they are two tensors: pass a clone of one of them",
                    )
            self.body(call, *bound)
            for tensor in () if call.marked else call.writes:
                storage = tensor.storage
                in_psum = storage.region is MemoryRegion.psum
                if not storage.full and (core.shadowing or in_psum or storage.arena is not None):
                    tensor.mark_written()
                if in_psum and core.checking and unit is not Engine.tensor:
                    note_other_write(tensor)
        for observer in core.observers:
            observer.on_instruction(call)
        return NkiInstruction(self.name, None if self._name is None else bound[self._name], core.loop)

    def _collect(self, call: Call, bound: list[Any]) -> list[tuple[str, NkiTensor, bool]]:
        """Resolve tensor operands in place and list them as (parameter, tensor, is written)."""
        found: list[tuple[str, NkiTensor, bool]] = []
        for roles, written, tensors in ((self._reads, False, call.reads), (self._writes, True, call.writes)):
            for operand, position in roles:
                value = bound[position]
                if isinstance(value, NkiTensor):
                    value = bound[position] = self._resolve(call, value, found)
                    if value is not None:
                        tensors.append(value)
                        found.append((operand, value, written))
                elif type(value) is list or type(value) is tuple:
                    bound[position] = self._resolve_list(call, operand, value, written, tensors, found)
        return found

    def _resolve_list(
        self,
        call: Call,
        operand: str,
        value: Sequence[Any],
        written: bool,
        tensors: list[NkiTensor],
        found: list[tuple[str, NkiTensor, bool]],
    ) -> list[Any]:
        """`value`, a list of tensors or of lists of them, resolved."""
        items: list[Any] = []
        for item in value:
            if type(item) is list or type(item) is tuple:
                items.append(self._resolve_list(call, operand, item, written, tensors, found))
                continue
            resolved = self._resolve(call, item, found)
            items.append(resolved)
            if resolved is not None:
                tensors.append(resolved)
                found.append((operand, resolved, written))
        return items

    def _resolve(self, call: Call, value: NkiTensor, found: list[tuple[str, NkiTensor, bool]]) -> NkiTensor | None:
        storage = value.storage
        if storage.overflows:
            storage.touched()
        if storage.loop is not None and storage.loop.ended:
            call.fail("loop-scope", f"{value.name} was declared inside a dynamic loop that has ended")
        if value.indirection is None:
            return value
        call.dynamic = call.dynamic or isinstance(value.indirection, ScalarOffset)
        index = index_of(value)
        if index is not None:
            call.reads.append(index)
            found.append(("the index", index, False))
            if call.core.checks.uninitialised:
                call.check_written("the index", index)
        skip = self._oob is not None and call._bound[self._oob] is oob_mode.skip
        resolved = resolve(value, call.engine, skip)
        if resolved is None:
            call.skipped = True
        return resolved


class _Missing:
    pass


_MISSING = _Missing()


def instruction(
    *, engine: Engine | Callable[..., Engine], **roles: Any
) -> Callable[[Callable[Concatenate[Call, P], None]], Callable[P, NkiInstruction]]:
    """Declare an instruction; see Instruction for the roles.

    Args:
        engine: the engine, or a function of the arguments, in order, that chooses it; then state `engines` too.
    """

    def declare(body: Callable[Concatenate[Call, P], None]) -> Callable[P, NkiInstruction]:
        declaration = Instruction(body, engine, **roles)
        INSTRUCTIONS[declaration.name] = declaration

        def issue(*args: Any, **kwargs: Any) -> NkiInstruction:
            return declaration.issue(*args, **kwargs)

        functools.update_wrapper(issue, body)
        signature = inspect.signature(body)
        parameters = list(signature.parameters.values())[1:]
        issue.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return cast(Callable[P, NkiInstruction], issue)

    return declare


INSTRUCTIONS: dict[str, Instruction] = {}

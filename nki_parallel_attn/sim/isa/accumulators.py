"""Accumulator registers of an engine: one float32 for each of its 128 lanes, kept from instruction to instruction.

Source: nki/api/nki/isa/__init__.py, activation, activate2, exponential, tensor_scalar_reduce, select_reduce.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..dtypes import as_float32
from ..enums import engine as Engine
from ..enums import reduce_cmd as ReduceCmd
from ..instruction import Call
from ..ops import Operator
from ..tensor import NkiTensor

LANES = 128


class Accumulators:
    """The registers of one engine.

    Attributes:
        values: float32 [128].
        known: lanes that an instruction has set and none has left undefined since.
    """

    def __init__(self) -> None:
        self.values = torch.full((LANES,), float("nan"))
        self.known = np.zeros(LANES, dtype=np.bool_)

    @staticmethod
    def of(call: Call) -> Accumulators:
        """The registers of the engine that executes `call`."""
        key = f"{call.engine.name}.accumulators"
        state = call.core.state
        if key not in state:
            state[key] = Accumulators()
        return state[key]  # type: ignore[no-any-return]

    def start(
        self, call: Call, command: ReduceCmd, operator: Operator, initial: NkiTensor | float | None = None
    ) -> torch.Tensor:
        """What the first lanes hold when the reduction begins, float32 [P]: writing to it changes the registers.

        Args:
            initial: what load_reduce loads, a number or [P, 1].
        """
        lanes = slice(0, call.writes[0].shape[0])
        values = self.values[lanes]
        if command is ReduceCmd.reduce:
            self.require_known(call, lanes)
        elif not call.core.computes:
            pass
        elif command is ReduceCmd.load_reduce:
            if isinstance(initial, NkiTensor):
                values.copy_(initial.f32().reshape(-1))
            elif initial is not None:
                values.fill_(as_float32(initial))
        else:
            values.fill_(operator.identity)
        self.known[lanes] = True
        return values

    def read(self, call: Call, dst: NkiTensor, negate: bool = False) -> None:
        """Write the registers to `dst`, [P, 1]."""
        lanes = slice(0, dst.shape[0])
        self.require_known(call, lanes)
        if call.core.computes:
            values = self.values[lanes]
            dst.put(values.neg() if negate else values)

    def forget(self, call: Call) -> None:
        """Leave the lanes undefined, as an instruction that runs idle on the Vector Engine does."""
        self.known[: call.writes[0].shape[0]] = False

    def require_known(self, call: Call, lanes: slice) -> None:
        """Demand that the lanes hold a defined value."""
        if call.core.checking and not self.known[lanes].all():
            call.fail(
                "reduce-register",
                f"the {call.engine.name} engine's accumulators hold no defined value here; reset them",
            )


def check_command(
    call: Call, command: ReduceCmd, allowed: Sequence[ReduceCmd], initial_given: bool = False, initial: str = ""
) -> None:
    """Demand a reduce command that the instruction has, and an initial value exactly with load_reduce."""
    if not call.core.checking:
        return
    if command not in allowed:
        names = ", ".join(choice.name for choice in allowed)
        call.fail("reduce-register", f"reduce_cmd is {command.name}, expected {names}")
    if initial_given is not (command is ReduceCmd.load_reduce):
        verb = "needs" if command is ReduceCmd.load_reduce else "takes no"
        call.fail("reduce-register", f"reduce_cmd.{command.name} {verb} {initial}")


def accumulate(
    call: Call,
    command: ReduceCmd,
    operator: Operator,
    result: torch.Tensor | None,
    reduce_res: NkiTensor | None,
    *,
    initial: NkiTensor | float | None = None,
    negate: bool = False,
) -> None:
    """Apply `command` to the registers of the call's engine, then read them out to `reduce_res` if that is given.

    Args:
        result: float32 [P, ...], the instruction's results before rounding; None in cost-only mode.
        initial: what load_reduce loads.
        negate: negate what is read out, not the registers.
    """
    registers = Accumulators.of(call)
    if command is ReduceCmd.idle:
        if call.engine is Engine.vector:
            registers.forget(call)
    else:
        values = registers.start(call, command, operator, initial)
        if result is not None and command is not ReduceCmd.reset:
            flat = result if result.ndim == 2 else result.reshape(result.shape[0], -1)
            assert operator.reduce is not None
            values.copy_(operator.compute(values, operator.reduce(flat)))
    if reduce_res is not None:
        registers.read(call, reduce_res, negate)

"""Accumulator registers of an engine: one float32 for each of its 128 lanes, kept from instruction to instruction.

Source: nki/api/nki/isa/__init__.py, activation, activate2, exponential, tensor_scalar_reduce, select_reduce.
"""

from __future__ import annotations

import torch

from ..enums import reduce_cmd as ReduceCmd
from ..instruction import Call
from ..ops import Operator
from ..tensor import NkiTensor

LANES = 128


class Accumulators:
    """The registers of one engine.

    Attributes:
        values: float32 [128].
        known: bool [128]: lanes that an instruction has set and none has left undefined since.
    """

    def __init__(self) -> None:
        self.values = torch.full((LANES,), float("nan"))
        self.known = torch.zeros(LANES, dtype=torch.bool)

    @staticmethod
    def of(call: Call) -> Accumulators:
        """The registers of the engine that executes `call`."""
        key = f"{call.engine.name}.accumulators"
        state = call.core.state
        if key not in state:
            state[key] = Accumulators()
        return state[key]  # type: ignore[no-any-return]

    def update(
        self,
        call: Call,
        command: ReduceCmd,
        operator: Operator,
        reduced: torch.Tensor | None,
        initial: torch.Tensor | float | None = None,
    ) -> None:
        """Apply `command` to the first lanes.

        Args:
            reduced: float32 [P], this instruction's reduction; None in cost-only mode.
            initial: what load_reduce loads, a number or [P].
        """
        lanes = slice(0, call.writes[0].shape[0])
        if command is ReduceCmd.reduce:
            self.require_known(call, lanes)
        if command in (ReduceCmd.reset, ReduceCmd.reset_reduce):
            self.values[lanes] = operator.identity
        elif command is ReduceCmd.load_reduce and initial is not None:
            self.values[lanes] = initial
        self.known[lanes] = True
        if reduced is not None and command is not ReduceCmd.reset:
            self.values[lanes] = operator.compute(self.values[lanes], reduced)

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
        if call.core.checking and not bool(self.known[lanes].all()):
            call.fail(
                "reduce-register",
                f"the {call.engine.name} engine's accumulators hold no defined value here; reset them",
            )

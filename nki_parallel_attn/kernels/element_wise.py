"""Element-wise work of which an engine takes a piece when it has time: an engine runs in program order, and a long
instruction would hold up what the attention waits for."""

from __future__ import annotations

from typing import Any

from nki_parallel_attn.kernels.tile_transposes import SCALAR_TIME, VECTOR_TIME
from nki_parallel_attn.nki import nisa, nl


class Pieces(nl.NKIObject):  # type: ignore[misc]
    """Operations in waiting, and what comes after them; first come, first issued."""

    def __init__(self) -> None:
        self.waiting = []  # type: list[Any]

    def scale(self, dst: Any, data: Any, factor: Any) -> None:
        """dst = data * factor, [P, N] times [P, 1]."""
        self.waiting.append([dst, None, data, factor])

    def add_scaled(self, dst: Any, acc: Any, data: Any, factor: Any) -> None:
        """dst = acc + data * factor, in float32."""
        self.waiting.append([dst, acc, data, factor])

    def then(self, owner: Any, argument: int) -> None:
        """Call owner.pieces_done(argument) after what has been added."""
        self.waiting.append([owner, argument])

    def issue(self, cycles: float) -> float:
        """Issue on GpSimd what begins within so many of its cycles; how many it takes."""
        taken = 0.0
        while self.waiting and taken < cycles:
            piece = self.waiting.pop(0)
            if len(piece) == 2:
                piece[0].pieces_done(piece[1])
            else:
                taken += (2 if piece[1] is None else 4) * piece[2].shape[1]
                on_gpsimd(piece)
        return taken

    def drain(self) -> None:
        """Issue all, on whichever engine is done first: there is no attention left to hold up."""
        vector = scalar = other = 0
        while self.waiting:
            piece = self.waiting.pop(0)
            if len(piece) == 2:
                piece[0].pieces_done(piece[1])
                continue
            dst, acc, data, factor = piece
            size = data.shape[1]
            passes = 1 if acc is None else 2
            on_vector = vector + passes * size * VECTOR_TIME
            on_other = other + 2 * passes * size * SCALAR_TIME
            if acc is None and scalar + size * SCALAR_TIME <= min(on_vector, on_other):
                scalar += size * SCALAR_TIME
                nisa.tensor_scalar(dst=dst, data=data, op0=nl.multiply, operand0=factor, engine=nisa.engine.scalar)
            elif on_other < on_vector:
                other = on_other
                on_gpsimd(piece)
            elif acc is None:
                vector = on_vector
                nisa.tensor_scalar(dst=dst, data=data, op0=nl.multiply, operand0=factor)
            else:
                vector = on_vector
                nisa.scalar_tensor_tensor(
                    dst=dst, data=data, op0=nl.multiply, operand0=factor, op1=nl.add, operand1=acc
                )


def on_gpsimd(piece: list[Any]) -> None:
    """One piece, on GpSimd."""
    dst, acc, data, factor = piece
    by = factor.broadcast(1, data.shape[1])
    if acc is None:
        gpsimd(dst, data, by, nl.multiply)
        return
    term = nl.ndarray(data.shape, dtype=nl.float32, buffer=nl.sbuf)
    gpsimd(term, data, by, nl.multiply)
    gpsimd(dst, acc, term, nl.add)


def gpsimd(dst: Any, data1: Any, data2: Any, op: Any) -> None:
    """dst = data1 op data2 on GpSimd, which has time to spare."""
    nisa.tensor_tensor(dst=dst, data1=data1, data2=data2, op=op, engine=nisa.engine.gpsimd)


class Constants(nl.NKIObject):  # type: ignore[misc]
    """Numbers in every partition, for GpSimd, whose operands are tiles."""

    def __init__(self) -> None:
        self.columns = {}  # type: dict[str, Any]

    def apply(self, dst: Any, data: Any, value: float, op: Any) -> None:
        """dst = data op value on GpSimd."""
        key = str(value)
        if key not in self.columns:
            self.columns[key] = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.memset(dst=self.columns[key], value=value, engine=nisa.engine.gpsimd)
        operand = self.columns[key][: data.shape[0], :]
        for dim in range(1, len(data.shape)):
            if dim > 1:
                operand = operand.expand_dim(dim)
            operand = operand.broadcast(dim, data.shape[dim])
        gpsimd(dst, data, operand, op)

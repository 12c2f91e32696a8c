"""Register instructions. Source: nki/api/nki/isa/__init__.py, register_alloc to register_store.

Registers hold 32-bit integers. What a float in memory would become in one is on no page, so loads and stores take
integer tensors; a store to a narrower one keeps the low bits.
"""

from __future__ import annotations

import torch

from ..core import fail
from ..enums import engine
from ..instruction import Call, instruction
from ..registers import VirtualRegister
from ..tensor import NkiTensor


def register_alloc(x: int | None = None) -> VirtualRegister:
    """Allocate a register, holding the 32-bit integer `x` or nothing."""
    if x is not None and not _is_word(x):
        fail("register", f"register_alloc: x is {x!r}, expected None or a 32-bit integer")
    return VirtualRegister(x)


@instruction(engine=engine.sync)
def register_move(call: Call, dst: VirtualRegister, src: int | VirtualRegister) -> None:
    """dst = src, a constant 32-bit integer or another register."""
    _require_register(call, "dst", dst)
    if isinstance(src, VirtualRegister):
        dst.write(src.read())
    elif _is_word(src):
        dst.write(src)
    else:
        call.fail("register", f"src is {src!r}, expected a 32-bit integer or a register")


@instruction(engine=engine.sync, reads=("src",))
def register_load(call: Call, dst: VirtualRegister, src: NkiTensor) -> None:
    """dst = the one element of `src`, an integer in HBM or SBUF."""
    _require_register(call, "dst", dst)
    _require_element(call, "src", src)
    core = call.core
    dst.write(int(src.raw.reshape(-1)[0].item()) if core.computes else core.unknown_value)


@instruction(engine=engine.sync, writes=("dst",))
def register_store(call: Call, dst: NkiTensor, src: VirtualRegister) -> None:
    """dst, one integer in HBM or SBUF, = src."""
    _require_element(call, "dst", dst)
    _require_register(call, "src", src)
    bits = src.read() % 2 ** (8 * dst.dtype.itemsize)
    if call.core.computes:
        dst.put_raw(torch.tensor([bits], dtype=torch.int64).to(dst.format.torch))


def _is_word(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**31) <= value < 2**32


def _require_register(call: Call, operand: str, value: object) -> None:
    if not isinstance(value, VirtualRegister):
        call.fail("register", f"{operand} is {value!r}, expected a register")


def _require_element(call: Call, operand: str, tensor: NkiTensor) -> None:
    if tensor.size != 1:
        call.fail("register", f"{operand} has shape {list(tensor.shape)}, expected one element")
    if not tensor.dtype.is_integer:
        call.fail("register", f"{operand} is {tensor.dtype}; registers hold integers")

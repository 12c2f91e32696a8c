"""Register instructions. Source: nki/api/nki/isa/__init__.py, register_alloc to register_store.

Registers hold 32-bit integers or a float32 (nki/get-started/nki-language-guide.rst, "Dynamic Control Flow"). What one
would become as the other is on no page, so neither is converted; a store to a narrower integer keeps the low bits.
"""

from __future__ import annotations

import torch

from ..core import fail
from ..dtypes import float32
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
    """dst = the one element of `src`, an integer or a float32 in HBM or SBUF."""
    _require_register(call, "dst", dst)
    _require_element(call, "src", src)
    core = call.core
    value = src.raw.reshape(-1)[0].item() if core.computes else core.unknown_value
    dst.write(float(value) if src.dtype == float32 else int(value))


@instruction(engine=engine.sync, writes=("dst",))
def register_store(call: Call, dst: NkiTensor, src: VirtualRegister) -> None:
    """dst, one integer or float32 in HBM or SBUF, = src, which holds the same."""
    _require_element(call, "dst", dst)
    _require_register(call, "src", src)
    value = src.read()
    if isinstance(value, float) is not (dst.dtype == float32):
        call.fail("register", f"src holds {value!r}, dst is {dst.dtype}; registers do not convert")
    if not call.core.computes:
        return
    if isinstance(value, float):
        dst.put(torch.tensor([value]))
    else:
        bits = value % 2 ** (8 * dst.dtype.itemsize)
        dst.put_raw(torch.tensor([bits], dtype=torch.int64).to(dst.format.torch))


def _is_word(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**31) <= value < 2**32


def _require_register(call: Call, operand: str, value: object) -> None:
    if not isinstance(value, VirtualRegister):
        call.fail("register", f"{operand} is {value!r}, expected a register")


def _require_element(call: Call, operand: str, tensor: NkiTensor) -> None:
    if tensor.size != 1:
        call.fail("register", f"{operand} has shape {list(tensor.shape)}, expected one element")
    if not tensor.dtype.is_integer and tensor.dtype != float32:
        call.fail("register", f"{operand} is {tensor.dtype}; registers hold integers and float32")

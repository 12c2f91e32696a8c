"""Register instructions. Source: nki/api/nki/isa/__init__.py, register_alloc to register_store."""

from __future__ import annotations

import torch

from ..enums import engine
from ..instruction import Call, instruction
from ..registers import VirtualRegister
from ..tensor import NkiTensor


def register_alloc(x: int | None = None) -> VirtualRegister:
    """Allocate a register, holding `x` or nothing."""
    return VirtualRegister(x)


@instruction(engine=engine.sync)
def register_move(call: Call, dst: VirtualRegister, src: int | VirtualRegister) -> None:
    """dst = src, a constant integer or another register."""
    if isinstance(src, VirtualRegister):
        dst.write(src.read())
    elif isinstance(src, int) and not isinstance(src, bool):
        dst.write(src)
    else:
        call.fail("register", f"src is {src!r}, expected an integer or a register")


@instruction(engine=engine.sync, reads=("src",))
def register_load(call: Call, dst: VirtualRegister, src: NkiTensor) -> None:
    """dst = the one element of `src`, in HBM or SBUF."""
    if src.size != 1:
        call.fail("register", f"src has shape {list(src.shape)}, expected one element")
    if not src.dtype.is_integer:
        call.fail("register", f"src is {src.dtype}; integer registers load integer tensors")
    dst.write(int(src.raw.reshape(-1)[0].item()))


@instruction(engine=engine.sync, writes=("dst",))
def register_store(call: Call, dst: NkiTensor, src: VirtualRegister) -> None:
    """dst, one element in HBM or SBUF, = src."""
    if dst.size != 1:
        call.fail("register", f"dst has shape {list(dst.shape)}, expected one element")
    value = src.read()
    if dst.dtype.is_integer:
        width = 8 * dst.dtype.itemsize
        dst.put_raw(torch.tensor([value % 2**width], dtype=torch.int64).to(dst.format.torch))
    else:
        dst.put(torch.tensor([float(value)]))

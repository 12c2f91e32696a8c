"""DMA engines: data movement between HBM and SBUF. Source: nki/api/nki/isa/__init__.py; nki/deep-dives/nki-dge.rst."""

from __future__ import annotations

from ..dtypes import PACKED, float8_e8m0fnu
from ..enums import dge_mode as DgeMode
from ..enums import engine as Engine
from ..enums import nc_version
from ..enums import oob_mode as OobMode
from ..instruction import Call, instruction
from ..tensor import GatheredTensor, NkiTensor

_UNCASTABLE = frozenset((*PACKED, float8_e8m0fnu))


@instruction(engine=Engine.dma, reads=("src",), writes=("dst",))
def dma_copy(
    call: Call,
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: OobMode = OobMode.error,
    dge_mode: DgeMode = DgeMode.unknown,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """Copy src to dst in row-major element order, through float32 when the dtypes differ.

    Args:
        priority: 0 to 3, trn3 and newer.
        oob_mode: `skip` leaves out rows whose run-time index is out of bounds.
        engine: sync or scalar, which trigger hardware descriptor generation (dge_mode.hwdge).
    """
    if src.size != dst.size and not _some_skipped(src) and not _some_skipped(dst):
        call.fail(
            "element-count", f"dst {list(dst.shape)} has {dst.size} elements, src {list(src.shape)} has {src.size}"
        )
    if dst.dtype != src.dtype and not _UNCASTABLE.isdisjoint((dst.dtype, src.dtype)):
        call.fail("dma-cast", f"src is {src.dtype}, dst {dst.dtype}; packed and scale dtypes are not cast")
    if call.core.checking:
        _check_modes(call, dst, src, priority, dge_mode, engine)
    if not call.core.computes:
        return
    if _some_skipped(src):
        dst = _rows(call, dst, src)
    elif _some_skipped(dst):
        src = _rows(call, src, dst)
    copy(dst, src)


def copy(dst: NkiTensor, src: NkiTensor) -> None:
    """dst = src: bit for bit between equal dtypes, else through float32; packed dtypes cannot be cast."""
    if dst.dtype == src.dtype:
        dst.put_raw(src.raw)
    else:
        dst.put(src.f32())


def _some_skipped(tensor: NkiTensor) -> bool:
    return isinstance(tensor, GatheredTensor) and tensor.kept is not None


def _rows(call: Call, other: NkiTensor, gathered: NkiTensor) -> NkiTensor:
    """The rows of `other` that correspond to the rows of `gathered` that were not skipped."""
    assert isinstance(gathered, GatheredTensor) and gathered.kept is not None
    rows = GatheredTensor(
        other, (gathered.kept.numel(), *other.shape[1:]), other.shape, other.strides, other.offset, gathered.kept, None
    )
    for tensors in (call.reads, call.writes):
        tensors[:] = [rows if tensor is other else tensor for tensor in tensors]
    return rows


def _check_modes(
    call: Call, dst: NkiTensor, src: NkiTensor, priority: int | None, dge_mode: DgeMode, engine: Engine
) -> None:
    if not isinstance(dge_mode, DgeMode) or not isinstance(engine, Engine):
        call.fail("enum-argument", f"dge_mode is {dge_mode!r} and engine {engine!r}, expected members of the enums")
    if priority is not None:
        call.require_target(nc_version.gen4, "priority")
        call.require(priority in (0, 1, 2, 3), "dma-mode", f"priority is {priority!r}, expected 0 to 3")
    if dge_mode is DgeMode.hwdge:
        call.require_target(nc_version.gen3, "dge_mode.hwdge")
        call.require(
            dst.dtype == src.dtype, "matching-dtype", f"dge_mode.hwdge copies bytes: dst {dst.dtype}, src {src.dtype}"
        )
        call.require(
            engine in (Engine.unknown, Engine.sync, Engine.scalar),
            "dma-mode",
            f"engine {engine.name} cannot trigger hwdge",
        )
    else:
        call.require(engine is Engine.unknown, "dma-mode", f"engine={engine.name} needs dge_mode.hwdge")
    if isinstance(src, GatheredTensor) or isinstance(dst, GatheredTensor):
        call.require(
            dge_mode in (DgeMode.unknown, DgeMode.swdge), "dma-mode", f"vector_offset needs swdge, not {dge_mode.name}"
        )

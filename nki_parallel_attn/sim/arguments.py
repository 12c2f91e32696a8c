"""Between the caller's arrays and the kernel's tensors.

Torch tensors and NumPy arrays become HBM tensors that share their memory when the layout allows, so that what the
kernel writes into an input is written in place; otherwise a copy is made and written back. Results return as the
caller's kind.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .argument_overlap import PlacedArgument, same_memory
from .core import Core, fail
from .dtypes import FLOAT32, DType, as_dtype, bool_, float16, float32, int32
from .enums import MemoryRegion
from .memory import Storage
from .results import same_view
from .tensor import NKIObject, NkiTensor


@dataclass(frozen=True)
class ShapeOnly:
    """Stands for an array in a run without data (`profile`).

    Attributes:
        dtype: anything nki.language takes for a dtype, or its name.
    """

    shape: tuple[int, ...]
    dtype: Any


_NUMPY_BITS = {1: np.uint8, 2: np.int16, 4: np.int32}


class Arguments:
    """The arguments of one rank: wrapped once, shared by its cores.

    Attributes:
        kind: "torch" or "numpy", the kind of the results; that of the first array.
        placed: the arrays that have data.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._region = MemoryRegion.shared_hbm if core.rank.lnc > 1 else MemoryRegion.private_hbm
        self._write_back: list[Callable[[], None]] = []
        self._originals: dict[object, tuple[NkiTensor, Any]] = {}
        self.placed: list[PlacedArgument] = []
        self.kind: str | None = None

    def wrap(self, value: Any) -> Any:
        """`value` with every array in it, through tuples, lists, dicts and NKI objects, replaced by a tensor."""
        if isinstance(value, (torch.Tensor, np.ndarray, ShapeOnly)):
            return self._tensor(value)
        if isinstance(value, (tuple, list)):
            items = [self.wrap(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {key: self.wrap(item) for key, item in value.items()}
        if isinstance(value, NKIObject) and not isinstance(value, NkiTensor):
            wrapped = copy.copy(value)
            wrapped.__dict__.update({key: self.wrap(item) for key, item in vars(value).items()})
            return wrapped
        return value

    def _tensor(self, array: torch.Tensor | np.ndarray[Any, Any] | ShapeOnly) -> NkiTensor:
        if isinstance(array, np.ndarray) or (isinstance(array, torch.Tensor) and array.device.type != "meta"):
            return self._once(same_memory(array), array, lambda name: self._place(array, name))
        return self._once(id(array), array, lambda name: shape_only_tensor(self._core, array, self._region, name))

    def _once(self, key: object, array: Any, make: Callable[[str], NkiTensor]) -> NkiTensor:
        known = self._originals.get(key)
        if known is not None:
            return known[0]
        if self.kind is None:
            self.kind = "numpy" if isinstance(array, np.ndarray) else "torch"
        tensor = make(f"argument{len(self._originals)}")
        self._originals[key] = (tensor, array)
        return tensor

    def _place(self, array: torch.Tensor | np.ndarray[Any, Any], name: str) -> NkiTensor:
        tensor = to_tensor(self._core, array, "input", self._region, name, self._write_back)
        label = f"{name} of rank {self._core.rank.index}" if self._core.world_size > 1 else name
        self.placed.append(PlacedArgument(label, array, tensor.storage))
        return tensor

    def finish(self) -> None:
        """Write copies back into the caller's arrays."""
        for write in self._write_back:
            write()

    def unwrap(self, value: Any) -> Any:
        """The kernel's result with every tensor replaced by an array of the caller's kind."""
        if isinstance(value, NkiTensor):
            for tensor, original in self._originals.values():
                if tensor.storage is value.storage and same_view(tensor, value):
                    return original
            if not self._core.computes:
                return ShapeOnly(value.shape, value.dtype)
            return from_tensor(value, self.kind or "torch")
        if isinstance(value, (tuple, list)):
            items = [self.unwrap(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {key: self.unwrap(item) for key, item in value.items()}
        return value


def shape_only_tensor(core: Core, array: torch.Tensor | ShapeOnly, region: MemoryRegion, name: str) -> NkiTensor:
    """An HBM tensor without data, for a core that computes none.

    Raises:
        NkiValidationError: the core computes, or NKI has no such dtype.
    """
    if core.computes:
        fail("kernel-argument", f"{name} has no data; only profile(compute=False) takes shapes alone")
    shape = tuple(array.shape) or (1,)
    dtype = int32 if array.dtype is torch.int64 else _argument_dtype(array.dtype, name)
    storage = Storage(core, shape, dtype, region, name)
    storage.charge(core.rank.hbm)
    storage.location = None
    storage.role = "input"
    storage.full = True
    return NkiTensor(shape, dtype, storage)


def to_tensor(
    core: Core,
    array: torch.Tensor | np.ndarray[Any, Any],
    role: str,
    region: MemoryRegion,
    name: str,
    write_back: list[Callable[[], None]] | None = None,
) -> NkiTensor:
    """An HBM tensor over a host array; what must be copied back later is appended to `write_back`.

    Raises:
        NkiValidationError: NKI has no such dtype.
    """
    shape = tuple(array.shape) or (1,)
    if 0 in shape:
        fail("kernel-argument", f"{name} has shape {list(shape)}, expected at least one element")
    source, dtype = _as_torch(array, name)
    storage = Storage(core, shape, dtype, region, name)
    storage.charge(core.rank.hbm)
    storage.location = None
    storage.role = role
    storage.full = True
    format = storage.format
    host = source.detach()
    if format is FLOAT32 and host.dtype is not torch.float32:
        data = dtype.precise.decode(host)
    else:
        data = host if host.dtype is format.torch else host.to(format.torch)
    data = data.contiguous()
    storage.data = data.reshape(-1)
    shares = data.data_ptr() == host.data_ptr() and source.data_ptr() == _pointer(array)
    if write_back is not None and not shares:
        write_back.append(lambda: _copy_back(array, NkiTensor(shape, dtype, storage)))
    return NkiTensor(shape, dtype, storage)


def _pointer(array: torch.Tensor | np.ndarray[Any, Any]) -> int:
    return array.data_ptr() if isinstance(array, torch.Tensor) else int(array.__array_interface__["data"][0])


def _as_torch(array: torch.Tensor | np.ndarray[Any, Any], name: str) -> tuple[torch.Tensor, DType]:
    """The array as a torch tensor of its NKI dtype's storage; 64-bit integers become int32, as on the device."""
    if isinstance(array, torch.Tensor):
        if array.device.type != "cpu":
            fail("kernel-argument", f"{name} is on {array.device}, the simulator takes CPU tensors")
        if array.dtype is torch.int64:
            return _narrow(array, name), int32
        if array.dtype is torch.bool:
            return array.view(torch.uint8), bool_
        return array, _argument_dtype(array.dtype, name)
    return _from_numpy(array, name)


def _from_numpy(array: np.ndarray[Any, Any], name: str) -> tuple[torch.Tensor, DType]:
    if array.dtype == np.int64:
        return _narrow(torch.from_numpy(np.ascontiguousarray(array)), name), int32
    dtype = _argument_dtype(array.dtype, name)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    if dtype is bool_:
        return torch.from_numpy(array.view(np.uint8)), dtype
    if dtype.is_integer or dtype in (float16, float32):
        return torch.from_numpy(array), dtype
    return torch.from_numpy(array.view(_NUMPY_BITS[dtype.itemsize])).view(dtype.precise.torch), dtype


def _argument_dtype(dtype: Any, name: str) -> DType:
    try:
        return as_dtype(dtype)
    except TypeError:
        fail("kernel-argument", f"{name} has dtype {dtype}, which NKI does not have")


def _narrow(values: torch.Tensor, name: str) -> torch.Tensor:
    if values.numel() and (int(values.max()) >= 2**31 or int(values.min()) < -(2**31)):
        fail("kernel-argument", f"{name} holds 64-bit integers that do not fit in int32")
    return values.to(torch.int32)


def _copy_back(array: torch.Tensor | np.ndarray[Any, Any], tensor: NkiTensor) -> None:
    """Write the tensor's elements into the array.

    Raises:
        NkiValidationError: the kernel has written to an array that is read-only, or whose elements share memory.
    """
    if isinstance(array, torch.Tensor):
        values = from_tensor(tensor, "torch").reshape(array.shape).to(array.dtype)
        if not any(stride == 0 and size > 1 for stride, size in zip(array.stride(), array.shape, strict=True)):
            with torch.no_grad():
                array.copy_(values)
        elif not torch.equal(_bytes(values), _bytes(array.detach())):
            fail("kernel-argument", f"the kernel wrote to {tensor.name}, whose elements share memory (expand)")
    else:
        written = from_tensor(tensor, "numpy").reshape(array.shape)
        if array.flags.writeable:
            array[...] = written
        elif written.astype(array.dtype).tobytes() != array.tobytes():
            fail("kernel-argument", f"the kernel wrote to {tensor.name}, a read-only array")


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)


def from_tensor(tensor: NkiTensor, kind: str) -> Any:
    """The elements as a torch tensor or NumPy array that owns its memory.

    float8_e4m3 and the packed types, which torch does not have, return as their bits.
    """
    raw = tensor.raw.clone(memory_format=torch.contiguous_format)
    dtype = tensor.dtype
    if tensor.format is not dtype.precise:
        raw = raw if kind == "numpy" else dtype.precise.encode(raw)
    if dtype is bool_:
        raw = raw.view(torch.bool)
    if kind == "torch":
        return raw
    if dtype.kind in ("integer", "bool") or raw.dtype in (torch.float16, torch.float32):
        return raw.numpy()
    try:
        import ml_dtypes
    except ImportError:
        return raw.to(torch.float32).numpy()
    return raw.view(torch.int16 if dtype.itemsize == 2 else torch.uint8).numpy().view(getattr(ml_dtypes, str(dtype)))

"""Memories of a core: storage of tensors, capacity, and which elements have been written.

A tensor's bytes are created at its first access, so allocating is cheap and a cost-only run needs none. Capacity counts
what is live, as the device's allocator would: a tensor lives from its allocation to its last use. Python keeps some
tensors alive longer than that (a loop variable holds the last iteration's tile), so when the sum of existing tensors
exceeds the capacity nothing is raised yet; the overflow is remembered, and it becomes an error when enough of the
tensors that existed then are used again later.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import location
from .core import fail
from .dtypes import DType, Format
from .enums import MemoryRegion
from .errors import CapacityError
from .integers import integers
from .rules import RULES

if TYPE_CHECKING:
    from .core import Core


class Overflow:
    """A moment at which more bytes existed than fit; an error once more than `capacity` of them prove live."""

    def __init__(self, pool: Pool, newest: Storage) -> None:
        self.pool = pool
        self.live: list[str] = [newest.describe()]
        self.live_bytes = newest.pool_bytes
        self.location = newest.location

    def confirm(self, storage: Storage) -> None:
        """Note that `storage` was used after this moment, so it was live at it."""
        self.live.append(storage.describe())
        self.live_bytes += storage.pool_bytes
        if self.live_bytes > self.pool.capacity:
            self.pool.overflow(self)


class Pool:
    """Capacity of one memory: an SBUF partition, a PSUM partition, or the HBM of a rank.

    Attributes:
        capacity: bytes.
        unit: allocations take a multiple of so many bytes (a bank in PSUM).
        used: bytes of the tensors that exist now.
        peak: largest `used` so far.
    """

    def __init__(self, rule: str, capacity: int, unit: int = 1, enforced: bool = True) -> None:
        self.rule = rule
        self.capacity = capacity
        self.unit = unit
        self.enforced = enforced
        self.used = 0
        self.peak = 0
        self.storages: dict[int, weakref.ref[Storage]] = {}

    def take(self, storage: Storage) -> None:
        """Account for a new tensor."""
        self.used += storage.pool_bytes
        if self.used > self.peak:
            self.peak = self.used
        if not self.enforced:
            return
        storage.location = location.caller()
        self.storages[id(storage)] = weakref.ref(storage)
        if self.used > self.capacity:
            self._remember_overflow(storage)

    def give(self, storage: Storage) -> None:
        """Account for the end of a tensor."""
        self.used -= storage.pool_bytes
        self.storages.pop(id(storage), None)

    def _remember_overflow(self, newest: Storage) -> None:
        moment = Overflow(self, newest)
        if moment.live_bytes > self.capacity:
            self.overflow(moment)
        for reference in list(self.storages.values()):
            storage = reference()
            if storage is not None and storage is not newest:
                storage.overflows.append(moment)

    def overflow(self, moment: Overflow) -> None:
        """Raise for an overflow whose live bytes exceed the capacity, with the map of what was live."""
        listing = "\n".join(f"  {line}" for line in moment.live)
        raise CapacityError(
            f"{moment.live_bytes} bytes are live, {self.capacity} exist ({RULES[self.rule].statement}):\n{listing}",
            rule=self.rule,
            location=location.show(moment.location),
        )


class Arena:
    """One whole on-chip memory, in which tensors with a manual address overlap as they do on the device.

    Declaring a tensor at an address writes nothing there: it holds what was last written to those bytes.
    """

    def __init__(self, partitions: int, partition_bytes: int) -> None:
        self.partition_bytes = partition_bytes
        self.bytes = torch.empty(partitions * partition_bytes, dtype=torch.uint8)
        self.written = np.zeros(partitions * partition_bytes, dtype=np.bool_)
        self.by_matmul = np.zeros(partitions * partition_bytes, dtype=np.bool_)

    def poison(self, storage: Storage) -> None:
        """Fill the bytes of `storage` that nothing has written yet with ones, which is NaN in every float format."""
        assert storage.address is not None
        first, offset = storage.address
        window = (
            slice(first, first + storage.shape[0]),
            slice(offset, offset + storage.free_elements * storage.dtype.itemsize),
        )
        data = self.bytes.numpy().reshape(-1, self.partition_bytes)[window]
        data[~self.written.reshape(-1, self.partition_bytes)[window]] = 0xFF


class Storage:
    """The memory behind a tensor and all its views.

    Attributes:
        shape: of the tensor it was made for, in elements of `dtype`.
        free_elements: elements per partition on chip; 0 in HBM.
        partition: first partition on chip.
        address: (partition, byte offset within the partition) when given by the kernel, else None.
        by_matmul: which bytes of a PSUM tensor a matmul wrote last, without a manual address; see psum.py.
        role: "input" for kernel arguments, "constant", "output" once returned, else "scratch".
        communicated: a collective has used it.
        full: every element has been written.
        shares_with: another argument that shares its memory, or an empty string; see argument_overlap.py.
        overflows: moments of overflow since its last use.
        history: its accesses on the cost model's timeline, or None.
    """

    __slots__ = (
        "__weakref__",
        "_views",
        "address",
        "arena",
        "by_matmul",
        "communicated",
        "data",
        "dtype",
        "elements",
        "format",
        "free_elements",
        "full",
        "grain",
        "history",
        "location",
        "loop",
        "name",
        "overflows",
        "partition",
        "pool",
        "pool_bytes",
        "region",
        "role",
        "shape",
        "shares_with",
        "written",
    )  # fmt: skip

    def __init__(self, core: Core, shape: Sequence[int], dtype: DType, region: MemoryRegion, name: str) -> None:
        elements = 1
        for size in shape:
            elements *= size
        on_chip = region is MemoryRegion.sbuf or region is MemoryRegion.psum
        self.shape = tuple(shape)
        self.dtype = dtype
        self.region = region
        self.name = name
        self.elements = elements
        self.free_elements = elements // shape[0] if on_chip else 0
        self.format: Format = dtype.precise if core.precise else dtype.wide
        self.partition = 0
        self.address: tuple[int, int] | None = None
        self.arena: Arena | None = None
        self.loop = core.loop
        self.role = "scratch"
        self.communicated = False
        self.data: torch.Tensor | None = None
        self.full = False
        self.written: np.ndarray[Any, np.dtype[np.bool_]] | None = None
        self.grain = dtype.itemsize
        self.by_matmul: bool | np.ndarray[Any, np.dtype[np.bool_]] = False
        self.location: tuple[str, int] | None = None
        self.overflows: list[Overflow] = []
        self.shares_with = ""
        self.history: Any = None
        self.pool: Pool | None = None
        self.pool_bytes = 0
        self._views: dict[torch.dtype, torch.Tensor] = {}

    def charge(self, pool: Pool) -> None:
        """Account for this storage in `pool` until it is garbage."""
        size = (self.free_elements or self.elements) * self.dtype.itemsize
        self.pool_bytes = -(-size // pool.unit) * pool.unit
        self.pool = pool
        pool.take(self)

    def __del__(self) -> None:
        if self.pool is not None:
            self.pool.give(self)

    def describe(self) -> str:
        """One line of an allocation map."""
        where = location.show(self.location) or "kernel argument"
        return f"{self.pool_bytes:>10} B  {self.name} {list(self.shape)} {self.dtype} at {where}"

    def on_bytes_of(self, other: Storage) -> bool:
        """Whether this tensor and another one have manual addresses at which they share bytes."""
        if self.arena is not other.arena or self.address is None or other.address is None:
            return False
        (partition, offset), (other_partition, other_offset) = self.address, other.address
        return (
            partition < other_partition + other.shape[0]
            and other_partition < partition + self.shape[0]
            and offset < other_offset + other.free_elements * other.dtype.itemsize
            and other_offset < offset + self.free_elements * self.dtype.itemsize
        )

    def touched(self) -> None:
        """Tell the moments of overflow that this storage was still live."""
        moments, self.overflows = self.overflows, []
        for moment in moments:
            moment.confirm(self)

    def flat(self, dtype: torch.dtype, fresh: bool = False) -> torch.Tensor:
        """The elements as a flat tensor of `dtype`. `fresh`: all are about to be written, so skip the poison."""
        found = self._views.get(dtype)
        if found is not None:
            return found
        if self.data is None:
            if self.arena is not None:
                self.data = self.arena.bytes
            elif fresh:
                self.data = torch.empty(self.elements, dtype=self.format.torch)
            else:
                self.data = poisoned(self.elements, self.format)
        found = self.data if self.data.dtype is dtype else self.data.view(dtype)
        self._views[dtype] = found
        return found

    def flags(self, itemsize: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """One written-flag per `self.grain` bytes, with a grain of at most `itemsize`."""
        if self.arena is not None:
            self.grain = 1
            return self.arena.written
        if self.written is None:
            self.grain = min(self.grain, itemsize)
            self.written = np.full(self.elements * self.dtype.itemsize // self.grain, self.full, dtype=np.bool_)
        elif itemsize < self.grain:
            self.written = np.repeat(self.written, self.grain // itemsize)
            self.grain = itemsize
        return self.written


def poisoned(elements: int, format: Format) -> torch.Tensor:
    """Fresh memory: NaN for floats, 4 for integers."""
    if format.torch is torch.float32:
        return torch.full((elements,), float("nan"))
    if format.torch.is_floating_point:
        return format.encode(torch.full((elements,), float("nan")))
    return torch.full((elements,), format.poison, dtype=torch.int64).to(format.torch)


def allocate(
    core: Core,
    shape: Sequence[int],
    dtype: DType,
    region: MemoryRegion,
    name: str,
    address: tuple[int, int] | None = None,
) -> Storage:
    """Allocate memory for a tensor on `core`.

    Args:
        address: (first partition, byte offset within each partition) on chip, or None to let the allocator choose.

    Raises:
        CapacityError: more is live than fits.
        OutOfBoundsError: the address is outside the memory, or inside a PSUM bank.
    """
    if region is MemoryRegion.shared_hbm and core.rank.lnc > 1:
        return _shared(core, shape, dtype, name)
    storage = Storage(core, shape, dtype, region, name)
    if address is None:
        storage.charge(core.pools[region])
    else:
        _place(core, storage, address)
    return storage


def _shared(core: Core, shape: Sequence[int], dtype: DType, name: str) -> Storage:
    """The n-th shared tensor of each program instance is one tensor (all run the same program)."""
    position, core.shared_count = core.shared_count, core.shared_count + 1
    shared = core.rank.shared
    if position == len(shared):
        storage = Storage(core, shape, dtype, MemoryRegion.shared_hbm, name)
        storage.charge(core.pools[MemoryRegion.shared_hbm])
        shared.append([storage, 1, storage.shape, dtype])
        return storage
    storage, users, first_shape, first_dtype = shared[position]
    if first_shape != tuple(shape) or first_dtype != dtype:
        fail(
            "shared-allocation",
            f"shared tensor number {position} is {list(shape)} {dtype} on core {core.program_id}, "
            f"{list(first_shape)} {first_dtype} on another core",
        )
    shared[position][1] = users + 1
    if users + 1 == core.rank.lnc:
        shared[position][0] = None
    return storage  # type: ignore[no-any-return]


def _place(core: Core, storage: Storage, address: tuple[int, int]) -> None:
    region, target = storage.region, core.target
    if region not in core.pools or not storage.free_elements:
        fail("address", f"only SBUF and PSUM tensors take an address, {storage.name} is in {region}")
    place = integers(address, "address")
    if len(place) != 2:
        fail("address", f"address is {address!r}, expected (partition, byte)")
    partition, offset = place
    size = storage.free_elements * storage.dtype.itemsize
    bank = target.psum_bank_bytes
    limit = target.psum_partition_bytes if region is MemoryRegion.psum else target.partition_bytes
    if partition < 0 or partition + storage.shape[0] > target.partitions:
        fail("address", f"partitions {partition} to {partition + storage.shape[0] - 1} of {storage.name} do not exist")
    if offset < 0 or offset + size > limit:
        fail(
            "address",
            f"bytes {offset} to {offset + size - 1} of {storage.name} are outside a partition of {limit} bytes",
        )
    if region is MemoryRegion.psum and offset % bank:
        fail("address", f"byte {offset} of {storage.name} is not the start of a PSUM bank of {bank} bytes")
    if offset % storage.dtype.itemsize:
        fail("address", f"byte {offset} of {storage.name} is not aligned to its {storage.dtype.itemsize}-byte elements")
    if region not in core.arenas:
        core.arenas[region] = Arena(target.partitions, limit)
    storage.address = (partition, offset)
    storage.partition = partition
    if core.precise:  # otherwise elements are wider than on the device and cannot share its bytes
        storage.arena = core.arenas[region]
        storage.arena.poison(storage)

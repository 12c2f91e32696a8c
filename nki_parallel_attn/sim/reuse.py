"""When space in SBUF and PSUM becomes free again, on the timeline.

The device's allocator places a tensor where dead tensors were, so its first write waits for their last use. Here a new
tensor takes space that was never used while there is some, then the space that was freed earliest: a perfect allocator
without fragmentation. A tensor that Python still holds counts as dead after its last use, as in memory.py.
"""

from __future__ import annotations

import heapq
from typing import Any


class Tenant:
    """One tensor's place.

    Attributes:
        end: when its last use so far ends, and `by` what.
        first, last: instruction counts of its first and last use.
        lent: bytes already given to others while Python held it.
    """

    __slots__ = ("by", "end", "first", "last", "lent", "size")

    def __init__(self, size: int, now: int) -> None:
        self.size = size
        self.end = 0.0
        self.by: Any = None
        self.first = self.last = now
        self.lent = 0


class Space:
    """One on-chip memory of a core, in bytes per partition.

    Attributes:
        capacity: bytes.
        lives: (first use, last use, bytes) of tensors that are gone.
        placed: end of the highest manual address.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.lives: list[tuple[int, int, int]] = []
        self.placed = 0
        self._fresh = capacity
        self._freed: list[tuple[float, int, int, Any]] = []
        self._tenants: set[Tenant] = set()
        self._count = 0

    def admit(self, size: int, now: int) -> tuple[Tenant, float, Any]:
        """A place of `size` bytes, when it is free, and what used it last."""
        tenant = Tenant(size, now)
        ready, cause = 0.0, None
        if self._fresh >= size:
            self._fresh -= size
        else:
            ready, cause = self._reuse(size - self._fresh)
            self._fresh = 0
        self._tenants.add(tenant)
        return tenant, ready, cause

    def _reuse(self, needed: int) -> tuple[float, Any]:
        ready, cause = 0.0, None
        while needed > 0 and self._freed:
            end, _, size, by = heapq.heappop(self._freed)
            if end > ready:
                ready, cause = end, by
            if size > needed:
                self._free(end, size - needed, by)
            needed -= size
        if needed > 0:
            for tenant in sorted(self._tenants, key=lambda t: t.end):
                taken = min(needed, tenant.size - tenant.lent)
                if taken:
                    tenant.lent += taken
                    needed -= taken
                    if tenant.end > ready:
                        ready, cause = tenant.end, tenant.by
                if needed <= 0:
                    break
        return ready, cause

    def release(self, tenant: Tenant) -> None:
        """The tensor is gone."""
        self._tenants.discard(tenant)
        self.lives.append((tenant.first, tenant.last, tenant.size))
        if tenant.size > tenant.lent:
            self._free(tenant.end, tenant.size - tenant.lent, tenant.by)

    def _free(self, end: float, size: int, by: Any) -> None:
        self._count += 1
        heapq.heappush(self._freed, (end, self._count, size, by))

    def peak(self) -> int:
        """Most bytes between first and last use at one time, in program order."""
        lives = [*self.lives, *((t.first, t.last, t.size) for t in self._tenants)]
        changes = sorted([(first, size) for first, _, size in lives] + [(last + 1, -size) for _, last, size in lives])
        highest = current = 0
        for _, change in changes:
            current += change
            highest = max(highest, current)
        return highest + self.placed

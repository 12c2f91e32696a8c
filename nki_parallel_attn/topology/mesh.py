"""RankMesh: ranks 0..world_size-1 as a grid with named axes, and the replica groups of any product of axes.

    mesh = RankMesh({"replica": 2, "kv_group": 2, "kvp": 4})    # outermost axis first: rank 13 = (1, 1, 1)
    mesh.groups("kvp")                                          # [0, 1, 2, 3], [4, 5, 6, 7], ...
    mesh.groups("kv_group", "kvp")                              # [0..7], [8..15]

A different rank order is the same mesh with its axes listed in another order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.sim.replica_group import ReplicaGroup


@dataclass(frozen=True, init=False)
class RankMesh:
    """Ranks laid out row-major over named axes, the last axis varying fastest.

    Args:
        axes: size of each axis by name, outermost first.

    Raises:
        ArgumentError: no axis, a name that is not a non-empty string, or a size that is not a positive integer.
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, axes: Mapping[str, int]) -> None:
        if not axes:
            raise ArgumentError("axes", axes, "at least one named axis")
        for name, size in axes.items():
            if not isinstance(name, str) or not name:
                raise ArgumentError("axes", repr(name), "axis names that are non-empty strings")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ArgumentError(f"axes[{name!r}]", repr(size), "a positive integer")
        object.__setattr__(self, "axes", tuple(axes.items()))

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Axis sizes, outermost first."""
        return tuple(size for _, size in self.axes)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    def size(self, *axes: str) -> int:
        """Number of ranks in one group of `axes`: the product of their sizes, 1 for none."""
        sizes = dict(self.axes)
        return math.prod(sizes[name] for name in self._known(axes))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinate of `rank` on every axis, outermost first.

        Raises:
            ArgumentError: a rank outside the mesh.
        """
        self._check_rank(rank)
        reversed_coordinates: list[tuple[str, int]] = []
        for name, size in reversed(self.axes):
            rank, coordinate = divmod(rank, size)
            reversed_coordinates.append((name, coordinate))
        return dict(reversed(reversed_coordinates))

    def rank(self, **coordinates: int) -> int:
        """The rank at `coordinates`, one for each axis; the inverse of `coordinates(rank)`.

        Raises:
            ArgumentError: an axis missing or unknown, or a coordinate outside its axis.
        """
        self._known(tuple(coordinates))
        missing = [name for name in self.names if name not in coordinates]
        if missing:
            raise ArgumentError("coordinates", coordinates, f"one for each axis of {self}", f"missing {missing}")
        rank = 0
        for name, size in self.axes:
            coordinate = coordinates[name]
            if isinstance(coordinate, bool) or not isinstance(coordinate, int) or not 0 <= coordinate < size:
                raise ArgumentError(name, repr(coordinate), f"an integer, 0 <= {name} < {size}")
            rank = rank * size + coordinate
        return rank

    def index(self, rank: int, *axes: str) -> int:
        """Place of `rank` in its list of `groups(*axes)`: row-major over `axes` in the order given."""
        coordinates = self.coordinates(rank)
        sizes = dict(self.axes)
        index = 0
        for name in self._known(axes):
            index = index * sizes[name] + coordinates[name]
        return index

    def groups(self, *axes: str) -> ReplicaGroup:
        """Rank lists that vary over `axes` while every other axis is fixed.

        Inside a list, ranks run row-major over `axes` in the order given; the lists run row-major over the other axes.
        No axis at all puts each rank in a list of its own.

        Raises:
            ArgumentError: an unknown axis, or one named twice.
        """
        return _groups(self, self._known(axes))

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The one list of `groups(*axes)` that holds `rank`, without making the others."""
        coordinates = self.coordinates(rank)
        place = tuple(slice(None) if name in self._known(axes) else coordinates[name] for name in self.names)
        kept = [name for name in self.names if name in axes]
        grid = np.arange(self.world_size).reshape(self.sizes)[place]
        return tuple(grid.transpose([kept.index(name) for name in axes]).reshape(-1).tolist())

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in self.axes)

    def _known(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        for name in axes:
            if name not in self.names:
                raise ArgumentError("axis", repr(name), f"one of {', '.join(self.names)}")
        if len(set(axes)) < len(axes):
            raise ArgumentError("axes", axes, "each axis at most once")
        return axes

    def _check_rank(self, rank: int) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise ArgumentError("rank", repr(rank), f"0 <= rank < world_size = {self.world_size}")


# A step asks for its replica groups again and again, and thousands of ranks take milliseconds to list and validate.
@lru_cache(maxsize=64)
def _groups(mesh: RankMesh, axes: tuple[str, ...]) -> ReplicaGroup:
    varying = [mesh.names.index(name) for name in axes]
    fixed = [place for place in range(len(mesh.axes)) if place not in varying]
    grid = np.arange(mesh.world_size).reshape(mesh.sizes).transpose(fixed + varying)
    lists: list[list[int]] = grid.reshape(-1, mesh.size(*axes)).tolist()
    return ReplicaGroup(lists).validate(mesh.world_size)

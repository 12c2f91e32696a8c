"""Transposes on the Tensor Engine, copied out of PSUM by Vector or Scalar, whichever has less to do."""

from __future__ import annotations

from typing import Any

from nki_parallel_attn.nki import nisa, nl

PART_BYTES = 1024
PARTS = 4
# Relative times of one element: the engines run at 0.96 and 1.2 GHz on trn2.
VECTOR_TIME = 5
SCALAR_TIME = 4


class EngineLoads(nl.NKIObject):  # type: ignore[misc]
    """What the Vector and the Scalar Engine have been given so far, in relative time."""

    def __init__(self) -> None:
        self.vector = 0
        self.scalar = 0

    def add_to_vector(self, elements: int) -> None:
        """The Vector Engine gets so many elements per partition of other work."""
        self.vector += elements * VECTOR_TIME

    def add_to_scalar(self, elements: int) -> None:
        """The Scalar Engine does."""
        self.scalar += elements * SCALAR_TIME

    def least_loaded(self, elements: int) -> Any:
        """The engine that is done first with so many elements per partition more; they count as given to it."""
        if self.vector + elements * VECTOR_TIME <= self.scalar + elements * SCALAR_TIME:
            self.vector += elements * VECTOR_TIME
            return nisa.engine.vector
        self.scalar += elements * SCALAR_TIME
        return nisa.engine.scalar


class Transposer(nl.NKIObject):  # type: ignore[misc]
    """Transposes batches of tiles of one dtype through two PSUM banks in four parts.

    Attributes:
        width: columns of one part.
        engines: loads of those that copy out of PSUM.
    """

    def __init__(self, dtype: Any) -> None:
        self.itemsize = nl_itemsize(dtype)
        self.width = PART_BYTES // self.itemsize
        self.psum = nl.ndarray((128, PARTS, self.width), dtype=dtype, buffer=nl.psum)
        self.part = 0
        self.engines = EngineLoads()

    def batch(self, columns: int) -> int:
        """How many tiles of so many result columns fit one part."""
        return self.width // columns

    def transpose(self, tiles: list[Any], dst: Any) -> None:
        """dst[:, i*rows : (i+1)*rows] = tiles[i].T; tiles [rows, columns] in SBUF, dst [columns, n*rows] contiguous."""
        rows, columns = tiles[0].shape
        for i in range(len(tiles)):
            nisa.nc_transpose(dst=self.psum[:columns, self.part, i * rows : (i + 1) * rows], data=tiles[i])
        src = self.psum[:columns, self.part, : len(tiles) * rows]
        # Bit for bit; pairs of 16-bit elements as one 32-bit element, which halves the time. An odd number of rows can
        # have `dst` begin in the middle of a pair.
        if self.itemsize == 2 and rows % 2 == 0:
            src, dst = src.view(nl.float32), dst.view(nl.float32)
        nisa.tensor_copy(dst=dst, src=src, engine=self.engines.least_loaded(src.shape[1]))
        self.part = (self.part + 1) % PARTS


def nl_itemsize(dtype: Any) -> int:
    """Bytes of an element of the dtypes that queries may have."""
    return 4 if dtype == nl.float32 else 2

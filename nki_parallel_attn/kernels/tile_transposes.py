"""Transposes on the Tensor Engine: through one PSUM bank of two halves, copied out by the engine that has time."""

from __future__ import annotations

from typing import Any

from nki_parallel_attn.nki import nisa, nl

HALF_BYTES = 1024
# Of four copies out of PSUM the Scalar Engine makes three: it copies 4 bytes per cycle, as the Vector Engine does at a
# lower clock, and the Vector Engine has the maxima to find.
COPIES_PER_VECTOR_COPY = 4


class Transposer(nl.NKIObject):  # type: ignore[misc]
    """Transposes batches of tiles of one dtype and one shape class.

    Attributes:
        width: columns of one half.
    """

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        self.itemsize = nl_itemsize(dtype)
        self.width = HALF_BYTES // self.itemsize
        self.bank = nl.ndarray((128, 2, self.width), dtype=dtype, buffer=nl.psum)
        self.half = 0
        self.copies = 0

    def batch(self, columns: int) -> int:
        """How many tiles of so many result columns fit one half."""
        return self.width // columns

    def transpose(self, tiles: list[Any], dst: Any) -> None:
        """dst[:, i*rows : (i+1)*rows] = tiles[i].T; tiles [rows, columns] in SBUF, dst [columns, n*rows] contiguous."""
        rows, columns = tiles[0].shape
        for i in range(len(tiles)):
            nisa.nc_transpose(dst=self.bank[:columns, self.half, i * rows : (i + 1) * rows], data=tiles[i])
        self.copy_out(dst, self.bank[:columns, self.half, : len(tiles) * rows])
        self.half = 1 - self.half

    def to_columns(self, rows: Any) -> Any:
        """int32 [n, k] from float32 [k, n] of whole numbers."""
        count, length = rows.shape
        turned = self.bank[:length, self.half, :].view(nl.float32)[:, :count]
        nisa.nc_transpose(dst=turned, data=rows)
        return self.integers(turned)

    def spread(self, rows: Any, over: Any) -> Any:
        """int32 [n, k]: over.T @ rows, from float32 rows [m, k] of whole numbers and over [m, n] of zeros and ones."""
        result = self.bank[: over.shape[1], self.half, :].view(nl.float32)[:, : rows.shape[1]]
        nisa.nc_matmul(dst=result, stationary=over, moving=rows, accumulate=False)
        return self.integers(result)

    def integers(self, values: Any) -> Any:
        """Copy of half of the bank, as int32."""
        copy = nl.ndarray(values.shape, dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=copy, src=values)
        self.half = 1 - self.half
        return copy

    def copy_out(self, dst: Any, src: Any) -> None:
        """Copy out of PSUM bit for bit; pairs of 16-bit elements as one 32-bit element, which halves the time."""
        if self.itemsize == 2 and src.shape[1] % 2 == 0:
            src, dst = src.view(nl.float32), dst.view(nl.float32)
        unit = nisa.engine.vector if self.copies % COPIES_PER_VECTOR_COPY == 0 else nisa.engine.scalar
        self.copies += 1
        nisa.tensor_copy(dst=dst, src=src, engine=unit)


def nl_itemsize(dtype: Any) -> int:
    """Bytes of an element of the dtypes that queries may have."""
    return 4 if dtype == nl.float32 else 2

"""Sums of weights times V: the weights are transposed, multiplied with V in PSUM, and the sums collected.

The Tensor Engine transposes most tiles of weights, in batches that are copied out of PSUM while it multiplies the batch
before. The DMA engines transpose one tile of every few units, which takes them long and the others nothing; its product
comes later. So a row's tiles are multiplied in any order, several rows at a time, but collected in order.
"""

from __future__ import annotations

from typing import Any

from nki_parallel_attn.kernels.element_wise import gpsimd
from nki_parallel_attn.kernels.tile_transposes import Transposer
from nki_parallel_attn.nki import nisa, nl

BANK = 512
PRODUCT_BANKS = 2
TRANSPOSED_BUFFERS = 6
# The DMA engines transpose one tile of every so many units that allow it, and have so many batches' time for it.
UNITS_PER_DMA = 5
BATCHES_FOR_DMA = 12
DMA_BUFFERS = 8
# Batches that are transposed before one is multiplied: the time in which it is copied.
BATCHES_BETWEEN = 2


class Rows(nl.NKIObject):  # type: ignore[misc]
    """One head's tile of queries against one segment: what becomes one product.

    Attributes:
        left: tiles that have not been multiplied; complete: all its units are known.
        last: its last unit, which says where the sums go.
    """

    def __init__(self, product: Any) -> None:
        self.product = product
        self.left = 0
        self.complete = False
        self.started = False
        self.last = None  # type: Any


class WeightedValues(nl.NKIObject):  # type: ignore[misc]
    """Takes units whose weights are there, in order."""

    def __init__(self, rows: int, slots: int, width: int, dtype: Any, transposer: Transposer) -> None:
        """`rows` of a query tile, `slots` of a slot tile, `width` of V with its extra columns."""
        self.rows = rows
        self.slots = slots
        self.width = width
        self.transposer = transposer
        self.per_bank = BANK // width
        self.products = [
            nl.ndarray((rows, self.per_bank, width), dtype=nl.float32, buffer=nl.psum) for _ in range(PRODUCT_BANKS)
        ]
        self.batch = transposer.batch(rows)
        self.transposed = [
            nl.ndarray((slots, self.batch * rows), dtype=dtype, buffer=nl.sbuf) for _ in range(TRANSPOSED_BUFFERS)
        ]
        self.by_dma = [nl.ndarray((slots, rows), dtype=dtype, buffer=nl.sbuf) for _ in range(DMA_BUFFERS)]
        self.parts = [nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf) for _ in range(2)]
        self.batches = 0
        self.allowing = 0
        self.transfers = 0
        self.started = 0
        self.collected = 0
        self.open_rows = []  # type: list[Rows]
        self.due = []  # type: list[Any]
        self.due_later = []  # type: list[Any]

    def send_to_dma(self, unit: Any) -> None:
        """Have the DMA engines transpose the unit's last tile, if it is its turn; its weights have been issued."""
        if unit.closes or unit.tiles < 2:
            return
        self.allowing += 1
        if self.allowing % UNITS_PER_DMA:
            return
        buffer = self.by_dma[self.transfers % DMA_BUFFERS]
        self.transfers += 1
        last = unit.weights[:, (unit.tiles - 1) * self.slots : unit.tiles * self.slots]
        nisa.dma_transpose(dst=buffer, src=last)
        unit.by_dma = buffer

    def apply(self, unit: Any) -> None:
        """Transpose a unit's weights; multiply those of the batch before."""
        slots, tiles = self.slots, unit.tiles
        if unit.opens:
            self.open(unit)
        rows = self.open_rows[-1]
        rows.left += tiles
        rows.complete = unit.closes
        rows.last = unit
        if unit.by_dma is not None:
            tiles -= 1
            self.due_later.append([self.batches + BATCHES_FOR_DMA, rows, unit, tiles, 1, unit.by_dma])
        for start in range(0, tiles, self.batch):
            count = min(self.batch, tiles - start)
            transposed = self.transposed[self.batches % TRANSPOSED_BUFFERS]
            self.batches += 1
            weights = [unit.weights[:, t * slots : (t + 1) * slots] for t in range(start, start + count)]
            self.transposer.transpose(weights, transposed[:, : count * self.rows])
            # One batch late: the copy of this one runs while the Tensor Engine multiplies the one before.
            while len(self.due) >= BATCHES_BETWEEN:
                self.multiply(self.due.pop(0))
            self.due.append([0, rows, unit, start, count, transposed])
        while self.due_later and self.due_later[0][0] <= self.batches:
            self.multiply(self.due_later.pop(0))

    def flush(self) -> None:
        """Multiply what is left."""
        while self.due:
            self.multiply(self.due.pop(0))
        while self.due_later:
            self.multiply(self.due_later.pop(0))

    def open(self, unit: Any) -> None:
        """Begin with a unit's rows: they need a place in PSUM."""
        while len(self.open_rows) == PRODUCT_BANKS * self.per_bank:
            if self.due:
                self.multiply(self.due.pop(0))
            else:
                self.multiply(self.due_later.pop(0))
        number = self.started % (PRODUCT_BANKS * self.per_bank)
        self.started += 1
        self.open_rows.append(Rows(self.products[number // self.per_bank][:, number % self.per_bank, :]))

    def multiply(self, item: list[Any]) -> None:
        """Multiply transposed tiles of weights with their tiles of V; collect the rows that this finishes."""
        _, rows, unit, start, count, transposed = item
        for t in range(count):
            nisa.nc_matmul(
                dst=rows.product,
                stationary=transposed[:, t * self.rows : (t + 1) * self.rows],
                moving=unit.segment.v[:, unit.first + start + t, :],
                accumulate=rows.started,
            )
            rows.started = True
        rows.left -= count
        while self.open_rows and self.open_rows[0].complete and not self.open_rows[0].left:
            self.collect(self.open_rows.pop(0))

    def collect(self, rows: Rows) -> None:
        """Add a segment's product to what its rows have accumulated."""
        unit = rows.last
        acc = unit.partial.acc[:, unit.tile, unit.head, :]
        engine = self.transposer.engines.least_loaded(self.width)
        if unit.continues:
            part = self.parts[self.collected % 2]
            nisa.tensor_copy(dst=part, src=rows.product, engine=engine)
            gpsimd(acc, acc, unit.rescale.broadcast(1, self.width), nl.multiply)
            gpsimd(acc, acc, part, nl.add)
        else:
            nisa.tensor_copy(dst=acc, src=rows.product, engine=engine)
        self.collected += 1
        if unit.completes is not None:
            unit.completes.finish(unit.tile)

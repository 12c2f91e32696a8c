"""Attention of tiles of queries over segments of keys with online softmax, software-pipelined over all engines.

A unit is one head's tile of queries against up to 512 slots. Its three stages are issued units apart, so that
every engine finds work in program order:

    scores   Tensor: Q.K^T into PSUM;  Vector: to SBUF, masks and row maxima in one pass;  GpSimd: -scale*max
    weights  Scalar: exp(scale*s - scale*max)
    values   weighted_values.py

V has a column of ones, so the row sum comes out of the same product, of the same rounded weights, and one of marks
(paged_kv.py). Products of one segment (2048 slots) accumulate in PSUM under one maximum; only between segments are
earlier results rescaled.
Precision is lost where the weights are rounded to the dtype of V; all else is float32.
"""

from __future__ import annotations

from typing import Any

from nki_parallel_attn.kernels.element_wise import gpsimd
from nki_parallel_attn.kernels.paged_kv import EXTRA_COLUMNS, Segment
from nki_parallel_attn.kernels.tile_transposes import Transposer
from nki_parallel_attn.kernels.visible_slots import SlotMasks
from nki_parallel_attn.kernels.weighted_values import BANK, WeightedValues
from nki_parallel_attn.nki import nisa, nl

SCORE_BANKS = 4
COLUMN_RING = 64
# Scores issued before the weights of a unit: the maxima of a segment must be there for its first unit.
LOOK_AHEAD = 4096
SCORE_COLUMNS = LOOK_AHEAD + 3 * BANK
# Units whose weights are issued before the values of one.
UNAPPLIED = 3
WEIGHT_BUFFERS = 16


class Partial(nl.NKIObject):  # type: ignore[misc]
    """What the queries of one exchange have seen so far, rows on partitions.

    Attributes:
        acc: float32 [rows, tiles, heads, D + 2], sums of weight*V, of weights, and of weights of marked slots.
        shift: float32 [rows, tiles, 2, heads], -scale*max of the segments so far, the exponents' shift. Segments take
            turns in the third dim, for the weights of one may be issued after the next one's maximum.
        segments: how many segments each tile and head has seen, at compile time.
    """

    def __init__(self, rows: int, tiles: int, heads: int, dim: int) -> None:
        self.acc = nl.ndarray((rows, tiles, heads, dim + EXTRA_COLUMNS), dtype=nl.float32, buffer=nl.sbuf)
        self.shift = nl.ndarray((rows, tiles, 2, heads), dtype=nl.float32, buffer=nl.sbuf)
        self.segments = [[0] * heads for _ in range(tiles)]


class Unit(nl.NKIObject):  # type: ignore[misc]
    """One head's tile of queries against consecutive slot tiles of one segment.

    Attributes:
        q: [D, rows], the queries transposed.
        partial, tile, head: where the result goes.
        segment: keys and values; first: of `tiles` slot tiles, counted from the segment's first.
        bounds: what the queries see of them, None for all.
        opens, closes: first and last unit of this tile and head in the segment.
        completes: whose finish(tile) to call after it, or None.
        continues: the rows have seen an earlier segment.
        by_dma: where the DMA engines put its last tile of weights, transposed; None: they do not.
    """

    def __init__(
        self, q: Any, partial: Partial, tile: int, head: int, segment: Segment, first: int, tiles: int, bounds: Any
    ) -> None:
        self.q = q
        self.partial = partial
        self.tile = tile
        self.head = head
        self.segment = segment
        self.first = first
        self.tiles = tiles
        self.bounds = bounds
        self.opens = False
        self.closes = False
        self.continues = False
        self.completes = None  # type: Any
        self.shift = None  # type: Any
        self.scores = None  # type: Any
        self.weights = None  # type: Any
        self.maximum = None  # type: Any
        self.rescale = None  # type: Any
        self.by_dma = None  # type: Any


class Pipeline(nl.NKIObject):  # type: ignore[misc]
    """Takes units in order and issues their stages."""

    def __init__(
        self, rows: int, slots: int, dim: int, dtype: Any, scale: float, transposer: Transposer, masks: SlotMasks
    ) -> None:
        """`rows` of a query tile, `slots` of a slot tile; `scale` > 0 multiplies the scores."""
        self.rows = rows
        self.slots = slots
        self.scale = scale
        self.transposer = transposer
        self.masks = masks
        self.unit_tiles = BANK // slots
        self.banks = [nl.ndarray((rows, BANK), dtype=nl.float32, buffer=nl.psum) for _ in range(SCORE_BANKS)]
        self.bank_place = 0
        self.scores = nl.ndarray((rows, SCORE_COLUMNS), dtype=nl.float32, buffer=nl.sbuf)
        self.scores_place = 0
        self.weight_buffers = [nl.ndarray((rows, BANK), dtype=dtype, buffer=nl.sbuf) for _ in range(WEIGHT_BUFFERS)]
        self.maxima = nl.ndarray((rows, COLUMN_RING), dtype=nl.float32, buffer=nl.sbuf)
        self.rescales = nl.ndarray((rows, COLUMN_RING), dtype=nl.float32, buffer=nl.sbuf)
        self.values = WeightedValues(rows, slots, dim + EXTRA_COLUMNS, dtype, transposer)
        self.negated_scale = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=self.negated_scale, value=-scale)
        self.ahead = 0
        self.unweighed = []  # type: list[Unit]
        self.unapplied = []  # type: list[Unit]
        self.groups = 0
        self.units = 0
        self.columns = 0

    def push(self, unit: Unit) -> None:
        """Issue the scores of `unit`, and what is due of the later stages of earlier ones."""
        self.score(unit)
        self.unweighed.append(unit)
        self.ahead += unit.tiles * self.slots
        while self.ahead > LOOK_AHEAD:
            self.advance()

    def flush(self) -> None:
        """Issue everything that is left."""
        while self.unweighed:
            self.advance()
        while self.unapplied:
            self.values.apply(self.unapplied.pop(0))
        self.values.flush()

    def advance(self) -> None:
        """Weights of the oldest unit that has none, values of an earlier one."""
        unit = self.unweighed.pop(0)
        self.ahead -= unit.tiles * self.slots
        self.weigh(unit)
        self.unapplied.append(unit)
        if len(self.unapplied) > UNAPPLIED:
            self.values.apply(self.unapplied.pop(0))

    # Stage 1.

    def score(self, unit: Unit) -> None:
        number = self.units
        self.units = number + 1
        slots = self.slots
        columns = unit.tiles * slots
        self.columns += columns
        if self.bank_place % BANK + columns > BANK:
            self.bank_place += BANK - self.bank_place % BANK
        bank = self.banks[self.bank_place // BANK % SCORE_BANKS]
        first = self.bank_place % BANK
        self.bank_place += columns
        if self.scores_place + columns > SCORE_COLUMNS:
            self.scores_place = 0
        scores = self.scores[:, self.scores_place : self.scores_place + columns]
        self.scores_place += columns
        unit.scores = scores
        unit.weights = self.weight_buffers[number % WEIGHT_BUFFERS]
        product = bank[:, first : first + columns]
        keys = unit.segment.k[:, unit.first * slots : unit.first * slots + columns]
        nisa.nc_matmul(dst=product, stationary=unit.q, moving=keys, accumulate=False)
        command = nisa.reduce_cmd.reset_reduce if unit.opens else nisa.reduce_cmd.reduce
        maximum = None
        if unit.closes:
            column = self.groups % COLUMN_RING
            self.groups += 1
            unit.maximum = maximum = self.maxima[:, column : column + 1]
            unit.rescale = self.rescales[:, column : column + 1]
        if unit.bounds is None:
            nisa.tensor_scalar_reduce(
                dst=scores,
                data=product,
                op0=nl.multiply,
                operand0=1.0,
                reduce_op=nl.maximum,
                reduce_cmd=command,
                reduce_res=maximum,
            )
        else:
            nisa.range_select(
                dst=scores,
                on_true_tile=product,
                comp_op0=nl.greater_equal,
                comp_op1=nl.less,
                bound0=unit.bounds.first,
                bound1=unit.bounds.stop,
                range_start=unit.bounds.start,
                reduce_cmd=command,
                reduce_res=maximum,
            )
        self.transposer.engines.add_to_vector(columns)
        segments = unit.partial.segments[unit.tile][unit.head]
        unit.continues = segments > 0
        unit.shift = unit.partial.shift[:, unit.tile, segments % 2, unit.head : unit.head + 1]
        if unit.closes:
            self.settle(unit)

    def settle(self, unit: Unit) -> None:
        """Set the shift of the unit's rows, and how to rescale what they have accumulated."""
        partial, tile, head = unit.partial, unit.tile, unit.head
        seen = partial.segments[tile][head]
        partial.segments[tile][head] = seen + 1
        shift = partial.shift[:, tile, seen % 2, head : head + 1]
        gpsimd(shift, unit.maximum, self.negated_scale, nl.multiply)
        if seen:
            before = partial.shift[:, tile, 1 - seen % 2, head : head + 1]
            gpsimd(shift, shift, before, nl.minimum)
            nisa.activation(dst=unit.rescale, op=nl.exp, data=before, scale=-1.0, bias=shift)

    # Stage 2.

    def weigh(self, unit: Unit) -> None:
        columns = unit.tiles * self.slots
        self.transposer.engines.add_to_scalar(columns)
        nisa.activation(
            dst=unit.weights[:, :columns], op=nl.exp, data=unit.scores[:, :columns], bias=unit.shift, scale=self.scale
        )
        self.values.send_to_dma(unit)

"""attention_kv_parallel_segmented_cte in NKI: gather Q, attend to the local KV, exchange partials, merge; one kernel.

The rows are cut into exchanges of up to seg_size rows. Of each exchange

    1. own Q is transposed and all-gathered                         gathered_queries.py, exchanges ahead
    2. all heads attend to this rank's KV                           online_softmax.py, paged_kv.py, visible_slots.py
    3. partial outputs and log-sum-exps are exchanged all-to-all    exchanged_partials.py
    4. own heads are merged and stored                              merge_partials.py, while the next ones run

so that collectives run while the engines compute. LNC: cores take every other tile of rows through all four steps; they
share nothing but the staging buffers.
"""

from __future__ import annotations

from typing import Any

from nki_parallel_attn.kernels.element_wise import Constants, Pieces
from nki_parallel_attn.kernels.exchanged_partials import ExchangedPartials
from nki_parallel_attn.kernels.gathered_queries import GatheredQueries
from nki_parallel_attn.kernels.merge_partials import leave_empty
from nki_parallel_attn.kernels.online_softmax import Pipeline, Unit
from nki_parallel_attn.kernels.paged_kv import EXTRA_COLUMNS, PagedKV
from nki_parallel_attn.kernels.tile_transposes import Transposer
from nki_parallel_attn.kernels.visible_slots import SlotLayout, SlotMasks, filled_slots, largest_divisor
from nki_parallel_attn.nki import nisa, nki, nl

# Bytes per partition of one exchange's gathered queries and of its accumulators.
QUERY_BYTES = 8 * 1024
ACCUMULATOR_BYTES = 18 * 1024
# Exchanges whose partial results have arrived and wait to be merged.
RECEIVED = 2
# Exchanges between the one whose queries are gathered and the one that is attended.
AHEAD = 2
LEAST_SCALE = 1e-6
# GpSimd's cycles for pieces of element-wise work: per column of scores that the other engines take, less what it does
# for them itself.
CYCLES_PER_COLUMN = 1.1
CYCLES_PER_MAXIMUM = 164
# Columns of scores between two batches of K or V that are prepared ahead.
COLUMNS_PER_BATCH = 3072
# Columns of scores after which K and V are there that are read when they are announced.
COLUMNS_BEFORE_PREPARING = 2048
CYCLES_PER_STEP = 1000
# Columns of scores between two steps of an exchange, so that no engine waits for another's part of the first.
COLUMNS_PER_STEP = 2048
# Columns of scores between an all-to-all and its merge: collective and reads take as long.
COLUMNS_BEFORE_MERGE = 20480


@nki.jit  # type: ignore[untyped-decorator]
def attention_kv_parallel_segmented_cte(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    kvp_q_offset: Any,
    replica_groups: Any,
    group_size: int,
    block_size: int,
    seg_size: int,
    scale: float = 1.0,
    global_q_offset: int = 0,
    tp_out: bool = False,
    sliding_window: int = 0,
    kvp_rank_id: Any = None,
    kvp_group_size: int = 0,
    apc_mode: bool = False,
    valid_num_prior_tokens: Any = None,
    fp8_packed: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Any:
    """See ops/attention_kv_parallel_segmented_cte.py; q bfloat16, float16 or float32. Arguments are checked there.

    Tiles of queries have as many rows as divide S, 128 at most: let S be a multiple of 128. Tiles of keys that no query
    sees are skipped and those that all see are not masked where positions are known at compile time: round-robin
    without apc_mode, or one rank. Otherwise all tiles up to the end of the block table are computed and masked.
    A block that is absent (-1) though queries see its positions counts for the softmax's shift as a score of 0: rows
    whose every visible scaled score is below about -40 then lose precision.

    Source: API reference page attention_kv_parallel_segmented_cte.
    """
    ranks = kvp_group_size if kvp_group_size > 0 else 1
    limit = block_tables.shape[1]
    # Contiguous shards may end before what queries could see of them.
    known = not apc_mode and (kvp_group_size > 0 or group_size == 1)
    if not apc_mode:
        # Rank 0's slots are the earliest.
        needed = -(-(global_q_offset + q.shape[1]) // (ranks * block_size))
        known = known and (kvp_group_size > 0 or limit >= needed)
        limit = min(limit, needed)
    layout = SlotLayout(ranks, block_size, limit, -1 if apc_mode else global_q_offset, known, sliding_window)
    call = Call(q, tp_out, replica_groups, group_size, seg_size, scale, layout)
    # All reads are issued in the order in which they are needed: they share the DMA engines.
    call.queries[0].read()
    offset = local_offset(kvp_q_offset, kvp_rank_id if kvp_group_size > 0 else None, block_size)
    call.queries[0].gather()
    offset_fp32 = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=offset_fp32, src=offset)
    if v_scale is not None:
        call.v_scale = nl.ndarray((call.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=call.v_scale, src=v_scale[: call.rows, :])
    call.kv = PagedKV(
        layout,
        k_cache,
        v_cache,
        block_tables,
        offset,
        q.shape[1],
        q.dtype,
        call.transposer,
        fp8_packed,
        k_scale,
        call.constants,
    )
    first = call.kv.segment(0, 0)
    for queries in call.queries[1:2]:
        queries.read()
        queries.gather()
    call.kv.read(first, 1)
    half = -(-group_size // 2)
    call.queries[0].load(range(half))
    call.kv.read(first, 2)
    call.queries[0].load(range(half, group_size))
    for queries in call.queries[2:AHEAD]:
        queries.read()
        queries.gather()
    filled = None if known else filled_slots(block_tables, layout, call.rows)
    masks = SlotMasks(layout, call.rows, offset_fp32[: call.rows, :], filled)
    call.pipeline = Pipeline(call.rows, layout.tile, call.dim, q.dtype, call.score_scale, call.transposer, masks)
    call.attend()
    return call.out


def exchange_bounds(tiles: int, size: int) -> list[tuple[int, int]]:
    """First and last tile (exclusive) of each exchange.

    The last ones of many are small: nothing runs while the last is merged.
    """
    half = -(-size // 2)
    high = [half, half] if tiles >= 4 * size else []
    middle = tiles - sum(high)
    full = [min(size, middle - start) for start in range(0, middle, size)]
    edges = [0]
    for length in full + high:
        edges.append(edges[-1] + length)
    return [(edges[i], edges[i + 1]) for i in range(len(edges) - 1)]


def local_offset(kvp_q_offset: Any, kvp_rank_id: Any, block_size: int) -> Any:
    """int32 [128, 1]: position of Q token 0 minus this rank's first position, in the coordinates of its slots."""
    offset = nl.ndarray((128, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=offset, src=kvp_q_offset.ap([[0, 128], [1, 1]]))
    if kvp_rank_id is not None:
        rank = nl.ndarray((128, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=rank, src=kvp_rank_id.ap([[0, 128], [1, 1]]))
        size = nl.ndarray((128, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.memset(dst=size, value=block_size, engine=nisa.engine.gpsimd)
        nisa.tensor_tensor(dst=rank, data1=rank, data2=size, op=nl.multiply, engine=nisa.engine.gpsimd)
        nisa.tensor_tensor(dst=offset, data1=offset, data2=rank, op=nl.subtract, engine=nisa.engine.gpsimd)
    return offset


class Call(nl.NKIObject):  # type: ignore[misc]
    """What one call's exchanges share.

    Attributes:
        rows: of a tile of queries; tiles: of the call; exchange_tiles: of one exchange.
        heads: of the group; own_heads: of this rank.
        factor: multiplied into Q, exactly; score_scale: into the scores, in (0, 1].
        overlap: an exchange is still under way while the next one is attended.
        queries: by exchange; number: of the exchange that is being attended.
        unsent: exchanges that have not sent their partials.
        due: what the exchanges do next, and when: columns of scores that the pipeline has taken by then.
    """

    def __init__(
        self,
        q: Any,
        tp_out: bool,
        replica_groups: Any,
        group_size: int,
        seg_size: int,
        scale: float,
        layout: SlotLayout,
    ) -> None:
        self.q = q
        self.layout = layout
        self.tp_out = tp_out
        self.replica_groups = replica_groups
        self.group_size = group_size
        self.own_heads, length, self.dim = q.shape
        self.heads = self.own_heads * group_size
        self.rows = largest_divisor(length, 128)
        self.tiles = length // self.rows
        self.core = nl.program_id(0)
        self.cores = nl.num_programs(0)
        self.transposer = Transposer(q.dtype)
        fit = min(
            QUERY_BYTES // (self.heads * self.rows * self.transposer.itemsize),
            ACCUMULATOR_BYTES // (self.heads * (self.dim + EXTRA_COLUMNS) * 4),
        )
        # One tile of so many heads leaves no room for the next exchange beside it.
        self.overlap = fit > 0
        self.exchange_tiles = max(self.cores, min(seg_size // self.rows, fit * self.cores))
        # Masked scores are the smallest float32: close to 0 the scale would make them visible, above 1 infinite. Powers
        # of 2 multiply into Q without rounding.
        self.factor, self.score_scale = scale, 1.0
        if abs(scale) >= LEAST_SCALE:
            self.factor = 1.0 if scale > 0 else -1.0
            self.score_scale = abs(scale)
            while self.score_scale > 1:
                self.factor, self.score_scale = self.factor * 2, self.score_scale / 2
        shape = (self.own_heads, self.dim, length) if tp_out else (self.own_heads, length, self.dim)
        self.out = nl.ndarray(shape, dtype=q.dtype, buffer=nl.shared_hbm)
        self.elements_of_float32 = 4 // self.transposer.itemsize
        self.v_scale = None  # type: Any
        self.kv = None  # type: Any
        self.pipeline = None  # type: Any
        self.constants = Constants()
        self.urgent = Pieces()
        self.pieces = Pieces()
        self.spare = 0.0
        self.prepare_at = 0
        bounds = exchange_bounds(self.tiles, self.exchange_tiles)
        self.queries: list[Any] = [GatheredQueries(self, start, stop) for start, stop in bounds]
        self.number = 0
        self.unsent = []  # type: list[Any]
        self.due = []  # type: list[Any]

    def staged(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A buffer for collectives."""
        return nl.ndarray(shape, dtype=dtype, buffer=nl.private_hbm if self.cores == 1 else nl.shared_hbm)

    def synchronise(self, shared: Any) -> None:
        """Both cores have written their parts."""
        if self.cores == 2:
            nisa.core_barrier(data=shared, cores=(0, 1), engine=nisa.engine.sync)

    def move_queries(self) -> None:
        """Those of later exchanges: loaded one ahead, read and gathered earlier."""
        for queries in self.queries[self.number + 1 : self.number + 2]:
            queries.load(range(self.group_size))
        for queries in self.queries[self.number + AHEAD : self.number + AHEAD + 1]:
            queries.read()
            queries.gather()

    def attend(self) -> None:
        """All exchanges."""
        for number in range(len(self.queries)):
            self.number = number
            self.move_queries()
            exchange = Exchange(self, number)
            self.unsent.append(exchange)
            exchange.push_all()
            self.queries[number] = None
            while self.unsent and self.unsent[0].number < number - (1 if self.overlap else -1):
                self.complete_one()
            self.merge_early(RECEIVED if self.overlap else 0)
        while self.unsent:
            self.complete_one()
        # One exchange after the other: the last one's data are still on their way.
        while self.due:
            self.run_due(None, self.due[0][1])
            self.pieces.drain()

    def merge_early(self, limit: int) -> None:
        """Bound what exchanges have received and not merged: short ones would wait for each other in SBUF."""
        while sum(1 for item in self.due if item[2] == "weights") > limit:
            oldest = next(item[1] for item in self.due if item[2] == "weights")
            while any(item[1] is oldest for item in self.due):
                self.run_due(None, oldest)
            self.pieces.drain()

    def later(self, columns: int, exchange: Any, step: str) -> None:
        """Have `exchange` do `step` when the pipeline has taken so many more columns of scores."""
        self.due.append([self.pipeline.columns + columns, exchange, step])

    def run_due(self, now: Any, only: Any) -> None:
        """Do what is due now, without a time the next step of each exchange; of one exchange or of all."""
        waiting, self.due = self.due, []
        for item in waiting:
            if (now is None or item[0] <= now) and (only is None or item[1] is only):
                self.spare -= CYCLES_PER_STEP
                item[1].run(item[2])
            else:
                self.due.append(item)

    def between_units(self, unit: Unit) -> None:
        """Some of the work that is not attention."""
        self.spare += unit.tiles * self.layout.tile * CYCLES_PER_COLUMN - (CYCLES_PER_MAXIMUM if unit.closes else 0)
        self.spare -= self.urgent.issue(self.spare)
        self.spare -= self.pieces.issue(self.spare)
        if not self.pieces.waiting:
            self.spare = min(self.spare, 0.0)
        now = self.pipeline.columns
        # Not between two units of a maximum: it is in the Vector Engine's accumulators, which preparing keys uses too.
        if unit.closes and now >= self.prepare_at:
            self.prepare_at = now + COLUMNS_PER_BATCH
            self.kv.prepare_ahead()
        self.run_due(now, None)
        if self.unsent[0].normalised and self.may_send():
            self.unsent.pop(0).send()

    def may_send(self) -> bool:
        """Both cores do so at the same place among collectives: an exchange has its turn between two gathers."""
        oldest: int = self.unsent[0].number
        gathers_to_come = self.number + 1 + AHEAD < len(self.queries)
        return oldest <= self.number - (2 if gathers_to_come else 1)

    def complete_one(self) -> None:
        """Send the oldest exchange, draining the pipeline if it must be."""
        exchange = self.unsent.pop(0)
        if exchange.unfinished:
            self.pipeline.flush()
        while not exchange.normalised:
            self.run_due(None, exchange)
            self.urgent.drain()
        exchange.send()


class Exchange(nl.NKIObject):  # type: ignore[misc]
    """The attention of the queries that are gathered and exchanged together.

    Attributes:
        unfinished: how many of this core's tiles are.
        normalised: ready to be sent.
    """

    def __init__(self, call: Call, number: int) -> None:
        self.call = call
        self.number = number
        self.q = call.queries[number].q
        self.mine = call.queries[number].mine
        self.partials = ExchangedPartials(call, call.queries[number])
        self.unfinished = len(self.mine)
        self.normalised = not self.mine

    def push_all(self) -> None:
        """Push this core's units: by KV head, segment, head, tile. The last unit of a tile completes it."""
        call, kv, layout = self.call, self.call.kv, self.call.layout
        partial = self.partials.partial
        per_kv_head = call.heads // kv.kv_heads
        items = []  # type: list[Any]
        lasts = [-1] * len(self.mine)
        for kv_head in range(kv.kv_heads):
            for number in range(kv.segments):
                first = number * kv.segment_tiles
                tiles = range(first, min(first + kv.segment_tiles, layout.tiles))
                for head in range(kv_head * per_kv_head, (kv_head + 1) * per_kv_head):
                    for t in range(len(self.mine)):
                        row = self.mine[t] * call.rows
                        visible = [tile for tile in tiles if not layout.hidden(tile, row, call.rows)]
                        if visible:
                            lasts[t] = len(items)
                            items.append([kv_head, number, t, head, visible])
        for t in range(len(self.mine)):
            if lasts[t] < 0:
                leave_empty(partial, t)
                self.finish(t)
        step = call.pipeline.unit_tiles
        for i in range(len(items)):
            kv_head, number, t, head, visible = items[i]
            row = self.mine[t] * call.rows
            segment = kv.segment(kv_head, number)
            if i == 0 or items[i - 1][:2] != items[i][:2]:
                self.announce_next(items[i:])
                call.prepare_at = call.pipeline.columns + COLUMNS_BEFORE_PREPARING
            kv.prepare(segment, visible[-1] + 1 - segment.first)
            for start in range(0, len(visible), step):
                part = visible[start : start + step]
                bounds = call.pipeline.masks.bounds(row, part)
                first = part[0] - segment.first
                q = self.q[:, head // call.own_heads, head % call.own_heads, t, :]
                unit = Unit(q, partial, t, head, segment, first, len(part), bounds)
                unit.opens = start == 0
                unit.closes = start + step >= len(visible)
                if unit.closes and i == lasts[t]:
                    unit.completes = self
                call.pipeline.push(unit)
                call.between_units(unit)

    def announce_next(self, items: list[Any]) -> None:
        """Tell PagedKV which segment follows that of the first of the items left, and how much of it is seen."""
        call, kv, layout = self.call, self.call.kv, self.call.layout
        kv_head, number = items[0][0], items[0][1]
        for item in items:
            if item[0] != kv_head or item[1] != number:
                first = item[1] * kv.segment_tiles
                kv.announce(item[0], item[1], item[4][-1] + 1 - first, False)
                return
        # The next exchange begins with the first segment again.
        if self.number + 1 < len(call.queries) and call.queries[self.number + 1].mine:
            row = call.queries[self.number + 1].mine[-1] * call.rows
            tiles = range(min(kv.segment_tiles, layout.tiles))
            seen = [tile for tile in tiles if not layout.hidden(tile, row, call.rows)]
            kv.announce(0, 0, seen[-1] + 1 if seen else 0, self.number > 0)

    def finish(self, t: int) -> None:
        """A tile is complete."""
        self.unfinished -= 1
        if not self.unfinished:
            self.call.later(COLUMNS_PER_STEP, self, "sums")

    def run(self, step: str) -> None:
        """One step after the attention; the next one is due later."""
        call, partials = self.call, self.partials
        if step == "sums":
            partials.take_sums()
            call.later(COLUMNS_PER_STEP, self, "normalise")
        elif step == "normalise":
            partials.normalise()
            call.urgent.then(self, 0)
        elif step == "weights":
            partials.take_weights()
            call.later(COLUMNS_PER_STEP, self, "add up")
        elif step == "add up":
            partials.weights.add_up()
            call.later(COLUMNS_PER_STEP, self, "merge")
        else:
            partials.merge()

    def pieces_done(self, argument: int) -> None:
        """All outputs are normalised."""
        self.normalised = True

    def send(self) -> None:
        """Exchange the partial results."""
        self.partials.send()
        if self.mine:
            self.call.later(COLUMNS_BEFORE_MERGE, self, "weights")

"""attention_kv_parallel_segmented_cte in NKI: gather Q, attend to the local KV, exchange partials, merge; one kernel.

The rows are cut into exchanges of about seg_size rows, last rows first, since they see most. Of each exchange

    1. own Q is transposed and all-gathered                         HBM staging, one exchange ahead
    2. all heads attend to this rank's KV                           online_softmax.py, paged_kv.py, visible_slots.py
    3. partial outputs and log-sum-exps are exchanged all-to-all    HBM staging
    4. own heads are merged and stored                              merge_partials.py, while the next ones run

so that collectives run while the engines compute. LNC: cores take every other tile of rows through all four steps; they
share nothing but the staging buffers.
"""

from __future__ import annotations

from typing import Any

from nki_parallel_attn.kernels.merge_partials import Pieces, leave_empty, merge, merge_weights, normalise
from nki_parallel_attn.kernels.online_softmax import Partial, Pipeline, Unit
from nki_parallel_attn.kernels.paged_kv import EXTRA_COLUMNS, PagedKV
from nki_parallel_attn.kernels.tile_transposes import Transposer
from nki_parallel_attn.kernels.visible_slots import SlotLayout, SlotMasks, largest_divisor
from nki_parallel_attn.nki import ncc, nisa, nki, nl

# Bytes per partition of one exchange's gathered queries and of its accumulators.
QUERY_BYTES = 16 * 1024
ACCUMULATOR_BYTES = 36 * 1024
LEAST_SCALE = 1e-6
# Pieces of element-wise work between two units.
PIECES_PER_UNIT = 2
# Units between the all-to-all of an exchange and its merge: collective and reads take as long.
UNITS_BEFORE_MERGE = 48


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
    whose every visible scaled score is below about -80 then lose precision.

    Source: API reference page attention_kv_parallel_segmented_cte.
    """
    known = not apc_mode and (kvp_group_size > 0 or group_size == 1)
    ranks = kvp_group_size if kvp_group_size > 0 else 1
    limit = block_tables.shape[1]
    if not apc_mode:
        # Rank 0's slots are the earliest.
        last = global_q_offset + q.shape[1]
        limit = min(limit, -(-last // (ranks * block_size)))
    layout = SlotLayout(ranks, block_size, limit, -1 if apc_mode else global_q_offset, known, sliding_window)
    call = Call(q, tp_out, replica_groups, group_size, seg_size, scale, layout)
    offset = local_offset(kvp_q_offset, kvp_rank_id if kvp_group_size > 0 else None, block_size)
    offset_fp32 = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=offset_fp32, src=offset)
    if v_scale is not None:
        call.v_scale = nl.ndarray((call.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=call.v_scale, src=v_scale[: call.rows, :])
    call.kv = PagedKV(
        layout, k_cache, v_cache, block_tables, offset, q.shape[1], q.dtype, call.transposer, fp8_packed, k_scale
    )
    masks = SlotMasks(layout, call.rows, offset_fp32[: call.rows, :])
    call.pipeline = Pipeline(call.rows, layout.tile, call.dim, q.dtype, call.score_scale, call.transposer, masks)
    exchanges = [Exchange(call, start, stop) for start, stop in exchange_bounds(call.tiles, call.exchange_tiles)]
    # In the order in which they are needed: all of these reads share the DMA engines.
    exchanges[0].load_own()
    exchanges[0].gather()
    exchanges[0].load_queries()
    call.kv.segment(0, 0)
    for exchange in exchanges[1:3]:
        exchange.load_own()
    for i in range(len(exchanges)):
        if i + 3 < len(exchanges):
            exchanges[i + 3].load_own()
        # What the next exchange needs comes first: at the start nothing of it has been sent.
        ahead = exchanges[i + 1 : i + 3] if i == 0 else exchanges[i + 2 : i + 3]
        exchanges[i].attend(ahead, exchanges[i + 1] if i + 1 < len(exchanges) else None)
    call.complete_pending()
    while call.unmerged:
        call.unmerged.pop(0).merge()
    call.pieces.drain()
    return call.out


def exchange_bounds(tiles: int, size: int) -> list[tuple[int, int]]:
    """First and last tile (exclusive) of each exchange, last rows first.

    The first and the last ones of many are small: nothing runs while the first is gathered and the last merged.
    """
    quarter, half = -(-size // 4), -(-size // 2)
    low, high = ([quarter, half], [quarter]) if tiles >= 4 * size else ([], [])
    middle = tiles - sum(low) - sum(high)
    full = [min(size, middle - start) for start in range(0, middle, size)]
    edges = [0]
    for length in low + full + high:
        edges.append(edges[-1] + length)
    return [(edges[i], edges[i + 1]) for i in range(len(edges) - 2, -1, -1)]


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
        staging: memory of what collectives exchange.
        pending: the exchange whose units may still be in the pipeline; unmerged: those whose partials are on their way.
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
        self.staging = nl.private_hbm if self.cores == 1 else nl.shared_hbm
        self.transposer = Transposer(q.dtype)
        fit = min(
            QUERY_BYTES // (self.heads * self.rows * self.transposer.itemsize),
            ACCUMULATOR_BYTES // (self.heads * (self.dim + EXTRA_COLUMNS) * 4),
        )
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
        self.v_scale = None  # type: Any
        self.kv = None  # type: Any
        self.pipeline = None  # type: Any
        self.urgent = Pieces()
        self.pieces = Pieces()
        self.pending = None  # type: Any
        self.unmerged = []  # type: list[Any]

    def complete_pending(self) -> None:
        """Exchange what is pending, draining the pipeline if it must be."""
        if self.pending is not None and not self.pending.normalised:
            self.pipeline.flush()
            self.urgent.drain()
        self.exchange_pending()

    def exchange_pending(self) -> None:
        """Exchange what is pending once all its units are done. The cores do so at the same place among collectives."""
        if self.pending is not None and self.pending.normalised:
            pending, self.pending = self.pending, None
            pending.exchange()

    def between_units(self) -> None:
        """Some of the work that is not attention: what an exchange waits for before what follows one."""
        left = PIECES_PER_UNIT - self.urgent.issue(PIECES_PER_UNIT)
        self.pieces.issue(left)
        if self.unmerged and self.pipeline.units >= self.unmerged[0].merge_at:
            self.unmerged.pop(0).merge()


class Exchange(nl.NKIObject):  # type: ignore[misc]
    """The tiles of queries that are gathered, attended and exchanged together.

    In staging buffers a core's tiles are adjacent: tile number t of the exchange is t // cores of core t % cores.

    Attributes:
        mine: this core's tiles, as tile numbers of the call; place: where they begin in staging buffers.
    """

    def __init__(self, call: Call, start: int, stop: int) -> None:
        self.call = call
        self.tiles = stop - start
        self.mine = list(range(start + call.core, start + self.tiles, call.cores))
        self.place = 0 if call.core == 0 else -(-self.tiles // call.cores)
        self.q = None  # type: Any
        self.partial = None  # type: Any
        self.outs = None  # type: Any
        self.lses = None  # type: Any
        self.unfinished = len(self.mine)
        self.normalised = not self.mine
        self.own = None  # type: Any
        self.turned = None  # type: Any
        self.gathered = None  # type: Any
        self.steps = 0
        self.sent = False
        self.parts = None  # type: Any
        self.parts_in = []  # type: list[Any]
        self.lses_in = None  # type: Any
        self.merged = []  # type: list[Any]
        self.merge_at = 0
        self.received = None  # type: Any
        self.received_lses = None  # type: Any

    def staged(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return nl.ndarray(shape, dtype=dtype, buffer=self.call.staging)

    def places(self) -> Any:
        """This core's tiles in staging buffers."""
        return nl.ds(self.place, len(self.mine))

    # 1. All-gather of Q, [heads, D, tiles, rows].

    def load_own(self) -> None:
        """Read this core's tiles of own Q, [rows, own heads, tiles, D]."""
        call = self.call
        count = len(self.mine)
        if not count:
            return
        self.own = nl.ndarray((call.rows, call.own_heads, count, call.dim), dtype=call.q.dtype, buffer=nl.sbuf)
        tiled = call.q.reshape_dim(1, (call.tiles, call.rows))
        for head in range(call.own_heads):
            nisa.dma_copy(dst=self.own[:, head, :, :], src=tiled[head, self.my_tiles(), :, :].permute((1, 0, 2)))

    def my_tiles(self) -> Any:
        """This core's tiles in the call's tensors."""
        return slice(self.mine[0], self.mine[-1] + 1, self.call.cores)

    def gather(self) -> None:
        """Transpose and send, at once."""
        while not self.sent:
            self.gather_step()

    def gather_step(self) -> None:
        """Transpose one batch of tiles; after the last one, send."""
        call = self.call
        count = len(self.mine)
        batch = call.transposer.batch(call.rows)
        if self.turned is None and count:
            shape = (call.dim, call.own_heads, count, call.rows)
            self.turned = nl.ndarray(shape, dtype=call.q.dtype, buffer=nl.sbuf)
        steps = call.own_heads * -(-count // batch)
        if self.steps < steps:
            head, start = self.steps % call.own_heads, self.steps // call.own_heads * batch
            stop = min(start + batch, count)
            target = self.turned[:, head, start:stop, :].flatten_dims(1, 2)
            call.transposer.transpose([self.own[:, head, t, :] for t in range(start, stop)], target)
            self.steps += 1
        if self.steps == steps:
            self.send()

    def send(self) -> None:
        """All-gather the transposed queries."""
        call = self.call
        self.sent = True
        own = self.staged((call.own_heads, call.dim, self.tiles, call.rows), call.q.dtype)
        if self.mine:
            if call.factor != 1.0:
                nisa.tensor_scalar(dst=self.turned, data=self.turned, op0=nl.multiply, operand0=call.factor)
            nisa.dma_copy(dst=own[:, :, self.places(), :].permute((1, 0, 2, 3)), src=self.turned)
        self.gathered = own
        if call.group_size > 1:
            self.gathered = self.staged((call.heads, call.dim, self.tiles, call.rows), call.q.dtype)
            self.synchronise(own)
            ncc.all_gather([own], [self.gathered], call.replica_groups, 0)

    def synchronise(self, shared: Any) -> None:
        """Both cores have written their parts."""
        if self.call.cores == 2:
            nisa.core_barrier(data=shared, cores=(0, 1))

    # 2. Attention of all heads.

    def attend(self, ahead: list[Any], following: Any) -> None:
        """Push every unit of this core's tiles; meanwhile gather the Q of the exchanges `ahead`.

        `following` comes next: its queries are loaded as soon as they are gathered.
        """
        call = self.call
        self.outs = self.staged((call.heads, call.rows, self.tiles, call.dim), call.q.dtype)
        self.lses = self.staged((call.group_size, call.rows, self.tiles, call.own_heads), nl.float32)
        self.ahead = list(ahead)
        self.following = following
        if self.mine:
            self.push_all()
        while self.ahead:
            self.gather_ahead()
        self.load_following()
        # What was pending has had the time of this exchange's units at least.
        call.complete_pending()
        call.pending = self

    def gather_ahead(self) -> None:
        """One step of the gathers that are due."""
        self.load_following()
        if self.ahead:
            self.ahead[0].gather_step()
            if self.ahead[0].sent:
                self.ahead.pop(0)

    def load_following(self) -> None:
        """Once."""
        if self.following is not None and self.following.sent:
            self.following.load_queries()
            self.following = None

    def load_queries(self) -> None:
        """Read the gathered queries of this core's tiles, [D, heads, tiles, rows]."""
        call = self.call
        if self.mine:
            shape = (call.dim, call.heads, len(self.mine), call.rows)
            self.q = nl.ndarray(shape, dtype=call.q.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=self.q, src=self.gathered[:, :, self.places(), :].permute((1, 0, 2, 3)))

    def push_all(self) -> None:
        """Push this core's units: by KV head, segment, tile, head. The last unit of a tile completes it."""
        call, kv, layout = self.call, self.call.kv, self.call.layout
        count = len(self.mine)
        q = self.q
        self.partial = Partial(call.rows, count, call.heads, call.dim)
        self.parts = nl.ndarray((call.rows, call.heads, count, call.dim), dtype=call.q.dtype, buffer=nl.sbuf)
        # In the order of the exchange: a tile's heads of one rank, then its next tile.
        shape = (call.rows, call.group_size, count, call.own_heads)
        self.log_sums = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        per_kv_head = call.heads // kv.kv_heads
        items = []  # type: list[Any]
        for kv_head in range(kv.kv_heads):
            for number in range(kv.segments):
                for t in range(count):
                    for head in range(kv_head * per_kv_head, (kv_head + 1) * per_kv_head):
                        items.append([kv_head, number, t, head])
        seen = []  # type: list[Any]
        lasts = [-1] * len(self.mine)
        for item in items:
            row = self.mine[item[2]] * call.rows
            first = item[1] * kv.segment_tiles
            tiles = range(first, min(first + kv.segment_tiles, layout.tiles))
            visible = [tile for tile in tiles if not layout.hidden(tile, row, call.rows)]
            if visible:
                lasts[item[2]] = len(seen)
                seen.append([item, visible])
        for t in range(len(self.mine)):
            if lasts[t] < 0:
                leave_empty(self.partial, t)
                self.finish(t)
        step = call.pipeline.unit_tiles
        for i in range(len(seen)):
            item, visible = seen[i]
            kv_head, number, t, head = item
            row = self.mine[t] * call.rows
            segment = kv.segment(kv_head, number)
            for start in range(0, len(visible), step):
                part = visible[start : start + step]
                bounds = call.pipeline.masks.bounds(row, part)
                unit = Unit(
                    q[:, head, t, :], self.partial, t, head, segment, part[0] - segment.first, len(part), bounds
                )
                unit.opens = start == 0
                unit.closes = start + step >= len(visible)
                if unit.closes and i == lasts[t]:
                    unit.completes = self
                call.pipeline.push(unit)
                call.between_units()
                self.gather_ahead()
                if not self.ahead:
                    call.exchange_pending()

    def finish(self, t: int) -> None:
        """A tile is complete; after the last one, normalise."""
        call = self.call
        self.unfinished -= 1
        if not self.unfinished:
            by_tile = self.log_sums.permute((0, 2, 1, 3))
            normalise(self.partial, self.parts, by_tile, call.v_scale, call.urgent)
            call.urgent.then(self, -1)

    def pieces_done(self, head: int) -> None:
        """Head `head` is merged; -1: all are normalised."""
        if head < 0:
            self.normalised = True
        else:
            self.store(head, self.merged[head])

    # 3. All-to-all of outputs, [heads, rows, tiles, D], and log-sum-exps, [group, rows, tiles, own heads].

    def exchange(self) -> None:
        """Send each rank its heads, and have what arrives read."""
        call = self.call
        if self.mine:
            nisa.dma_copy(dst=self.outs[:, :, self.places(), :].permute((1, 0, 2, 3)), src=self.parts)
            nisa.dma_copy(dst=self.lses[:, :, self.places(), :].permute((1, 0, 2, 3)), src=self.log_sums)
        self.received, self.received_lses = self.outs, self.lses
        if call.group_size > 1:
            self.received = self.staged(self.outs.shape, call.q.dtype)
            self.received_lses = self.staged(self.lses.shape, nl.float32)
            self.synchronise(self.outs)
            self.synchronise(self.lses)
            ncc.all_to_all([self.outs], [self.received], call.replica_groups, 0)
            ncc.all_to_all([self.lses], [self.received_lses], call.replica_groups, 0)
        if self.mine:
            self.merge_at = call.pipeline.units + UNITS_BEFORE_MERGE
            self.load_received()
            call.unmerged.append(self)

    # 4. Merge.

    def load_received(self) -> None:
        """Read the ranks' partial results of own heads."""
        call = self.call
        count = len(self.mine)
        shape = (call.rows, call.group_size, count, call.own_heads)
        self.lses_in = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=self.lses_in, src=self.received_lses[:, :, self.places(), :].permute((1, 0, 2, 3)))
        parts_of = self.received.reshape_dim(0, (call.group_size, call.own_heads))
        for head in range(call.own_heads):
            parts = nl.ndarray((call.rows, call.group_size, count, call.dim), dtype=call.q.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=parts, src=parts_of[:, head, :, self.places(), :].permute((1, 0, 2, 3)))
            self.parts_in.append(parts)

    def merge(self) -> None:
        """Merge own heads, one after the other, and store them."""
        call = self.call
        weights = merge_weights(self.lses_in.flatten_dims(2, 3)).reshape(self.lses_in.shape)
        for head in range(call.own_heads):
            shape = (call.rows, len(self.mine), call.dim)
            self.merged.append(nl.ndarray(shape, dtype=call.q.dtype, buffer=nl.sbuf))
            merge(self.parts_in[head], weights[:, :, :, head], self.merged[head], call.pieces)
            call.pieces.then(self, head)

    def store(self, head: int, merged: Any) -> None:
        """Write [rows, tiles, D] to the result."""
        call = self.call
        count = len(self.mine)
        if not call.tp_out:
            rows_of = call.out.reshape_dim(1, (call.tiles, call.rows))
            nisa.dma_copy(dst=rows_of[head, self.my_tiles(), :, :].permute((1, 0, 2)), src=merged)
            return
        turned = nl.ndarray((call.dim, count, call.rows), dtype=call.q.dtype, buffer=nl.sbuf)
        batch = call.transposer.batch(call.rows)
        for start in range(0, count, batch):
            stop = min(start + batch, count)
            target = turned[:, start:stop, :].flatten_dims(1, 2)
            call.transposer.transpose([merged[:, t, :] for t in range(start, stop)], target)
        columns_of = call.out.reshape_dim(2, (call.tiles, call.rows))
        nisa.dma_copy(dst=columns_of[head, :, self.my_tiles(), :], src=turned)

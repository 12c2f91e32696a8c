"""The figures of one run: memory, bytes sent against the least possible, times, and the comparison of the logits."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from nki_parallel_attn.integrations.decoder import DecoderConfig
from nki_parallel_attn.integrations.kv_parallel_prefill import Measurements, intermediate_share
from nki_parallel_attn.integrations.tolerance import logits_tolerance
from nki_parallel_attn.plan import ShardingPlan
from nki_parallel_attn.plan_table import human_bytes
from prefill_model import PrefillModel

TOP = 5

GATHER_Q = "all-gather of Q"
EXCHANGE = "all-to-all of partial outputs and log-sum-exps"
ALL_REDUCE = "all-reduce of output projections and feed-forwards"
AGREEMENT = "argument digests"
COLLECTIVES = {
    ("attention", "all_gather"): GATHER_Q,
    ("attention", "all_to_all"): EXCHANGE,
    ("attention", "digest"): AGREEMENT,
    ("all-reduce", "all_to_all"): ALL_REDUCE,
    ("all-reduce", "all_gather"): ALL_REDUCE,
}
"""Names for what `Measurements.sent` counts by stage and collective."""


@dataclass(frozen=True)
class Call:
    """One call of the prefill: the positions [start, stop)."""

    start: int
    stop: int
    apc_mode: bool = False


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured."""

    cache_bytes: int
    measured: Measurements

    def sent(self) -> Counter[str]:
        """Bytes by collective."""
        total: Counter[str] = Counter()
        for key, count in self.measured.sent.items():
            total[COLLECTIVES.get(key, " ".join(key))] += count
        return total


@dataclass(frozen=True)
class NextToken:
    """A candidate for the token after the text."""

    token_id: int
    text: str
    logit: float


@dataclass(frozen=True)
class Comparison:
    """Logits of the KV-parallel run against the reference.

    Attributes:
        reference: what the reference is.
        deviation: largest |logit - reference logit| over all positions and tokens.
        tolerance: the largest accepted; see integrations/tolerance.py.
        largest: largest |reference logit|.
        positions: how many there are.
        same_choice: at how many the most likely token is the same.
        ours, theirs: the most likely next tokens, best first.
    """

    reference: str
    deviation: float
    tolerance: float
    largest: float
    positions: int
    same_choice: int
    ours: list[NextToken]
    theirs: list[NextToken]

    @property
    def passed(self) -> bool:
        """Whether the deviation is a number within the tolerance."""
        return self.deviation <= self.tolerance


def compare(model: PrefillModel, logits: Tensor, reference: Tensor) -> Comparison:
    """Compare `logits` with `reference`, both [S, vocab_size]; a NaN anywhere makes the deviation NaN."""
    return Comparison(
        reference=model.reference_name,
        deviation=(logits - reference).abs().max().item(),
        tolerance=logits_tolerance(model.decoder.config, reference),
        largest=reference.abs().max().item(),
        positions=len(reference),
        same_choice=int((logits.argmax(-1) == reference.argmax(-1)).sum()),
        ours=_next_tokens(model, logits[-1]),
        theirs=_next_tokens(model, reference[-1]),
    )


def least_bytes(plan: ShardingPlan, config: DecoderConfig, calls: list[Call]) -> dict[str, int]:
    """The least that the rank that sends most must send, by collective, over all layers and calls; float32.

    For the attention as plan.traffic counts it. An all-reduce of n bytes needs 2*(tp-1)/tp * n.
    """
    least: Counter[str] = Counter({GATHER_Q: 0, EXCHANGE: 0, ALL_REDUCE: 0})
    for call in calls:
        tokens = call.stop - call.start
        for window in config.sliding_window:
            if plan.kvp > 1:
                gather, *exchange = plan.traffic(
                    tokens, dtype=torch.float32, q_pos=call.start, sliding_window=window
                ).collectives
                least[GATHER_Q] += gather.least
                least[EXCHANGE] += sum(collective.least for collective in exchange)
            summed = config.intermediate and intermediate_share(config.intermediate, 0, plan.tp) is not None
            sums = 2 if summed else 1
            size = tokens * config.hidden * torch.float32.itemsize
            least[ALL_REDUCE] += sums * 2 * (plan.tp - 1) * size // plan.tp
    return dict(least)


@dataclass(frozen=True)
class PrefillReport:
    """Everything one run has to say.

    Attributes:
        ranks: figures of each rank.
        least: fewest bytes by collective.
        other_seconds: rank 0's times outside the layers.
    """

    model: str
    plan: ShardingPlan
    calls: list[Call]
    backend: str
    transport: str
    ranks: list[RankFigures]
    least: dict[str, int]
    other_seconds: dict[str, float]
    comparison: Comparison

    def cache_bytes(self) -> int:
        """K and V cache of a rank, the largest."""
        return max(rank.cache_bytes for rank in self.ranks)

    def sent(self) -> dict[str, int]:
        """Bytes sent by collective, by the rank that sends most."""
        names = dict.fromkeys([*self.least, *(name for rank in self.ranks for name in rank.sent())])
        return {name: max(rank.sent()[name] for rank in self.ranks) for name in names}

    def seconds(self) -> dict[str, float]:
        """Seconds by stage of the layers, of the rank that takes longest."""
        stages = dict.fromkeys(stage for rank in self.ranks for stage in rank.measured.seconds)
        return {stage: max(rank.measured.seconds[stage] for rank in self.ranks) for stage in stages}

    def show(self, console: Console) -> None:
        """Print as one table and the verdict."""
        console.print(self._table())
        found = self.comparison
        console.print(
            f"{'PASS' if found.passed else 'FAIL'}: largest deviation of the logits from {found.reference} "
            f"{found.deviation:.3g}, tolerance {found.tolerance:.3g} (float32, largest logit {found.largest:.3g}); "
            f"same most likely token at {found.same_choice} of {found.positions} positions",
            markup=False,
            soft_wrap=True,
        )

    def _table(self) -> Table:
        found, table = self.comparison, Table()
        for column in ("", "KV-parallel", "to compare", "ratio"):
            table.add_column(column, justify="right" if column else "left")
        unsharded = self.plan.memory(dtype=torch.float32).unsharded
        _section(table, "KV cache of one rank, all layers", "unsharded")
        _row(table, "K and V", *_bytes_against(self.cache_bytes(), unsharded))
        _section(table, f"sent by one rank, all layers ({self.transport})", "lower bound")
        for name, count in self.sent().items():
            _row(table, name, *_bytes_against(count, self.least.get(name, 0)))
        _section(table, "time of the slowest rank, waiting included")
        for stage, seconds in (*self.seconds().items(), *self.other_seconds.items()):
            _row(table, stage, f"{1000 * seconds:.1f} ms")
        _section(table, "logits", found.reference)
        _row(
            table,
            "largest deviation",
            f"{found.deviation:.3g}",
            f"tolerance {found.tolerance:.3g}",
            _ratio(found.deviation, found.tolerance),
        )
        for place, (ours, theirs) in enumerate(zip(found.ours, found.theirs, strict=True)):
            label = "next token" if place == 0 else f"{place + 1}. choice"
            _row(table, label, *(f"{token.text!r} {token.logit:9.5f}" for token in (ours, theirs)))
        return table

    def write(self, path: Path) -> None:
        """Write as JSON; a NaN becomes null.

        Raises:
            OSError: the file cannot be written.
        """
        found = self.comparison
        content: dict[str, Any] = {
            "passed": found.passed,
            "model": self.model,
            "backend": self.backend,
            "transport": self.transport,
            "plan": json.loads(self.plan.to_json()),
            "calls": [asdict(call) for call in self.calls],
            "kv_cache_bytes": {
                "per_rank": self.cache_bytes(),
                "unsharded": self.plan.memory(dtype=torch.float32).unsharded,
            },
            "sent_bytes": {
                name: {"sent": count, "least": self.least.get(name, 0)} for name, count in self.sent().items()
            },
            "seconds": {**self.seconds(), **self.other_seconds},
            "comparison": {
                name: None if isinstance(value, float) and value != value else value
                for name, value in asdict(found).items()
            },
        }
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _next_tokens(model: PrefillModel, logits: Tensor) -> list[NextToken]:
    best = logits.topk(min(TOP, len(logits)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [NextToken(token_id, model.decode([token_id]), logit) for token_id, logit in pairs]


def _section(table: Table, title: str, compared_with: str = "") -> None:
    table.add_section()
    table.add_row(f"[bold]{title}", "", f"[bold]{compared_with}", "")


def _row(table: Table, *cells: str) -> None:
    first, *rest = (escape(cell) for cell in cells)
    table.add_row("  " + first, *rest)


def _bytes_against(count: int, reference: int) -> tuple[str, str, str]:
    return human_bytes(count), human_bytes(reference), _ratio(count, reference)


def _ratio(value: float, reference: float) -> str:
    return f"{value / reference:.3f}" if reference else "-"

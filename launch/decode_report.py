"""The figures of one decoding run: cache bytes, bytes sent against the plan's, times, and the tokens compared."""

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

from decode_model import DecodeModel, Greedy
from nki_parallel_attn.integrations.decoder import DecoderConfig
from nki_parallel_attn.integrations.kv_parallel_prefill import intermediate_share
from nki_parallel_attn.plan import ShardingPlan
from nki_parallel_attn.plan_table import human_bytes

TRADE = "KVDP: Q and output"
GATHER = "CP: all-gather of Q and log-sum-exps"
COMBINE = "CP: all-to-all of partial outputs"
ALL_REDUCE = "all-reduce of output projections and feed-forwards"
CANDIDATES = "candidates for the next token"
BARRIER = "barriers before the cache updates"
SENT = {
    ("kvdp", "all_to_all"): TRADE,
    ("kvdp", "all_gather"): TRADE,
    ("cp", "all_gather"): GATHER,
    ("cp", "all_to_all"): COMBINE,
    ("all-reduce", "all_to_all"): ALL_REDUCE,
    ("all-reduce", "all_gather"): ALL_REDUCE,
    ("next token", "all_gather"): CANDIDATES,
    ("kvdp", "barrier"): BARRIER,
    ("cp", "barrier"): BARRIER,
}
"""Names for what `Measurements.sent` counts by stage or group, and collective."""


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured.

    Attributes:
        cache_bytes: K and V of all layers while decoding.
        moved_bytes: sent to redistribute the cache.
        seconds: by stage of the run.
        step_seconds: by stage of a step, over all steps and layers.
        sent: bytes sent in all steps, by stage or group, and collective.
        transport: of the exchanges.
    """

    cache_bytes: int
    moved_bytes: int
    seconds: dict[str, float]
    step_seconds: dict[str, float]
    sent: Counter[tuple[str, str]]
    transport: str


@dataclass(frozen=True)
class Comparison:
    """Tokens against the unsharded model's.

    Attributes:
        reference: what the reference is.
        tokens: how many there are, of all sequences.
        equal: how many are equal before their sequence's first difference.
        first_differences: by sequence, the first token that differs; None where all are equal.
        ours, theirs: tokens of each sequence.
    """

    reference: str
    tokens: int
    equal: int
    first_differences: list[int | None]
    ours: list[list[int]]
    theirs: list[list[int]]


def compare(model: DecodeModel, ours: list[list[int]], greedy: Greedy, reference: str) -> Comparison:
    """Compare every sequence's tokens with those of `greedy`."""
    theirs = [greedy(prompt, tokens) for prompt, tokens in zip(model.prompts, ours, strict=True)]
    firsts: list[int | None] = []
    for mine, other in zip(ours, theirs, strict=True):
        pairs = enumerate(zip(mine, other, strict=True))
        firsts.append(next((place for place, (a, b) in pairs if a != b), None))
    equal = sum(len(tokens) if first is None else first for tokens, first in zip(ours, firsts, strict=True))
    return Comparison(reference, sum(map(len, ours)), equal, firsts, ours, theirs)


@dataclass(frozen=True)
class DecodeReport:
    """Everything one run has to say.

    Attributes:
        prefill, decode: the plans.
        lengths: prompt tokens of each sequence.
        ranks: figures of each rank.
        comparison: what decides; with a float8 cache, against the unsharded model over an equally rounded one.
        unquantised: with a float8 cache, against the model without one.
        text: of the first sequence's tokens.
    """

    model: str
    strategy: str
    kv_dtype: torch.dtype
    prefill: ShardingPlan
    decode: ShardingPlan
    config: DecoderConfig
    lengths: list[int]
    steps: int
    ranks: list[RankFigures]
    comparison: Comparison
    unquantised: Comparison | None
    text: str

    @property
    def passed(self) -> bool:
        """Whether all tokens are equal."""
        return self.comparison.equal == self.comparison.tokens

    def cache_bytes(self) -> tuple[int, int]:
        """K and V of a rank, the largest, and what the plan says."""
        memory = self.decode.memory(batch=len(self.lengths), dtype=self.kv_dtype)
        return max(rank.cache_bytes for rank in self.ranks), memory.per_rank

    def moved_bytes(self) -> tuple[int, int]:
        """Sent to redistribute the cache by the rank that sends most, and what the plan says."""
        planned = self.decode.redistribution(self.prefill, self.lengths, self.kv_dtype)
        return max(rank.moved_bytes for rank in self.ranks), max(planned.sent)

    def sent(self) -> dict[str, tuple[float, float]]:
        """Per step, by collective: bytes of the rank that sends most, and what the plan says."""
        planned, measured = self._planned(), [Counter[str]() for _ in self.ranks]
        for total, rank in zip(measured, self.ranks, strict=True):
            for key, count in rank.sent.items():
                total[SENT.get(key, " ".join(key))] += count
        names = dict.fromkeys([*planned, *(name for total in measured for name, count in total.items() if count)])
        return {name: (max(total[name] for total in measured) / self.steps, planned.get(name, 0)) for name in names}

    def sent_per_token(self) -> tuple[float, float]:
        """All collectives together, by the number of sequences that a step advances."""
        measured, planned = (sum(column) / len(self.lengths) for column in zip(*self.sent().values(), strict=True))
        return measured, planned

    def _planned(self) -> dict[str, int]:
        """Bytes of one step, all layers. An all-reduce is a reduce-scatter and an all-gather of padded parts."""
        plan, config, batch = self.decode, self.config, len(self.lengths)
        total: Counter[str] = Counter()
        # The torch backend gathers one statistic of each row; see plan_bytes.py.
        for collective in plan.traffic(1, batch, torch.float32, statistics=1).collectives:
            combines = "partial" in collective.name
            name = TRADE if collective.group == "kvdp" else COMBINE if combines else GATHER
            total[name] += config.layers * collective.bytes_sent
        if plan.tp > 1:
            part = -(-batch * config.hidden // plan.tp) * torch.float32.itemsize
            sums = 2 if intermediate_share(config.intermediate, 0, plan.tp) and config.intermediate else 1
            total[ALL_REDUCE] = config.layers * sums * 2 * (plan.tp - 1) * part
            total[CANDIDATES] = (plan.tp - 1) * batch * 2 * torch.float64.itemsize
        if self.ranks[0].transport != "shm":
            # A byte to each peer; ranks that share memory have semaphores.
            total[BARRIER] = config.layers * (plan.kvdp - 1 + plan.cp - 1)
        return dict(total)

    def seconds(self) -> dict[str, float]:
        """Seconds by stage of the run, of the rank that takes longest."""
        stages = dict.fromkeys(stage for rank in self.ranks for stage in rank.seconds)
        return {stage: max(rank.seconds[stage] for rank in self.ranks) for stage in stages}

    def step_seconds(self) -> dict[str, float]:
        """Seconds of one step by stage, of the rank that takes longest."""
        stages = dict.fromkeys(stage for rank in self.ranks for stage in rank.step_seconds)
        return {stage: max(rank.step_seconds[stage] for rank in self.ranks) / self.steps for stage in stages}

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together, decoding alone."""
        return len(self.lengths) * self.steps / self.seconds()["decode"]

    def show(self, console: Console) -> None:
        """Print as one table, the first sequence's text and the verdict."""
        console.print(self._table())
        console.print(f"{self.text}", markup=False, soft_wrap=True, style="dim")
        console.print(f"{'PASS' if self.passed else 'FAIL'}: {_verdict(self.comparison)}", markup=False, soft_wrap=True)
        if self.unquantised:
            console.print(f"Without float8: {_verdict(self.unquantised)}", markup=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table()
        for column in ("", "measured", "by the plan", "ratio"):
            table.add_column(column, justify="right" if column else "left")
        memory = self.decode.memory(batch=len(self.lengths), dtype=self.kv_dtype)
        _section(table, f"KV cache of one rank, all layers ({self.kv_dtype})")
        _row(table, "K and V", *_bytes_against(*self.cache_bytes()))
        _row(table, "unsharded", "", human_bytes(memory.unsharded), "")
        if self.strategy != "cp":
            _section(table, "redistributed, sent by one rank, all layers")
            _row(table, "K and V that change owner", *_bytes_against(*self.moved_bytes()))
        _section(table, f"sent by one rank in one step, all layers ({self.ranks[0].transport})")
        for name, (measured, planned) in self.sent().items():
            _row(table, name, *_bytes_against(measured, planned))
        if self.decode.tp > 1:
            _row(table, "together, per token", *_bytes_against(*self.sent_per_token()))
        _section(table, "time of the slowest rank, waiting included")
        for stage, seconds in self.seconds().items():
            _row(table, stage, f"{1000 * seconds:.1f} ms", "", "")
        for stage, seconds in self.step_seconds().items():
            _row(table, f"one step: {stage}", f"{1000 * seconds:.2f} ms", "", "")
        _row(table, "tokens per second", f"{self.tokens_per_second:.1f}", "", "")
        return table

    def write(self, path: Path) -> None:
        """Write as JSON.

        Raises:
            OSError: the file cannot be written.
        """

        def pair(measured: float, planned: float) -> dict[str, float]:
            return {"measured": measured, "planned": planned}

        content: dict[str, Any] = {
            "passed": self.passed,
            "model": self.model,
            "strategy": self.strategy,
            "transport": self.ranks[0].transport,
            "kv_dtype": str(self.kv_dtype).removeprefix("torch."),
            "prefill_plan": json.loads(self.prefill.to_json()),
            "decode_plan": json.loads(self.decode.to_json()),
            "prompt_tokens": self.lengths,
            "steps": self.steps,
            "kv_cache_bytes_per_rank": pair(*self.cache_bytes()),
            "redistributed_bytes": pair(*self.moved_bytes()),
            "sent_bytes_per_step": {name: pair(*counts) for name, counts in self.sent().items()},
            "sent_bytes_per_token": pair(*self.sent_per_token()) if self.decode.tp > 1 else pair(0, 0),
            "seconds": self.seconds(),
            "step_seconds": self.step_seconds(),
            "tokens_per_second": self.tokens_per_second,
            "comparison": asdict(self.comparison),
            "unquantised": asdict(self.unquantised) if self.unquantised else None,
        }
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _verdict(found: Comparison) -> str:
    text = f"{found.equal} of {found.tokens} tokens equal to {found.reference}"
    if found.equal == found.tokens:
        return text
    firsts = [
        f"sequence {row} at token {place}" for row, place in enumerate(found.first_differences) if place is not None
    ]
    return f"{text}; first differences: {', '.join(firsts)}"


def _section(table: Table, title: str) -> None:
    table.add_section()
    table.add_row(f"[bold]{title}", "", "", "")


def _row(table: Table, *cells: str) -> None:
    first, *rest = (escape(cell) for cell in cells)
    table.add_row("  " + first, *rest)


def _bytes_against(measured: float, planned: float) -> tuple[str, str, str]:
    ratio = f"{measured / planned:.3f}" if planned else "-"
    return human_bytes(round(measured)), human_bytes(round(planned)), ratio

"""What a user sees of a run: a table that fills on a terminal, lines elsewhere, and what failed at the end."""

from __future__ import annotations

from collections import Counter
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from nki_parallel_attn.validation.case import Case
from validate_outcome import FAILED, NOT_RUN, PASSED, SKIPPED, UNAVAILABLE, Outcome
from validate_report import Record

_WORDS = {PASSED: "pass", FAILED: "FAIL", UNAVAILABLE: "n/a", SKIPPED: "skip"}
_LINES_OF_A_FAILURE = 25


class Display:
    """Shows a record while it fills; a context manager."""

    def __init__(self, record: Record, console: Console) -> None:
        self.record = record
        self.console = console
        self._live = Live(console=console, get_renderable=self.table, refresh_per_second=4, vertical_overflow="crop")

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the table as it is; nothing is drawn any more."""
        self._live.stop()

    def end(self, case: Case, outcome: Outcome) -> None:
        """A line about a case that ended; on a terminal the table shows it."""
        if self.console.is_terminal:
            return
        found = outcome.deviation
        what = outcome.title
        if found and not outcome.title:
            what = f"error {found.error:.2e} of {found.tolerance:.2e}"
        line = f"{_WORDS[outcome.status]}  {case.name}  {what}  {outcome.seconds:.1f} s"
        self.console.print(line, markup=False, soft_wrap=True)

    def table(self) -> Table:
        """Kernels, layouts and dtypes down; ranks and LNC across; in a cell all of its cases."""
        cases = self.record.cases
        columns = sorted({(case.ranks, case.lnc) for case in cases})
        table = Table()
        table.add_column("")
        for ranks, lnc in columns:
            table.add_column(f"{ranks} rank{'s'[: ranks > 1]}\nLNC {lnc}", justify="right")
        for kernel in dict.fromkeys(case.kernel for case in cases):
            table.add_section()
            table.add_row(f"[bold]{kernel}", *[""] * len(columns))
            of_kernel = [case for case in cases if case.kernel == kernel]
            for layout, dtype in dict.fromkeys((case.layout, case.dtype) for case in of_kernel):
                row = [case for case in of_kernel if (case.layout, case.dtype) == (layout, dtype)]
                cells = [self._cell([c for c in row if (c.ranks, c.lnc) == column]) for column in columns]
                table.add_row(f"  {layout} {dtype}", *cells)
        return table

    def _cell(self, cases: list[Case]) -> str:
        outcomes = [self.record.outcomes[case.name] for case in cases if case.name in self.record.outcomes]
        counts = Counter(outcome.status for outcome in outcomes)
        if not cases:
            return ""
        if counts[FAILED]:
            return f"[bold red]FAIL {counts[FAILED]}/{len(cases)}"
        if any(case is self.record.running for case in cases):
            return f"[yellow]{len(outcomes)}/{len(cases)}"
        if len(outcomes) < len(cases):
            return "[dim]·"
        if not counts[PASSED]:
            return f"[dim]{_WORDS[outcomes[0].status]}"
        return f"[green]{max(outcome.deviation.excess for outcome in outcomes if outcome.deviation):.3f}"

    def conclude(self, seconds: float) -> None:
        """The table where it was not drawn, every failure, and the verdict."""
        record = self.record
        self.stop()
        if not self.console.is_terminal:
            self.console.print(self.table())
        self.console.print("Cells: largest error / tolerance. n/a: the operation has no kernel for this backend yet.")
        for case in record.cases:
            outcome = record.outcome(case)
            if outcome.status == FAILED:
                self.console.print(f"[bold red]FAIL[/]  {escape(case.name)}", soft_wrap=True)
                lines = (outcome.message or outcome.title).splitlines()
                if len(lines) > _LINES_OF_A_FAILURE:
                    lines = [*lines[:_LINES_OF_A_FAILURE], "... (the reports hold all of it)"]
                self.console.print("\n".join(f"    {line}" for line in lines), markup=False, soft_wrap=True)
        counts = record.counts()
        for status in (UNAVAILABLE, SKIPPED, NOT_RUN):
            reasons = Counter(
                record.outcome(case).title for case in record.cases if record.outcome(case).status == status
            )
            for reason, count in reasons.items():
                self.console.print(f"{status}: {count} cases: {reason}", markup=False, soft_wrap=True)
        statuses = (PASSED, FAILED, UNAVAILABLE, SKIPPED, NOT_RUN)
        total = ", ".join(f"{counts[status]} {status}" for status in statuses if counts[status])
        verdict = "[bold green]PASS[/]" if record.passed else "[bold red]FAIL[/]"
        nothing = "" if counts[PASSED] or counts[FAILED] else "; nothing was validated"
        self.console.print(f"{verdict}: {total}{nothing}; {seconds:.0f} s", soft_wrap=True)
        for path in (record.junit, record.json):
            if path is not None:
                self.console.print(f"written: {path}", markup=False, soft_wrap=True)

"""What became of a case: on each rank, and judged over all of them."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from nki_parallel_attn.errors import DivergenceError, NkiParallelAttnError, PeerError, UnsupportedFeatureError
from nki_parallel_attn.validation.case import Case, Deviation, Place

PASSED, FAILED, UNAVAILABLE, SKIPPED, NOT_RUN = "passed", "failed", "not available", "skipped", "not run"


@dataclass(frozen=True)
class RankResult:
    """One rank's: a deviation, or what it raised.

    Attributes:
        raised: text of the exception; "" for none.
        title: its first line.
        consequence: another rank is likely to have the cause.
        unavailable: the operation says that it has no kernel for the backend, as the case expects.
    """

    deviation: Deviation | None = None
    raised: str = ""
    title: str = ""
    consequence: bool = False
    unavailable: bool = False

    def to_json(self) -> str:
        """As text, NaN and infinity included."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankResult:
        """The result that `to_json` wrote."""
        fields = json.loads(text)
        deviation = fields.pop("deviation")
        return cls(Deviation(**deviation) if deviation else None, **fields)


@dataclass(frozen=True)
class Outcome:
    """A case's verdict.

    Attributes:
        status: one of the names above.
        deviation: the worst rank's, relative to its tolerance; None where no rank has one.
        rank: the world rank that failed first, or has the worst deviation.
        title: one line about what is wrong, or why there is no verdict; "" when the case passed.
        message: all there is to say, tracebacks included.
    """

    status: str
    deviation: Deviation | None = None
    rank: int | None = None
    seconds: float = 0.0
    title: str = ""
    message: str = ""


def run_on_rank(case: Case, place: Place) -> RankResult:
    """Run the case on this rank; what it raises becomes a part of the result."""
    try:
        return RankResult(deviation=case.run(place))
    except Exception as error:
        return of_exception(case, place.backend, error)


def of_exception(case: Case, backend: str, error: BaseException) -> RankResult:
    """The result of a rank that raised."""
    unavailable = isinstance(error, UnsupportedFeatureError) and case.may_be_unavailable(backend)
    text = "".join(traceback.format_exception(error)).rstrip()
    own = isinstance(error, NkiParallelAttnError)
    return RankResult(
        raised=str(error) if unavailable else text,
        title=(str(error) if own else f"{type(error).__name__}: {error}").split("\n", 1)[0],
        consequence=isinstance(error, (PeerError, DivergenceError, torch.distributed.DistError)),
        unavailable=unavailable,
    )


def judge(results: Mapping[int, RankResult], seconds: float, problem: str = "") -> Outcome:
    """The verdict over what ranks said; `problem` says what is wrong beyond it, such as ranks that said nothing."""
    raised = {rank: result for rank, result in results.items() if result.raised}
    causes = {rank: result for rank, result in raised.items() if not result.consequence} or raised
    deviations = {rank: result.deviation for rank, result in results.items() if result.deviation}
    worst = max(deviations, key=lambda rank: deviations[rank].excess, default=None)
    if raised and not problem and len(raised) == len(results) and all(r.unavailable for r in raised.values()):
        first = min(raised)
        return Outcome(UNAVAILABLE, None, None, seconds, raised[first].title, raised[first].raised)
    deviation = None if worst is None else deviations[worst]
    if raised or problem:
        rank = min(causes) if causes else None
        title = f"rank {rank}: {causes[rank].title}" if rank is not None else problem
        texts = [problem] if problem else []
        texts += [f"--- rank {rank}:\n{result.raised}" for rank, result in {**causes, **raised}.items()]
        return Outcome(FAILED, deviation, rank, seconds, title, "\n".join(texts))
    if deviation is None:
        return Outcome(FAILED, None, None, seconds, "no rank has a result", "no rank has a result")
    if deviation.passed:
        return Outcome(PASSED, deviation, worst, seconds)
    wrong = sorted(rank for rank, found in deviations.items() if not found.passed)
    title = f"rank {worst}: {describe(deviation)}"
    message = "\n".join(f"rank {rank}: {describe(deviations[rank])}" for rank in wrong)
    return Outcome(FAILED, deviation, worst, seconds, title, message)


def describe(deviation: Deviation) -> str:
    """One line about a deviation."""
    if deviation.complaint:
        return f"{deviation.what} is {deviation.complaint}"
    return f"{deviation.what} is off by {deviation.error:.3g}, tolerance {deviation.tolerance:.3g}"

"""Cases on ranks that this process starts: a rank that dies or hangs costs its case, and new ranks run the next."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from nki_parallel_attn.backends import Backend
from nki_parallel_attn.errors import RankFailedError
from nki_parallel_attn.testing import run_ranks
from nki_parallel_attn.testing.run import close_pool
from nki_parallel_attn.validation.case import Case, Deviation, Place
from validate_outcome import FAILED, Outcome, RankResult, judge, of_exception
from validate_report import Record
from validate_table import Display


def run_case(case: Case, backend: Backend, target: str, seed: int) -> Deviation:
    """The case on this rank, one of those that `run_ranks` started."""
    return case.run(Place(dist.get_rank(), dist.get_world_size(), backend, target, torch.device("cpu"), seed))


def run_here(record: Record, display: Display, fail_fast: bool) -> None:
    """Run all cases of the record, one after the other."""
    settings = record.settings
    try:
        for case in record.cases:
            record.start(case)
            start = time.perf_counter()
            try:
                arguments = (case, settings["backend"], settings["target"], settings["seed"])
                found = run_ranks(run_case, case.world, args=arguments, timeout=settings["timeout"])
            except RankFailedError as error:
                outcome = _failed(case, settings["backend"], error, time.perf_counter() - start)
            else:
                results = {rank: RankResult(deviation) for rank, deviation in enumerate(found)}
                outcome = judge(results, time.perf_counter() - start)
            record.end(case, outcome)
            display.end(case, outcome)
            if fail_fast and outcome.status == FAILED:
                record.ended = "after a failure, as --fail-fast asks"
                return
    except KeyboardInterrupt:
        record.ended = "interrupted"
    finally:
        record.write()
        close_pool()


def _failed(case: Case, backend: str, error: RankFailedError, seconds: float) -> Outcome:
    """The verdict over ranks that raised, died or hung; the error has the text of all of them."""
    results = {rank: of_exception(case, backend, raised) for rank, raised in error.exceptions.items()}
    if len(results) == case.world and all(result.unavailable for result in results.values()):
        return judge(results, seconds)
    causes = [rank for rank, result in results.items() if not result.consequence]
    title = f"rank {min(causes)}: {results[min(causes)].title}" if causes else str(error).split("\n", 1)[0]
    return Outcome(FAILED, None, min(causes, default=None), seconds, title, str(error))

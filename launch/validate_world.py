"""Cases on the ranks of a torchrun job, which all go through them in the same order.

Each rank posts its result to the job's store and waits for rank 0's word to go on. On rank 0 a thread collects the
results, so that it can act while the rank itself hangs. A case whose ranks do not all answer within the time, or of
which only some raise, leaves the ranks out of step: the run ends there, with the reports written.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch

from nki_parallel_attn.errors import PeerError
from nki_parallel_attn.validation.case import Case, Place
from rank_process import Job
from validate_outcome import FAILED, SKIPPED, Outcome, RankResult, judge, run_on_rank
from validate_report import Record
from validate_table import Display

GRACE = 10.0
"""Seconds that the other ranks get when one has raised."""
GO_ON, STOP = b"go on", b"stop"


def run_as_peer(job: Job, record: Record, device: torch.device) -> None:
    """This rank's part of all cases; returns when they are done or rank 0 says stop.

    Raises:
        PeerError: rank 0 did not say in time.
    """
    settings = record.settings
    for number, case in enumerate(record.cases):
        if job.world_size % case.world:
            continue
        place = Place(
            job.rank, job.world_size, settings["backend"], settings["target"], device=device, seed=settings["seed"]
        )
        # Where a rank hangs is told on its stderr, shortly before rank 0 gives up.
        faulthandler.dump_traceback_later(0.9 * settings["timeout"])
        result = run_on_rank(case, place)
        faulthandler.cancel_dump_traceback_later()
        job.store.set(f"validate/{number}/{job.rank}", result.to_json())
        key = f"validate/{number}"
        try:
            job.store.wait([key], timedelta(seconds=settings["timeout"] + 6 * GRACE))
        except RuntimeError as error:
            raise PeerError(f"rank 0 has no verdict over {case.name}: {error}") from error
        if job.store.get(key) == STOP:
            return


class Referee:
    """Rank 0's thread: collects, judges, reports.

    Attributes:
        results: of the case that runs, by rank.
    """

    def __init__(self, job: Job, record: Record, display: Display, fail_fast: bool) -> None:
        self.job, self.record, self.display, self.fail_fast = job, record, display, fail_fast
        # A connection of its own: the rank waits on the other one.
        store: Any = job.store
        self.store = store.clone()
        self.results: dict[int, RankResult] = {}
        self.started = time.perf_counter()
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._guarded, daemon=True)

    def run(self) -> None:
        """Judge all cases; a case that hangs ends the process."""
        for number, case in enumerate(self.record.cases):
            if self.job.world_size % case.world:
                need = f"needs a multiple of {case.world} ranks, the job has {self.job.world_size}"
                self._end(case, Outcome(SKIPPED, title=need))
                continue
            self.results, start = {}, time.perf_counter()
            self.record.start(case)
            missing = self._collect(number)
            seconds = time.perf_counter() - start
            problem = f"ranks {missing} did not finish within {seconds:.0f} s" if missing else ""
            outcome = judge(self.results, seconds, problem)
            self._end(case, outcome)
            if missing:
                self.leave(f"ranks {missing} hang since {case.name}")
            if self._out_of_step(case):
                self.record.ended = f"the ranks are out of step since {case.name}: some raised, others did not"
            elif self.fail_fast and outcome.status == FAILED:
                self.record.ended = "after a failure, as --fail-fast asks"
            self.store.set(f"validate/{number}", STOP if self.record.ended else GO_ON)
            if self.record.ended:
                break

    def leave(self, reason: str) -> NoReturn:
        """Write what there is, and end this process; torchrun ends the others."""
        with self.lock:
            self.record.ended = reason
            running = self.record.running
            # The disk may be what is wrong.
            with contextlib.suppress(OSError):
                if running is not None:
                    said = judge(self.results, 0.0, f"{reason}; ranks {self._missing()} had not finished")
                    self.display.end(running, said)
                    self.record.end(running, said)
                self.record.write()
            self.display.conclude(time.perf_counter() - self.started)
            sys.stdout.flush()
            os._exit(1)

    def _guarded(self) -> None:
        try:
            self.run()
        except BaseException as error:  # this thread's end must not be missed: all ranks wait for its word
            self.leave(f"{type(error).__name__}: {error}")

    def _end(self, case: Case, outcome: Outcome) -> None:
        with self.lock:
            self.record.end(case, outcome)
            self.display.end(case, outcome)

    def _missing(self) -> list[int]:
        return sorted(set(range(self.job.world_size)) - set(self.results))

    def _collect(self, number: int) -> list[int]:
        """Fill `results`; the ranks that did not answer in time."""
        deadline = time.monotonic() + self.record.settings["timeout"]
        pause = 0.001
        while self._missing() and time.monotonic() < deadline:
            for rank in self._missing():
                key = f"validate/{number}/{rank}"
                if self.store.check([key]):
                    self.results[rank] = RankResult.from_json(self.store.get(key))
                    if self.results[rank].raised:
                        deadline = min(deadline, time.monotonic() + GRACE)
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)
        return self._missing()

    def _out_of_step(self, case: Case) -> bool:
        """Whether some ranks of one group raised and others did not."""
        for first in range(0, self.job.world_size, case.world):
            raised = {bool(self.results[rank].raised) for rank in range(first, first + case.world)}
            if len(raised) > 1:
                return True
        return False


@contextlib.contextmanager
def referee(job: Job, record: Record, display: Display, fail_fast: bool) -> Iterator[Referee]:
    """The referee at work, also when torchrun ends this process because another rank died."""
    made = Referee(job, record, display, fail_fast)
    read, write = os.pipe()
    os.set_blocking(write, False)
    # The byte is written at once, the Python handler runs only when the main thread comes back from what it waits in.
    signal.set_wakeup_fd(write)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def watch() -> None:
        if os.read(read, 1) == bytes([signal.SIGINT]):
            made.leave("interrupted")
        made.leave("the job was ended from outside: most likely a rank died, which torchrun reports")

    threading.Thread(target=watch, daemon=True).start()
    made.thread.start()
    yield made
    made.thread.join()

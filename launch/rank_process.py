"""One process of a torchrun job: joins the others, runs a main function, and sees to it that an error is told once.

Started without torchrun, the process is a job of one rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # public, but the stubs lack it
from torch.distributed.rendezvous import rendezvous

from nki_parallel_attn.errors import NkiParallelAttnError, PeerError

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Also how long the other ranks wait while rank 0 computes the reference."""
TOLD = "nki_parallel_attn/error_told"
FAILURES = "nki_parallel_attn/failures"


@dataclass(frozen=True)
class Job:
    """The rank of this process, the number of ranks, and the store they share."""

    rank: int
    world_size: int
    under_torchrun: bool
    store: Store

    def init_process_group(self, backend: str = "gloo") -> None:
        """Make the default process group, of all ranks."""
        dist.init_process_group(
            backend, store=self.store, rank=self.rank, world_size=self.world_size, timeout=COLLECTIVE_TIMEOUT
        )


def run_as_rank(main: Callable[[Job], int], program: str, *, process_group: bool = True) -> NoReturn:
    """Join the job, run `main`, and exit with its result, or with 1 after an error, on which all ranks end.

    `program` is the name that an error is told under. Without `process_group`, `main` makes the default process group.

    Of several ranks that fail, one prints: the one whose error is its own rather than a consequence of a peer's. A peer
    that waits in a collective ends too: its exchange finds the rank gone, and torchrun ends what is left.
    """
    job: Job | None = None
    try:
        job = _join()
        if process_group:
            job.init_process_group()
        code = main(job)
    except Exception as error:
        _tell(program, error, job)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Without tearing the process group down: where peers are gone already, that can block, or abort the process.
    os._exit(code)


def _join() -> Job:
    if "RANK" in os.environ:
        store, rank, world_size = next(rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
    else:
        store, rank, world_size = HashStore(), 0, 1
    return Job(rank, world_size, "RANK" in os.environ, store)


def _tell(program: str, error: Exception, job: Job | None) -> None:
    """Print the error unless another rank has printed, or is likely to have the cause of this one."""
    expected = isinstance(error, (NkiParallelAttnError, OSError)) and not isinstance(error, (PeerError, dist.DistError))
    patience = 0.0 if expected else 4.0 if isinstance(error, PeerError) else 2.0
    if job is not None and _someone_told(job, patience):
        return
    text = str(error) if expected else "".join(traceback.format_exception(error)).rstrip()
    where = "" if job is None or job.world_size == 1 else f" (rank {job.rank})"
    sys.stderr.write(f"{program}: error{where}: {text}\n")  # at once: other ranks write here too
    sys.stderr.flush()
    if job is not None:
        with contextlib.suppress(RuntimeError):
            job.store.set(TOLD, "")


def _someone_told(job: Job, patience: float) -> bool:
    """Whether another rank prints an error; waits for it for `patience` seconds, and until it has printed."""
    try:
        if patience:
            with contextlib.suppress(RuntimeError):
                job.store.wait([TOLD], timedelta(seconds=patience))
        if job.store.add(FAILURES, 1) == 1:
            return False
        # torchrun ends all ranks when the first has ended: leave the one that prints the time to do so.
        job.store.wait([TOLD], timedelta(seconds=5))
    except RuntimeError:
        # The store is gone, with rank 0 or with the launcher: better told twice than not at all.
        return False
    return True

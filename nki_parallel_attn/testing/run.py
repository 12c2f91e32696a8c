"""run_ranks(): call a function on every rank of a world of processes; its results, or its failures as one error."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError, RankFailedError, RankTimeoutError
from nki_parallel_attn.testing import protocol
from nki_parallel_attn.testing.pickling import dumps_call
from nki_parallel_attn.testing.pool import RankPool
from nki_parallel_attn.testing.report import death_title, failure_report, format_stacks, rank_names

GRACE = 2.0  # seconds that the others get after a rank raised, and again after each that ends, to end on their own
GRACE_AFTER_DEATH = 0.5  # the same after a rank died; what its peers have to say then adds little
RELEASE_TIMEOUT = 3.0  # seconds to destroy a process group (30 ms) before the ranks are replaced

_lock = threading.Lock()
_pool: RankPool | None = None


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    pg_backend: str = "gloo",
    timeout: float = 60,
) -> list[Any]:
    """Call fn(*args, **kwargs) on every rank of a world, each a process with the default group set and one thread.

    The processes stay for the next call. They are forked from a process that has torch loaded and runs no threads: a
    rank costs 8 ms that way and 2 s of CPU when spawned, which counts because a hang or a death costs a new pool.
    Forking the caller itself would be as cheap, but copies its locks and threads in whatever state they are.

    Every call gets a new process group, the caller's environment, working directory and sys.path, the same random
    seeds, and RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as under torchrun. What it leaves in modules stays.

    Args:
        fn: any callable that cloudpickle can pickle: lambdas, closures and partials too. What it prints is passed on to
            sys.stdout and sys.stderr, each line with its rank.
        world_size: number of ranks, 1 or more.
        args, kwargs: the same for every rank.
        pg_backend: backend of the default process group. gloo is bound to the loopback interface.
        timeout: seconds from the start of the call until ranks that have not finished count as hung.

    Returns:
        Each rank's result, by rank. Tensors in it are detached, contiguous and on the CPU.

    Raises:
        ArgumentError: world_size or timeout is not positive (and finite), or fn cannot be called.
        ArgumentTypeError: args is no list or tuple, kwargs no dict of names, pg_backend no name; fn, or an argument,
            cannot be pickled.
        RankFailedError: ranks raised, died, or returned what cannot be pickled. It holds the traceback of each of them;
            the others get 2 s to end (0.5 s after a death), and then it says where they were. `exceptions` has the
            exceptions by rank.
        RankTimeoutError: ranks hung. It holds their Python stacks.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ArgumentError("world_size", repr(world_size), "an integer of 1 or more")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise ArgumentError("timeout", repr(timeout), "a positive, finite number of seconds")
    if not callable(fn):
        raise ArgumentError("fn", repr(fn), "a callable")
    if not isinstance(args, Sequence) or isinstance(args, (str, bytes)):
        raise ArgumentTypeError("args", repr(args), "a list or tuple of positional arguments")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise ArgumentTypeError("kwargs", repr(kwargs), "a dict of keyword arguments by name, or None")
    if not isinstance(pg_backend, str):
        raise ArgumentTypeError("pg_backend", repr(pg_backend), "the name of a backend of torch.distributed")
    payload = dumps_call(fn, args, kwargs or {})
    with _lock:
        try:
            call = _run_call(_current_pool(), payload, world_size, pg_backend, timeout)
        except BaseException:  # Ctrl-C, or the rank server is lost: what the ranks are doing is unknown
            close_pool()
            raise
    return call.results()


def close_pool() -> None:
    """End the rank processes of this process. The next call starts new ones."""
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None


def _current_pool() -> RankPool:
    global _pool
    if _pool is None or _pool.owner != os.getpid():
        _pool = RankPool()
    return _pool


atexit.register(close_pool)


@dataclass
class _FinishedCall:
    """What became of a call.

    Attributes:
        outcomes: of the ranks that reported, in the order in which they did.
        deaths: (exit status, stacks at the crash) of the ranks that died.
        stacks: of the ranks that had not finished in time.
    """

    world_size: int
    outcomes: dict[int, protocol.Outcome]
    deaths: dict[int, tuple[int, str]]
    stacks: dict[int, str]
    timeout: float

    def results(self) -> list[Any]:
        """The results by rank, or the error that says all there is to say."""
        results: dict[int, Any] = {}
        exceptions: dict[int, BaseException] = {}
        failures: dict[int, tuple[str, str]] = {}
        for rank, (status, stacks) in self.deaths.items():  # first, because they are why others fail
            failures[rank] = (death_title(status), format_stacks(stacks) if stacks else "")
        for rank, outcome in self.outcomes.items():
            if not outcome.returned:
                failures.setdefault(rank, (outcome.title, outcome.text))
            if outcome.pickled is None:
                continue
            try:
                (results if outcome.returned else exceptions)[rank] = pickle.loads(outcome.pickled)
            except Exception:
                if outcome.returned:
                    failures[rank] = ("its result cannot be rebuilt in the caller", traceback.format_exc())
        if failures:
            first = next(iter(failures))
            headline = f"{len(failures)} of {self.world_size} ranks failed; rank {first}: {failures[first][0]}"
            raise RankFailedError(failure_report(self.world_size, failures, self.stacks, headline), exceptions)
        if self.stacks:
            headline = f"{rank_names(self.stacks)} did not finish within {self.timeout:g} s"
            raise RankTimeoutError(failure_report(self.world_size, {}, self.stacks, headline))
        return [results[rank] for rank in range(self.world_size)]


def _run_call(pool: RankPool, payload: bytes, world_size: int, pg_backend: str, timeout: float) -> _FinishedCall:
    pool.resize(world_size)
    store = pool.new_store()
    directory = None
    with contextlib.suppress(FileNotFoundError):  # deleted under the caller
        directory = os.getcwd()
    for rank in pool.ranks[:world_size]:
        call = protocol.Call(
            rank=rank.rank,
            world_size=world_size,
            pg_backend=pg_backend,
            store=str(store),
            pg_timeout=timeout + 60.0,
            environment=dict(os.environ),
            directory=directory,
            sys_path=sys.path,
        )
        rank.send(pickle.dumps(call), payload)
    finished = _collect(pool, world_size, timeout)
    if finished.stacks or finished.deaths:
        pool.kill()
    else:
        _release(pool, finished)
    pool.relay_output()
    pool.shrink()
    store.unlink(missing_ok=True)
    return finished


def _collect(pool: RankPool, world_size: int, timeout: float) -> _FinishedCall:
    """Wait until every rank has reported or died, the timeout is over, or a failure's grace is."""
    finished = _FinishedCall(world_size, {}, {}, {}, timeout)
    running = set(range(world_size))
    timeout_end = deadline = time.monotonic() + timeout
    while running and time.monotonic() < deadline:
        for rank, message in pool.poll(deadline - time.monotonic()):
            finished.outcomes[rank] = pickle.loads(message)
        _record_deaths(pool, finished)
        ended = running & (finished.outcomes.keys() | finished.deaths.keys())
        running -= ended
        failed = finished.deaths or not all(outcome.returned for outcome in finished.outcomes.values())
        if ended and failed:
            deadline = min(timeout_end, time.monotonic() + (GRACE_AFTER_DEATH if finished.deaths else GRACE))
    if running:
        finished.stacks = pool.stacks(running)
    return finished


def _record_deaths(pool: RankPool, finished: _FinishedCall) -> None:
    for rank in pool.ranks[: finished.world_size]:
        if rank.exit_status is not None:
            finished.deaths[rank.rank] = (rank.exit_status, rank.read_stacks())


def _release(pool: RankPool, finished: _FinishedCall) -> None:
    """End the process group of the call; all ranks have reported, so none needs it any more."""
    waiting = set(range(finished.world_size))
    for rank in waiting:
        pool.ranks[rank].send(protocol.RELEASE)
    deadline = time.monotonic() + RELEASE_TIMEOUT
    while waiting and not finished.deaths and time.monotonic() < deadline:
        waiting -= {rank for rank, _ in pool.poll(deadline - time.monotonic())}
        _record_deaths(pool, finished)
    if waiting:
        pool.kill()
        if not finished.deaths:
            warnings.warn(
                f"{rank_names(waiting)} left a collective unfinished; the rank processes are replaced", stacklevel=4
            )

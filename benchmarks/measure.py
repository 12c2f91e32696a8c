"""Timing in pairs, on rank processes that sleep while they are not measured, and peak memory.

Machines change speed for seconds at a time, so a time alone says little: contenders run back to back, many times, and
what counts is the median of their ratios within each round.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import socket
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.profiler import ProfilerActivity, profile

from nki_parallel_attn.kernels.collectives_torch import exchange_for

SETTLE_SECONDS = 0.02  # idle OpenMP threads spin for a few milliseconds after their last work
Actions = Mapping[str, Callable[[], object]]


class Ranks:
    """Processes with a process group that keep what they have made from one call to the next.

    Args:
        world_size: number of processes.
        setup: importable; called on every rank with `args`, returns the rank's actions by name. What
            an action returns must be picklable where its result is asked for.
        threads: torch's threads per rank.
    """

    def __init__(self, world_size: int, setup: Callable[..., Actions], *args: object, threads: int = 1) -> None:
        context = torch.multiprocessing.get_context("spawn")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        pipes = [context.Pipe() for _ in range(world_size)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, world_size, port, threads, theirs, setup, args), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        self._results()

    def run(self, action: str) -> list[Any]:
        """Each rank's result of an action."""
        for pipe in self._pipes:
            pipe.send((action, True))
        return self._results()

    def seconds(self, action: str) -> float:
        """From the first rank that starts, all having met, to the last that ends; the result stays where it is."""
        for pipe in self._pipes:
            pipe.send((action, False))
        starts, ends = zip(*self._results(), strict=True)
        return float(max(ends) - min(starts))

    def _results(self) -> list[Any]:
        replies = []
        for rank, pipe in enumerate(self._pipes):
            try:
                replies.append(pipe.recv())
            except EOFError:
                raise RuntimeError(f"rank {rank} has died") from None
        for reply in replies:
            if isinstance(reply, _Failure):
                raise RuntimeError(reply.text)
        return replies

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()


def _serve(
    rank: int,
    world_size: int,
    port: int,
    threads: int,
    pipe: Connection,
    setup: Callable[..., Actions],
    args: tuple[object, ...],
) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size, timeout=timedelta(minutes=5)
    )
    try:
        actions = setup(*args)
        pipe.send(None)
        while True:
            name, wants_result = pipe.recv()
            exchange_for().barrier()
            start = time.perf_counter()
            result = actions[name]()
            end = time.perf_counter()
            pipe.send(result if wants_result else (start, end))
            del result
    except EOFError:
        dist.destroy_process_group()
    except BaseException:
        pipe.send(_Failure(f"rank {rank}:\n{traceback.format_exc()}"))
        os._exit(1)


@dataclass(frozen=True)
class _Failure:
    text: str


@dataclass(frozen=True)
class Comparison:
    """Seconds of two contenders in the same rounds."""

    baseline: list[float]
    contender: list[float]

    @property
    def median_ratio(self) -> float:
        return statistics.median(b / a for a, b in zip(self.baseline, self.contender, strict=True))

    @property
    def ratio_of_minima(self) -> float:
        return min(self.contender) / min(self.baseline)


def time_rounds(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender (which times itself) in each round, after one round that does not count.

    The order turns around from round to round, so that a drift favours nobody.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for count in range(rounds + 1):
        order = list(contenders)[:: 1 if count % 2 else -1]
        for name in order:
            time.sleep(SETTLE_SECONDS)
            elapsed = contenders[name]()
            if count:
                seconds[name].append(elapsed)
    return seconds


def stage_seconds(call: Callable[[], object], stages: Sequence[tuple[str, Any, str]]) -> dict[str, float]:
    """Where one call's time goes in this process: by stage, "other" and "total".

    Args:
        call: what is timed.
        stages: name of the stage, and the owner and name of a function that is part of it.
    """
    seconds: dict[str, float] = {name: 0.0 for name, _, _ in stages}
    running: list[str] = []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            running.append(name)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                running.pop()
                if not running:  # a stage inside another is part of it
                    seconds[name] += time.perf_counter() - start

        return run

    with ExitStack() as patches:
        for name, owner, attribute in stages:
            patches.enter_context(patch.object(owner, attribute, timed(name, getattr(owner, attribute))))
        total = seconds_of(call)
    return {**seconds, "other": total - sum(seconds.values()), "total": total}


def seconds_of(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def peak_memory(action: Callable[[], object]) -> int:
    """Bytes by which the process's resident memory, shared memory included, grows at most while `action` runs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    result = action()
    peak = _status("VmHWM")
    del result
    return peak - before


def peak_allocated(action: Callable[[], object]) -> int:
    """Bytes of tensors on the CPU, those within torch's operators included, that `action` holds at most at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        action()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())), default=0)


def machine() -> str:
    return f"torch {torch.__version__}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def _status(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024

"""Ranks that raise, die or hang: what the caller is told, and how soon."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nki_parallel_attn.errors import RankFailedError, RankTimeoutError
from nki_parallel_attn.testing import run_ranks
from nki_parallel_attn.testing.run import GRACE, GRACE_AFTER_DEATH
from tests.patience import SOON


def failure(fn, world_size: int, timeout: float = 120) -> tuple[RankFailedError, float]:
    """The error of a call and the seconds it took, on processes that are already there."""
    run_ranks(dist.barrier, world_size)
    start = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        run_ranks(fn, world_size, timeout=timeout)
    seconds = time.monotonic() - start
    assert run_ranks(dist.get_rank, world_size) == list(range(world_size)), "the next call must not notice"
    return caught.value, seconds


def fail_by_rank() -> None:
    dist.barrier()
    if dist.get_rank() % 2:
        raise ValueError(f"odd rank {dist.get_rank()}")


def test_every_failing_rank_shows_its_traceback_with_source_lines() -> None:
    error, seconds = failure(fail_by_rank, 4)
    text = str(error)
    assert text.startswith("2 of 4 ranks failed")
    for rank in (1, 3):
        assert f"--- rank {rank}: ValueError: odd rank {rank} ---" in text
        assert isinstance(error.exceptions[rank], ValueError)
    assert f'File "{__file__}", line' in text
    assert 'raise ValueError(f"odd rank {dist.get_rank()}")' in text
    assert "ranks 0, 2: returned" in text
    assert "rank_worker" not in text
    assert seconds < SOON


def test_equal_failures_are_told_once() -> None:
    def fail() -> None:
        raise KeyError("the same")

    error, _ = failure(fail, 4)
    assert str(error).count("Traceback") == 1
    assert "--- ranks 0-3: KeyError: 'the same' ---" in str(error)
    assert sorted(error.exceptions) == [0, 1, 2, 3]


def test_peers_stuck_in_a_collective_get_a_short_grace_and_show_where_they_are() -> None:
    def fail_before_the_collective() -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            raise RuntimeError("refused")
        dist.all_reduce(torch.ones(1))  # rank 1 is missing here

    error, seconds = failure(fail_before_the_collective, 4)
    assert not isinstance(error, RankTimeoutError)
    assert "1 of 4 ranks failed; rank 1: RuntimeError: refused" in str(error)
    assert "--- ranks 0, 2, 3: not finished, and here ---" in str(error)
    assert "dist.all_reduce(torch.ones(1))  # rank 1 is missing here" in str(error)
    assert GRACE <= seconds < GRACE + SOON


def test_sys_exit_is_a_failure_with_a_traceback() -> None:
    error, _ = failure(lambda: sys.exit(3), 2)
    assert "SystemExit: 3" in str(error) and "Traceback" in str(error)


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        (lambda: os._exit(3), "died with exit code 3"),
        (lambda: os._exit(0), "died with exit code 0"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "died of SIGKILL (signal 9)"),
        (lambda: ctypes.string_at(0), "died of SIGSEGV (signal 11)"),
    ],
    ids=["exit-3", "exit-0", "sigkill", "sigsegv"],
)
def test_a_death_is_reported_at_once(ending, told: str, tmp_path: Path) -> None:
    def die() -> None:
        dist.barrier()  # the others have connected
        if dist.get_rank() == 1:
            while len(os.listdir(tmp_path)) < 2:  # and are on their way to sleep
                time.sleep(0.01)
            ending()
        (tmp_path / str(dist.get_rank())).touch()
        time.sleep(120)  # unlike a collective, this does not notice the death

    error, seconds = failure(die, 3)
    assert f"rank 1: {told}" in str(error).splitlines()[0]
    assert "--- ranks 0, 2: not finished, and here ---" in str(error)
    assert seconds < GRACE_AFTER_DEATH + SOON
    if "SIGSEGV" in told:
        assert "ending()" in str(error), "the Python stack of the crash"


def test_the_dead_rank_comes_before_the_peers_that_lost_it() -> None:
    def die() -> None:
        if dist.get_rank() == 2:
            os._exit(9)
        dist.barrier()

    error, _ = failure(die, 3)
    assert "rank 2: died with exit code 9" in str(error).splitlines()[0]


def hang_in_python() -> None:
    while dist.get_rank() == 0:
        time.sleep(0.01)


def hang_in_c() -> None:
    if dist.get_rank() == 0:
        ctypes.PyDLL(None).sleep(600)  # holds the interpreter lock


def hang_in_a_collective() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.ones(1), src=1)


@pytest.mark.parametrize("hang", [hang_in_python, hang_in_c, hang_in_a_collective])
def test_a_hang_shows_the_stacks(hang) -> None:
    error, seconds = failure(hang, 2, timeout=3)
    assert isinstance(error, RankTimeoutError)
    assert "rank 0 did not finish within 3 s" in str(error)
    assert "rank 1: returned" in str(error)
    assert f'File "{__file__}", line' in str(error) and f"in {hang.__name__}" in str(error)
    assert 3 <= seconds < 3 + SOON


def test_all_ranks_that_hang_show_their_stacks() -> None:
    def hang() -> None:
        if dist.get_rank() == 0:
            dist.recv(torch.ones(1), src=1)
        else:
            time.sleep(600)

    error, _ = failure(hang, 3, timeout=3)
    assert "ranks 0-2 did not finish" in str(error)
    assert "--- rank 0: not finished" in str(error) and "--- ranks 1, 2: not finished" in str(error)
    assert "dist.recv(torch.ones(1), src=1)" in str(error) and "time.sleep(600)" in str(error)


def test_what_a_rank_printed_before_it_died_is_seen(capfd) -> None:
    def die() -> None:
        print("last words")
        os._exit(1)

    failure(die, 1)
    assert "[rank 0] last words" in capfd.readouterr().out

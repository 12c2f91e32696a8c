"""The processes behind run_ranks(): kept, replaced, bounded, local, and gone when the caller is."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nki_parallel_attn.errors import RankFailedError
from nki_parallel_attn.testing import run, run_ranks
from nki_parallel_attn.testing.pool import MAX_IDLE_RANKS
from tests.patience import JOB, SOON

linux_only = pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads /proc")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until_gone(pids: list[int], seconds: float = SOON) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def test_processes_are_kept_and_shared_between_world_sizes() -> None:
    four = run_ranks(os.getpid, 4)
    assert len(set(four)) == 4 and os.getpid() not in four
    assert run_ranks(os.getpid, 2) == four[:2]
    with pytest.raises(RankFailedError):
        run_ranks(lambda: 1 / 0, 4)
    assert run_ranks(os.getpid, 4) == four, "a failure that all ranks survive keeps them"


@linux_only
def test_processes_are_replaced_after_a_hang_and_bounded_when_idle() -> None:
    before = run_ranks(os.getpid, 2)
    with pytest.raises(RankFailedError):
        run_ranks(lambda: time.sleep(60), 2, timeout=0.5)
    assert wait_until_gone(before) == []
    many = run_ranks(os.getpid, MAX_IDLE_RANKS + 2)
    assert not set(many) & set(before)
    assert wait_until_gone(many[MAX_IDLE_RANKS:]) == []
    assert all(is_alive(pid) for pid in many[:MAX_IDLE_RANKS])


def test_a_rank_that_died_between_two_calls_is_replaced() -> None:
    pids = run_ranks(os.getpid, 2)
    os.kill(pids[1], signal.SIGKILL)
    while run._pool.ranks[1].exit_status is None:
        run._pool.poll(SOON)
    assert run_ranks(dist.get_world_size, 2) == [2, 2]


def start_unmatched_collective() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def start_unmatched_send() -> None:
    if dist.get_rank() == 0:
        dist.isend(torch.ones(1), dst=1)


@pytest.mark.parametrize("leave", [start_unmatched_collective, start_unmatched_send])
def test_an_unfinished_collective_does_not_reach_the_next_call(leave) -> None:
    run_ranks(leave, 2)

    def total() -> float:
        value = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(value)
        return value.item()

    assert run_ranks(total, 2) == [3.0, 3.0]


def test_ranks_whose_group_does_not_end_are_replaced() -> None:
    def stick() -> int:
        dist.destroy_process_group = lambda: time.sleep(60) if dist.get_rank() == 1 else None
        return os.getpid()

    with pytest.warns(UserWarning, match="rank 1 left a collective unfinished"):
        before = run_ranks(stick, 2)
    assert not set(run_ranks(os.getpid, 2)) & set(before)


def test_the_group_is_new_even_when_the_call_destroyed_it() -> None:
    def make_groups() -> int:
        dist.new_group([0])
        dist.destroy_process_group()
        return dist.is_initialized()

    assert run_ranks(make_groups, 2) == [False, False]
    assert run_ranks(dist.is_initialized, 2) == [True, True]


@linux_only
def test_sockets_are_bound_to_loopback_only() -> None:
    def local_addresses() -> set[str]:
        dist.new_group([0, 1])
        dist.barrier()
        links = {
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        }
        inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
        found = set()
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] in inodes:
                    found.add(fields[1].split(":")[0])
        return found

    loopback = f"{int.from_bytes(socket.inet_aton('127.0.0.1'), sys.byteorder):08X}"
    assert run_ranks(local_addresses, 2) == [{loopback}] * 2


def test_calls_from_several_threads_take_turns() -> None:
    results: dict[int, list[int]] = {}

    def call(i: int) -> None:
        results[i] = run_ranks(lambda: i * 10 + dist.get_rank(), 2)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [i * 10, i * 10 + 1] for i in range(4)}


SCRIPT = """
import os, sys, time
from nki_parallel_attn.testing import run, run_ranks

def describe():
    import subprocess
    child = subprocess.Popen(["sleep", "600"])
    return os.getpid(), os.getppid(), child.pid

pids = run_ranks(describe, 2)
print(*{pid for triple in pids for pid in triple}, flush=True)
print(run._pool.directory, flush=True)
if sys.argv[1] == "hang":
    run_ranks(lambda: time.sleep(600), 2)
"""


@linux_only
@pytest.mark.parametrize("ending", ["exit", "sigkill", "sigint"])
def test_nothing_is_left_when_the_caller_ends(ending: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"  # without a __main__ guard
    script.write_text(SCRIPT)
    mode = "exit" if ending == "exit" else "hang"
    shared_before = set(os.listdir("/dev/shm"))
    caller = subprocess.Popen(
        [sys.executable, str(script), mode], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pids = list(map(int, caller.stdout.readline().split()))
    directory = Path(caller.stdout.readline().strip())
    assert len(pids) == 5
    if ending != "exit":
        time.sleep(0.3)
        assert directory.exists()
        caller.send_signal(signal.SIGKILL if ending == "sigkill" else signal.SIGINT)
    _, errors = caller.communicate(timeout=JOB)
    assert (caller.returncode == 0) == (ending == "exit"), errors
    assert wait_until_gone(pids) == []
    assert not directory.exists()
    assert not [name for name in set(os.listdir("/dev/shm")) - shared_before if any(str(p) in name for p in pids)]


def test_a_forked_copy_of_the_caller_starts_its_own() -> None:
    pids = run_ranks(os.getpid, 2)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(writer, repr(run_ranks(os.getpid, 2)).encode())
            from nki_parallel_attn.testing.run import close_pool

            close_pool()
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as stream:
        others = stream.read()
    assert os.waitpid(child, 0)[1] == 0
    assert not set(pids) & set(eval(others))
    assert run_ranks(os.getpid, 2) == pids

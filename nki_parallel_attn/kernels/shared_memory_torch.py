"""The exchange over shared memory, for the ranks of a group that run on one Linux host.

All ranks map one anonymous file (memfd), so that nothing is left behind however a rank ends, and the size of /dev/shm
does not matter. A round hands out memory from the start of the file in the order of the calls: the ranks make the same
calls, so they agree on every offset without talking. Each byte is written once, by its owner, and read where it lies.
The file keeps the size of the largest round for as long as the process group lives.

Ranks wait for each other on POSIX semaphores in the same file, one per pair of ranks. They block in the kernel (ranks
may outnumber cores), and POSIX makes sem_post and sem_wait memory barriers on every architecture: what a rank wrote
before a post is seen by the rank that waited for it, on x86 and on ARM.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import mmap
import os
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nki_parallel_attn.errors import PeerError, RankMismatchError
from nki_parallel_attn.kernels.collectives_torch import (
    MAX_DIGEST_BYTES,
    DistributedExchange,
    Exchange,
    Round,
    check_digest,
)

_SEMAPHORE_BYTES = 64  # sem_t has 32 on 64-bit Linux; one cache line each
_RECORD_BYTES = 1024  # a length and up to MAX_DIGEST_BYTES bytes
_ALIGNMENT = 64
_GROWTH_BYTES = 2 << 20
_LIVENESS_SECONDS = 0.2


class SharedMemoryUnavailable(Exception):
    """Raised on every rank of the group at once; the message says which rank cannot and why."""


def connect(distributed: DistributedExchange) -> SharedMemoryExchange:
    """A collective: all ranks map one file, or all raise SharedMemoryUnavailable.

    That the ranks share a host is not concluded from names: each rank opens rank 0's file through /proc and must find
    there the random bytes that rank 0 announced.
    """
    rank, size = distributed.rank, distributed.size
    arena = None
    offer: dict[str, Any] = {}
    error = ""
    try:
        offer = process_identity()
        if rank == 0:
            arena, nonce = _Arena.create(size)
            offer |= {"file": arena.file, "nonce": nonce}
    except OSError as problem:
        error = f"rank {rank}: {problem}"
    offers = [json.loads(text) for text in distributed.exchange_digest(json.dumps(offer).encode())]
    first = offers[0]
    if not error and "nonce" in first:
        try:
            if (offer["boot"], offer["pids"]) != (first["boot"], first["pids"]):
                raise OSError("runs on another host than rank 0, or in another container")
            if arena is None:
                arena = _Arena.attach(size, f"/proc/{first['pid']}/fd/{first['file']}", first["nonce"])
        except OSError as problem:
            error = f"rank {rank}: {problem}"
    errors = [text.decode() for text in distributed.exchange_digest(error[: MAX_DIGEST_BYTES // 4].encode())]
    if any(errors) or arena is None:
        raise SharedMemoryUnavailable("; ".join(filter(None, errors)))
    peers = [(int(peer["pid"]), str(peer["started"])) for peer in offers]
    return SharedMemoryExchange(rank, size, arena, peers, distributed.timeout)


def process_identity() -> dict[str, Any]:
    if not sys.platform.startswith("linux"):
        raise OSError(f"shared memory is used on Linux only, this is {sys.platform}")
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pids": os.readlink("/proc/self/ns/pid"),
        "pid": os.getpid(),
        "started": start_time(os.getpid()) or "",
    }


def start_time(pid: int) -> str | None:
    """Clock ticks from boot to the start of the process, which tell a reused pid; None when it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


class _Arena:
    """The shared file: nonce | failures | calls | digests | semaphores | data, which grows.

    failures, calls and digests are records, a length and bytes, that one rank writes: one failure, a ring of 4 calls
    and a ring of 2 digests per rank. A rank is never two calls ahead of a peer: no record is overwritten too early.
    """

    CALLS, DIGESTS = 4, 2

    def __init__(self, size: int, file: int) -> None:
        self.file = file
        self._size = size
        self._close = weakref.finalize(self, os.close, file)
        self._failures = mmap.PAGESIZE
        self._calls = self._failures + size * _RECORD_BYTES
        self._digests = self._calls + size * self.CALLS * _RECORD_BYTES
        self._semaphores = self._digests + size * self.DIGESTS * _RECORD_BYTES
        self._data_start = _round_up(self._semaphores + size * size * _SEMAPHORE_BYTES, mmap.PAGESIZE)
        os.posix_fallocate(file, 0, self._data_start)
        self._header = mmap.mmap(file, self._data_start)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._header))
        self._data: mmap.mmap | None = None
        self._libc = ctypes.CDLL(None, use_errno=True)

    @classmethod
    def create(cls, size: int) -> tuple[_Arena, str]:
        """A new arena and the nonce that proves to the other ranks that they opened this one."""
        arena = cls(size, os.memfd_create("nki_parallel_attn"))
        nonce = os.urandom(16)
        arena._header[:16] = nonce
        for waiter in range(size):
            for poster in range(size):
                if arena._libc.sem_init(arena._semaphore(waiter, poster), 1, 0):
                    raise OSError(ctypes.get_errno(), "sem_init failed")
        return arena, nonce.hex()

    @classmethod
    def attach(cls, size: int, path: str, nonce: str) -> _Arena:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        # Looked at before it is touched: it could be anyone's.
        if os.pread(file, 16, 0).hex() != nonce:
            os.close(file)
            raise OSError(f"{path} is not the file that rank 0 made")
        return cls(size, file)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A view of the data; offset in bytes, a multiple of 64, within what `reserve` has reserved."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        assert self._data is not None
        raw = torch.frombuffer(self._data, dtype=torch.uint8, count=nbytes, offset=offset)
        return raw.view(dtype).view(tuple(shape))

    def reserve(self, nbytes: int) -> None:
        """Maps at least nbytes of data. Views made before stay valid: they keep their mapping of the same pages."""
        if nbytes > (len(self._data) if self._data else 0):
            nbytes = _round_up(nbytes, _GROWTH_BYTES)
            # Never shrinks a file that a peer has already grown further; and when memory is short this raises here,
            # where a hole in the file would be a bus error at the first write.
            os.posix_fallocate(self.file, 0, self._data_start + nbytes)
            self._data = mmap.mmap(self.file, nbytes, offset=self._data_start)

    def post(self, waiter: int, poster: int) -> None:
        if self._libc.sem_post(self._semaphore(waiter, poster)):
            raise OSError(ctypes.get_errno(), "sem_post failed")

    def wait(self, waiter: int, poster: int, seconds: float) -> bool:
        """Takes one post of `poster` for `waiter`; False if none came in time, or when a signal came first."""
        fraction, whole = math.modf(time.time() + seconds)
        until = (ctypes.c_long * 2)(int(whole), int(fraction * 1e9))
        if self._libc.sem_timedwait(self._semaphore(waiter, poster), until) == 0:
            return True
        error = ctypes.get_errno()
        if error not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(error, "sem_timedwait failed")
        return False

    def posts(self, waiter: int, poster: int) -> int:
        """How many posts have not been taken."""
        value = ctypes.c_int()
        self._libc.sem_getvalue(self._semaphore(waiter, poster), ctypes.byref(value))
        return value.value

    def _semaphore(self, waiter: int, poster: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._address + self._semaphores + (waiter * self._size + poster) * _SEMAPHORE_BYTES)

    def write_call(self, rank: int, sequence: int, call: bytes) -> None:
        self._write(self._calls, rank * self.CALLS + sequence % self.CALLS, sequence.to_bytes(8, "little") + call)

    def read_call(self, rank: int, sequence: int) -> bytes | None:
        """None when the rank has failed before this call."""
        record = self._read(self._calls, rank * self.CALLS + sequence % self.CALLS)
        return record[8:] if record[:8] == sequence.to_bytes(8, "little") else None

    def write_digest(self, rank: int, sequence: int, digest: bytes) -> None:
        self._write(self._digests, rank * self.DIGESTS + sequence % self.DIGESTS, digest)

    def read_digest(self, rank: int, sequence: int) -> bytes:
        return self._read(self._digests, rank * self.DIGESTS + sequence % self.DIGESTS)

    def write_failure(self, rank: int, call: int, reason: bytes) -> None:
        self._write(self._failures, rank, call.to_bytes(8, "little") + reason)

    def failures(self) -> dict[int, bytes]:
        """Reasons by rank."""
        return {rank: record[8:] for rank, record in self._failure_records().items()}

    def failed_call(self) -> float:
        """The first call that failed, infinite while there is none."""
        calls = (int.from_bytes(record[:8], "little") for record in self._failure_records().values())
        return min(calls, default=math.inf)

    def _failure_records(self) -> dict[int, bytes]:
        return {rank: record for rank in range(self._size) if (record := self._read(self._failures, rank))}

    def _write(self, table: int, index: int, record: bytes) -> None:
        start = table + index * _RECORD_BYTES
        record = record[:MAX_DIGEST_BYTES]
        self._header[start + 2 : start + 2 + len(record)] = record
        self._header[start : start + 2] = len(record).to_bytes(2, "little")

    def _read(self, table: int, index: int) -> bytes:
        start = table + index * _RECORD_BYTES
        length = int.from_bytes(self._header[start : start + 2], "little")
        return self._header[start + 2 : start + 2 + length]


class SharedMemoryExchange(Exchange):
    """Made by `connect`."""

    transport = "shm"

    def __init__(self, rank: int, size: int, arena: _Arena, processes: list[tuple[int, str]], timeout: float) -> None:
        super().__init__(rank, size)
        self.arena = arena
        self._processes = processes
        self._timeout = timeout
        self._peers = [(rank + step) % size for step in range(1, size)]
        self._sequence = 0
        self._digest_sequence = 0
        self._awaited: bytes | None = None
        # Rounds, digests and barriers begun. A failure is of one of them: a rank that comes late to it must fail too,
        # and one that had done its part before the failure must not, or the ranks would no longer be at the same call.
        self._begun = 0

    def ready(self) -> bool:
        begun = self._begun
        if self.arena.failed_call() <= begun:
            return False
        try:
            self._begin()
        except PeerError:
            if self.arena.failed_call() <= begun:
                return False
            raise
        self._begun = begun
        return True

    def exchange_digest(self, digest: bytes) -> list[bytes]:
        check_digest(digest)
        self._begin()
        sequence = self._digest_sequence
        self._digest_sequence += 1
        self.arena.write_digest(self.rank, sequence, digest)
        self._sent["digest"] += (self.size - 1) * len(digest)
        self.meet(b"exchange_digest")
        return [self.arena.read_digest(rank, sequence) for rank in range(self.size)]

    def barrier(self) -> None:
        self._begin()
        self.meet(b"barrier")

    def meet(self, call: bytes) -> None:
        """Publishes what this rank has written, and waits until every peer has done so in the same call."""
        self._arrive(call)
        self._finish()

    def count(self, op: str, nbytes: int) -> None:
        self._sent[op] += nbytes

    def _open_round(self) -> Round:
        self._begin()
        return _SharedMemoryRound(self)

    def _close_round(self, error: BaseException | None) -> None:
        if error is None:
            self._arrive(b"end of round")
        else:
            self._fail(error)

    def _begin(self) -> None:
        """Also waits until every peer has left the last round: its memory is free then."""
        self._begun += 1
        self._finish()

    def _arrive(self, call: bytes) -> None:
        self.arena.write_call(self.rank, self._sequence, call)
        self._awaited = call
        for peer in self._peers:
            self.arena.post(peer, self.rank)

    def _finish(self) -> None:
        """Waits for the peers' part of this rank's last call, if that has not been done."""
        try:
            if self._awaited is not None:
                for peer in self._peers:
                    self._wait(peer)
                self._compare_calls(self._awaited)
            self._raise_if_failed()
        except BaseException as error:
            self._fail(error)
            raise
        if self._awaited is not None:
            self._awaited = None
            self._sequence += 1

    def _wait(self, peer: int) -> None:
        deadline = time.monotonic() + self._timeout
        while not self.arena.wait(self.rank, peer, _LIVENESS_SECONDS):
            self._raise_if_failed()
            pid, started = self._processes[peer]
            # The posts are read last: a rank may end after its last one.
            if start_time(pid) != started and not self.arena.posts(self.rank, peer):
                raise PeerError(f"rank {peer} of the group (process {pid}) has died")
            if time.monotonic() > deadline:
                raise PeerError(f"rank {peer} of the group did not arrive within {self._timeout:g} s")

    def _compare_calls(self, call: bytes) -> None:
        for peer in self._peers:
            theirs = self.arena.read_call(peer, self._sequence)
            if theirs is not None and theirs != call:
                raise RankMismatchError(
                    f"ranks of one group make different calls: rank {self.rank} {call.decode(errors='replace')}, "
                    f"rank {peer} {theirs.decode(errors='replace')}"
                )

    def _fail(self, error: BaseException) -> None:
        if not self.arena.failures():
            self.arena.write_failure(self.rank, self._begun, f"{type(error).__name__}: {error}".encode())
            for peer in self._peers:
                self.arena.post(peer, self.rank)

    def _raise_if_failed(self) -> None:
        for rank, reason in self.arena.failures().items():
            raise PeerError(f"rank {rank} of the group failed: {reason.decode(errors='replace')}")


class _SharedMemoryRound(Round):
    def __init__(self, exchange: SharedMemoryExchange) -> None:
        self._exchange = exchange
        self._used = 0
        self._outboxes: list[tuple[list[torch.Tensor], int]] = []

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        exchange = self._exchange
        shape = (*tensor.shape[:dim], exchange.size, *tensor.shape[dim:])
        gathered = exchange.arena.tensor(self._take(exchange.size * tensor.nbytes), shape, tensor.dtype)
        gathered.select(dim, exchange.rank).copy_(tensor.detach())
        exchange.count("all_gather", (exchange.size - 1) * tensor.nbytes)
        exchange.meet(f"all_gather({list(tensor.shape)}, {tensor.dtype}, dim={dim})".encode())
        return gathered

    def outbox(self, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        size, rank = self._exchange.size, self._exchange.rank
        start = self._take(size * (size - 1) * _slot_bytes(shape, dtype))
        outbox = [
            torch.empty(tuple(shape), dtype=dtype) if peer == rank else self._slot(start, rank, peer, shape, dtype)
            for peer in range(size)
        ]
        self._outboxes.append((outbox, start))
        return outbox

    def all_to_all(self, *outboxes: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        exchange = self._exchange
        starts = [next(start for known, start in self._outboxes if known is outbox) for outbox in outboxes]
        kinds = [(tuple(outbox[0].shape), outbox[0].dtype) for outbox in outboxes]
        own_bytes = [outbox[0].nbytes for outbox in outboxes]
        exchange.count("all_to_all", (exchange.size - 1) * sum(own_bytes))
        exchange.meet(f"all_to_all({', '.join(f'{list(shape)} {dtype}' for shape, dtype in kinds)})".encode())
        return [
            [
                outbox[peer] if peer == exchange.rank else self._slot(start, peer, exchange.rank, shape, dtype)
                for peer in range(exchange.size)
            ]
            for outbox, start, (shape, dtype) in zip(outboxes, starts, kinds, strict=True)
        ]

    def _take(self, nbytes: int) -> int:
        start = self._used
        self._used += _round_up(nbytes, _ALIGNMENT)
        self._exchange.arena.reserve(self._used)
        return start

    def _slot(
        self, start: int, source: int, destination: int, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """What `source` writes for `destination`. A rank has size - 1 slots, side by side: none for itself."""
        index = source * (self._exchange.size - 1) + destination - (destination > source)
        return self._exchange.arena.tensor(start + index * _slot_bytes(shape, dtype), shape, dtype)


def _slot_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return _round_up(math.prod(shape) * dtype.itemsize, _ALIGNMENT)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

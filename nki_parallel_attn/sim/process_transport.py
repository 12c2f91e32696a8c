"""Ranks in processes of their own, under torchrun: meetings over torch.distributed.

Ranks announce what they do in the process group's store: "arrived at this meeting", "waits in", "has ended", "has
failed". A rank that waits reads what its peers are doing, so it knows within a moment that one of them will not come.
All ranks launch the same kernels in the same order; a kernel for one rank alone is launched with world_size=1.
Tensors travel point to point between the processes.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .errors import DivergenceError
from .rendezvous import Meeting

_LOOK_SECONDS = 0.1


class ProcessTransport:
    """This process's rank of the default process group, for one kernel launch after another.

    Raises:
        RuntimeError: the default process group has no CPU backend.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        group = dist.group.WORLD
        assert group is not None
        if "cpu" not in {device.type for device in group._device_types}:
            raise RuntimeError(
                f"the simulator's ranks talk on the CPU, the default process group is {dist.get_backend()}: "
                "use init_process_group('cpu:gloo,...')"
            )
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore("nki_parallel_attn.sim", store)
        self._timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._launch = 0

    @property
    def local_ranks(self) -> Sequence[int]:
        """The one rank that runs here."""
        return (self.rank,)

    def begin(self) -> None:
        """A kernel starts."""
        self._launch += 1
        self._announce("runs")

    def end(self, error: BaseException | None) -> None:
        """A kernel has ended."""
        self._announce("has ended" if error is None else f"has failed: {type(error).__name__}: {error}")

    def exchange(self, meeting: Meeting, sources: dict[int, list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Every rank's sources, once all ranks have arrived with the same signature."""
        number = self._counts[meeting.ranks]
        self._counts[meeting.ranks] += 1
        mine = sources[self.rank]
        self._set(self._key(meeting.ranks, number, self.rank), str(meeting.signature), meeting.first.location)
        self._announce("waits", str(meeting.signature), meeting.first.location, meeting.ranks, number)
        peers = [rank for rank in meeting.ranks if rank != self.rank]
        self._wait(meeting, number, peers)
        self._compare(meeting, number, peers)
        if number:
            # Every peer has arrived here, so none will read the last meeting again.
            self._store.delete_key(self._key(meeting.ranks, number - 1, self.rank))
        self._announce("runs")
        return self._swap(meeting.ranks, mine)

    def _wait(self, meeting: Meeting, number: int, peers: list[int]) -> None:
        keys = {rank: self._key(meeting.ranks, number, rank) for rank in peers}
        deadline = time.monotonic() + self._timeout
        pause = 0.0005
        look = time.monotonic() + _LOOK_SECONDS
        while keys:
            keys = {rank: key for rank, key in keys.items() if not self._store.check([key])}
            if not keys:
                return
            if time.monotonic() > look:
                for rank, key in keys.items():
                    reason = self._will_not_come(rank, meeting, number)
                    # What it has announced is looked at first: it may have arrived since.
                    if reason and not self._store.check([key]):
                        raise DivergenceError(
                            f"ranks diverge: rank {self.rank} calls {meeting.signature} at {meeting.first.location}, "
                            f"{reason}"
                        )
                if time.monotonic() > deadline:
                    raise DivergenceError(
                        f"rank {self.rank} calls {meeting.signature} at {meeting.first.location}; "
                        f"ranks {sorted(keys)} did not arrive within {self._timeout:g} s"
                    )
                look = time.monotonic() + _LOOK_SECONDS
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def _will_not_come(self, rank: int, meeting: Meeting, number: int) -> str | None:
        """Why `rank` cannot arrive any more, or None when it still may."""
        key = f"state/{rank}"
        if not self._store.check([key]):
            return None
        state = json.loads(self._store.get(key))
        where = f" at {state['location']}" if state["location"] else ""
        if not _alive(state["host"], state["pid"]):
            return f"rank {rank} (process {state['pid']}) has died"
        doing = state["doing"]
        if state["launch"] < self._launch:
            return None
        if doing.startswith("has failed") or state["launch"] > self._launch or doing == "has ended":
            return f"rank {rank} {doing}{where}" if doing != "runs" else f"rank {rank} runs another kernel"
        if doing != "waits":
            return None
        theirs = tuple(state["ranks"])
        crossed = self.rank in theirs and (theirs, state["number"]) != (meeting.ranks, number)
        if crossed and self._counts[theirs] <= state["number"]:
            return f"rank {rank} waits in {state['signature']} of ranks {list(theirs)}{where}: another group"
        return None

    def _compare(self, meeting: Meeting, number: int, peers: list[int]) -> None:
        signature = str(meeting.signature)
        for rank in peers:
            theirs, where = json.loads(self._store.get(self._key(meeting.ranks, number, rank)))
            if theirs != signature:
                raise DivergenceError(
                    f"ranks diverge: rank {self.rank} calls {signature} at {meeting.first.location}, "
                    f"rank {rank} calls {theirs} at {where}"
                )

    def _swap(self, ranks: tuple[int, ...], mine: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        gathered = [mine if rank == self.rank else [torch.empty_like(t).contiguous() for t in mine] for rank in ranks]
        outgoing = [_bytes(t.contiguous()) for t in mine]
        work: list[Any] = []
        for index, rank in enumerate(ranks):
            if rank == self.rank:
                continue
            work += [dist.irecv(_bytes(t), src=rank) for t in gathered[index]]
            work += [dist.isend(t, dst=rank) for t in outgoing]
        for handle in work:
            handle.wait()
        return gathered

    def _announce(
        self,
        doing: str,
        signature: str = "",
        location: str | None = None,
        ranks: Sequence[int] = (),
        number: int = 0,
    ) -> None:
        state = {
            "doing": doing,
            "launch": self._launch,
            "signature": signature,
            "location": location,
            "ranks": list(ranks),
            "number": number,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._store.set(f"state/{self.rank}", json.dumps(state))

    def _set(self, key: str, *values: str) -> None:
        self._store.set(key, json.dumps(values))

    def _key(self, ranks: tuple[int, ...], number: int, rank: int) -> str:
        return f"meeting/{','.join(map(str, ranks))}/{number}/{rank}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _alive(host: str, pid: int) -> bool:
    """False when the process is known to have ended; other hosts cannot be asked."""
    if host != socket.gethostname() or not Path("/proc/self/stat").exists():
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


_transports: WeakKeyDictionary[dist.ProcessGroup, ProcessTransport] = WeakKeyDictionary()


def process_transport() -> ProcessTransport | None:
    """The transport of the default process group; None where this process is alone."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    group = dist.group.WORLD
    assert group is not None
    found = _transports.get(group)
    if found is None:
        found = _transports[group] = ProcessTransport()
    return found

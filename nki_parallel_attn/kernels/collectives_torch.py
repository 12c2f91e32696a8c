"""Collectives of the torch twins: one exchange per process group, over shared memory or torch.distributed.

    exchange = exchange_for(group)
    with exchange.round() as round:                      # its buffers live until the end of the round
        q_all = round.all_gather(q, dim=1)               # read in place where ranks share memory
        outbox = round.outbox(shape, torch.bfloat16)     # write outbox[peer], read parts[peer]
        (parts,) = round.all_to_all(outbox)

A round exists so that data is written once, by its owner, and read where it lies. `Exchange.all_gather` and
`Exchange.all_to_all` are the same collectives with results that belong to the caller.

All ranks of a group make the same calls in the same order. The environment variable NKI_PARALLEL_ATTN_TRANSPORT forces
a transport: `shm`, or `gloo` for torch.distributed. Unset, CPU tensors take shared memory where all ranks can map it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from nki_parallel_attn.errors import ArgumentError, PeerError, RankMismatchError

MAX_DIGEST_BYTES = 1022
TRANSPORT_VARIABLE = "NKI_PARALLEL_ATTN_TRANSPORT"
HANG_UP_TAG = 2**31 - 1
"""Of messages that nobody sends."""


class Round(ABC):
    """One sequence of collectives whose buffers are recycled when the round ends: copy what must outlive it."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Stacks the ranks' tensors along a new dimension.

        Args:
            tensor: any strides; shape and dtype are the same on all ranks.
            dim: where the new dimension is inserted, 0..tensor.dim().

        Returns:
            Contiguous, shape `tensor.shape[:dim] + (size,) + tensor.shape[dim:]`. Read-only: ranks may share it.
        """

    @abstractmethod
    def outbox(self, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Uninitialised contiguous tensors for `all_to_all`, one per rank.

        The own one is private and outlives the round.
        """

    @abstractmethod
    def all_to_all(self, *outboxes: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """For each outbox, the list of what every rank wrote for this one; the own entry is handed back as it is.

        What came from peers is read-only. Several outboxes cost one synchronisation.
        """


class Exchange(ABC):
    """Collectives over one process group.

    Raises, from every method: PeerError when a peer dies, fails inside a round or does not arrive within the group's
    timeout; RankMismatchError, over shared memory, when ranks call different collectives or with different shapes.

    Attributes:
        rank, size: place in the group, and its size.
        transport: "shm", or the torch.distributed backend.
    """

    transport: str

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._sent: Counter[str] = Counter()
        self._in_round = False

    def ready(self) -> bool:
        """Whether the next call can use this exchange; False, on all ranks alike, when an earlier call has failed.

        Raises:
            PeerError: a peer has already failed in the call that this rank comes to make, which thereby counts as made.
        """
        return True

    @abstractmethod
    def exchange_digest(self, digest: bytes) -> list[bytes]:
        """Every rank's digest, in rank order; at most MAX_DIGEST_BYTES each, lengths may differ."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns once every rank has arrived."""

    @abstractmethod
    def _open_round(self) -> Round: ...

    @abstractmethod
    def _close_round(self, error: BaseException | None) -> None: ...

    @contextmanager
    def round(self) -> Iterator[Round]:
        """A `Round`, one at a time. Over shared memory an exception inside it also stops the peers, at once.

        Over torch.distributed peers wait for this rank until it ends or their timeout is over: nothing ends a wait of
        gloo, neither the backend's abort() nor its shutdown() on this side, and a wait with a timeout breaks the group.
        A group that has lost a rank is broken, so then that is what the others do.
        """
        if self._in_round:
            raise RuntimeError("a round of this exchange is already open")
        self._in_round = True
        try:
            yield self._open_round()
        except BaseException as error:
            self._close_round(error)
            raise
        else:
            self._close_round(None)
        finally:
            self._in_round = False

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """`Round.all_gather` with a result that belongs to the caller."""
        with self.round() as opened:
            gathered = opened.all_gather(tensor, dim)
            return gathered.clone() if self.transport == "shm" else gathered

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sends tensor[i] to rank i; entry j of the result came from rank j. Shape [size, ...]."""
        if tensor.dim() == 0 or tensor.shape[0] != self.size:
            raise ArgumentError("tensor", f"shape {tuple(tensor.shape)}", f"{self.size} entries, one per rank")
        with self.round() as opened:
            outbox = opened.outbox(tensor.shape[1:], tensor.dtype)
            for peer, slot in enumerate(outbox):
                slot.copy_(tensor[peer])
            (parts,) = opened.all_to_all(outbox)
            return torch.stack(parts)

    def traffic(self) -> dict[str, int]:
        """Bytes this rank has sent to its peers, by collective."""
        return dict(self._sent)

    def reset_traffic(self) -> None:
        self._sent.clear()


class DistributedExchange(Exchange):
    """torch.distributed on any device; without a group, the one rank that there is.

    CPU tensors go point to point as bytes: faster than gloo's collectives, and gloo refuses float8 and unsigned types.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        super().__init__(*((dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)))
        self._group = ref(group) if group else None
        self.device = device
        self.transport = dist.get_backend(group) if group else "gloo"

    def exchange_digest(self, digest: bytes) -> list[bytes]:
        check_digest(digest)
        framed = len(digest).to_bytes(2, "little") + digest.ljust(MAX_DIGEST_BYTES, b"\0")
        rows = self.gather(torch.frombuffer(bytearray(framed), dtype=torch.uint8).to(self.device), "digest").cpu()
        received = [bytes(row.tolist()) for row in rows]
        return [row[2 : 2 + int.from_bytes(row[:2], "little")] for row in received]

    def barrier(self) -> None:
        self.gather(torch.zeros(1, dtype=torch.uint8, device=self.device), "barrier")

    def gather(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """[size, *tensor.shape] in rank order."""
        gathered = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=self.device)
        own = gathered[self.rank].copy_(tensor.detach())
        self._sent[op] += (self.size - 1) * tensor.nbytes
        if self.size == 1 or tensor.numel() == 0:
            return gathered
        with _peer_errors():
            if self.device.type == "cpu":
                self._point_to_point([own] * self.size, list(gathered.unbind()))
            else:
                dist.all_gather_into_tensor(_bytes(gathered), _bytes(own), group=self.group)
        return gathered

    def swap(self, outbox: list[torch.Tensor]) -> list[torch.Tensor]:
        parts = [slot if peer == self.rank else torch.empty_like(slot) for peer, slot in enumerate(outbox)]
        self._sent["all_to_all"] += sum(slot.nbytes for slot in outbox) - outbox[self.rank].nbytes
        if self.size == 1 or outbox[0].numel() == 0:
            return parts
        with _peer_errors():
            if self.device.type == "cpu":
                self._point_to_point(outbox, parts)
            else:
                dist.all_to_all([_bytes(part) for part in parts], [_bytes(slot) for slot in outbox], group=self.group)
        return parts

    def swap_uneven(self, outgoing: list[torch.Tensor], incoming: list[torch.Tensor]) -> list[torch.Tensor]:
        """All-to-all of parcels of any size: fills incoming[peer] with the peer's outgoing[this rank], and returns it.

        The own parcel is handed over as it is. Nothing is sent for an empty parcel.
        """
        self._sent["all_to_all"] += sum(parcel.nbytes for parcel in outgoing) - outgoing[self.rank].nbytes
        with _peer_errors():
            if self.device.type == "cpu":
                self._point_to_point(outgoing, incoming)
            elif self.size > 1:
                dist.all_to_all([_bytes(t) for t in incoming], [_bytes(t) for t in outgoing], group=self.group)
        return [outgoing[peer] if peer == self.rank else parcel for peer, parcel in enumerate(incoming)]

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group() if self._group else None
        if group is None:
            raise PeerError("the process group of this exchange has been destroyed")
        return group

    @property
    def timeout(self) -> float:
        """Seconds; torch keeps it with the group's backend for CPU tensors."""
        return float(self.group._get_backend(torch.device("cpu")).options._timeout.total_seconds())

    def _point_to_point(self, outgoing: list[torch.Tensor], incoming: list[torch.Tensor]) -> None:
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        senders = [peer for peer in reversed(peers) if incoming[peer].numel()]
        receivers = [peer for peer in peers if outgoing[peer].numel()]
        if not senders and not receivers:
            return
        group = self.group
        try:
            work = [dist.irecv(_bytes(incoming[peer]), group=group, group_src=peer) for peer in senders]
            work += [dist.isend(_bytes(outgoing[peer]), group=group, group_dst=peer) for peer in receivers]
            # Each handle once: a second wait() on a gloo handle blocks until the timeout.
            for handle in work:
                if handle is not None:
                    handle.wait()
        except RuntimeError:
            self._hang_up(peers)
            raise

    def _hang_up(self, peers: list[int]) -> None:
        """Close this rank's connections, so that a peer that waits for it raises too, and not after its timeout only.

        The group has lost a rank, so there is nothing left to break. gloo closes them all when one wait times out.
        """
        if self.transport != "gloo":
            return
        for peer in peers:
            with suppress(RuntimeError):  # the timeout, or the rank that is lost
                handle = dist.irecv(torch.empty(1), group=self.group, group_src=peer, tag=HANG_UP_TAG)
                if handle is not None:
                    handle.wait(timedelta(milliseconds=1))

    def _open_round(self) -> Round:
        return _DistributedRound(self)

    def _close_round(self, error: BaseException | None) -> None:
        pass


class _DistributedRound(Round):
    def __init__(self, exchange: DistributedExchange) -> None:
        self._exchange = exchange

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return self._exchange.gather(tensor, "all_gather").movedim(0, dim).contiguous()

    def outbox(self, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        return [
            torch.empty(tuple(shape), dtype=dtype, device=self._exchange.device) for _ in range(self._exchange.size)
        ]

    def all_to_all(self, *outboxes: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        return [self._exchange.swap(outbox) for outbox in outboxes]


# Keyed by the group object, weakly: groups are destroyed and made again in one process, under the same names.
_exchanges: WeakKeyDictionary[dist.ProcessGroup, dict[str, Exchange]] = WeakKeyDictionary()


def exchange_for(group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> Exchange:
    """The group's exchange for tensors on `device`; the first call for a group is a collective.

    Args:
        group: None is the default group, or one rank alone where torch.distributed is not initialised.

    Raises:
        ArgumentError: this rank is not in the group, or the transport that is asked for is unknown or impossible.
        PeerError: see `Exchange.ready`.
        RankMismatchError: the ranks ask for different transports.
    """
    device = torch.device(device)
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return DistributedExchange(None, device)
        group = dist.group.WORLD
    assert group is not None
    if dist.get_rank(group) < 0:
        raise ArgumentError(
            "group", f"a group without rank {dist.get_rank()}", "a process group that contains this rank"
        )
    known = _exchanges.setdefault(group, {})
    exchange = known.get(device.type)
    if exchange is None or not exchange.ready():
        exchange = known[device.type] = _connect(group, device)
    return exchange


def exchanges_for(groups: Sequence[dist.ProcessGroup | None], device: torch.device | str = "cpu") -> list[Exchange]:
    """`exchange_for` each group; where one fails, the peers in the others are stopped as well."""
    exchanges: list[Exchange] = []
    errors: list[BaseException] = []
    for group in groups:
        try:
            exchanges.append(exchange_for(group, device))
        except BaseException as error:
            errors.append(error)
    if errors:
        with open_rounds(exchanges):
            raise errors[0]
    return exchanges


@contextmanager
def open_rounds(exchanges: Sequence[Exchange]) -> Iterator[list[Round]]:
    """A round of each exchange at once; what fails in one, or in opening it, stops the peers in the others as well."""
    with ExitStack() as stack:
        rounds: list[Round] = []
        errors: list[BaseException] = []
        for exchange in exchanges:
            try:
                rounds.append(stack.enter_context(exchange.round()))
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]
        yield rounds


def _connect(group: dist.ProcessGroup, device: torch.device) -> Exchange:
    from nki_parallel_attn.kernels.shared_memory_torch import SharedMemoryUnavailable, connect

    distributed = DistributedExchange(group, device)
    if device.type != "cpu" or distributed.size == 1:
        return distributed
    wanted = os.environ.get(TRANSPORT_VARIABLE, "")
    # Told to all before any rank raises.
    asked = [
        digest.decode(errors="replace") for digest in distributed.exchange_digest(wanted.encode()[:MAX_DIGEST_BYTES])
    ]
    if len(set(asked)) > 1:
        raise RankMismatchError(f"{TRANSPORT_VARIABLE} differs between ranks: {asked}")
    if wanted not in ("", "gloo", "shm"):
        raise ArgumentError(TRANSPORT_VARIABLE, repr(wanted), "shm, gloo or unset")
    try:
        return distributed if wanted == "gloo" else connect(distributed)
    except SharedMemoryUnavailable as unavailable:
        if wanted == "shm":
            raise ArgumentError(TRANSPORT_VARIABLE, "shm", "ranks of one host", str(unavailable)) from None
        return distributed
    finally:
        distributed.reset_traffic()


def check_digest(digest: bytes) -> None:
    if len(digest) > MAX_DIGEST_BYTES:
        raise ArgumentError("digest", f"{len(digest)} bytes", f"at most {MAX_DIGEST_BYTES}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@contextmanager
def _peer_errors() -> Iterator[None]:
    """torch.distributed reports a lost peer or a timeout as a bare RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"a collective failed, a peer has died or did not arrive in time: {error}") from error

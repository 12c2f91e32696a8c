"""Every collective of an exchange against what its definition says, over both transports."""

from __future__ import annotations

import gc
import os
import random
import time

import pytest
import torch
import torch.distributed as dist

from nki_parallel_attn.errors import ArgumentError, PeerError, RankMismatchError
from nki_parallel_attn.kernels import collectives_torch, shared_memory_torch
from nki_parallel_attn.kernels.collectives_torch import MAX_DIGEST_BYTES, TRANSPORT_VARIABLE, Exchange, exchange_for
from nki_parallel_attn.testing import run_ranks
from tests.patience import SOON

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.uint8, torch.uint16]
DTYPES += [torch.uint32, torch.int32, torch.int64, torch.bool]
SHAPES = [(), (1,), (0, 3), (7,), (3, 5), (2, 3, 129), (64, 513)]
CASES = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]


def new_exchange(transport: str) -> tuple[dist.ProcessGroup, Exchange]:
    """An exchange of its own group over the world; the caller keeps the group, the exchange lives with it."""
    os.environ[TRANSPORT_VARIABLE] = transport
    group = dist.new_group()
    exchange = exchange_for(group)
    del os.environ[TRANSPORT_VARIABLE]
    assert exchange.transport == (transport if exchange.size > 1 else "gloo")
    return group, exchange


def random_bytes_as(shape: tuple[int, ...], dtype: torch.dtype, *seed: int) -> torch.Tensor:
    """The same on every rank for the same seed. Compared as bytes: float patterns may be NaN."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    return torch.randint(high, (nbytes,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def cases_for(exchange: Exchange) -> list[tuple[int, tuple[tuple[int, ...], torch.dtype]]]:
    """All of them for few ranks, else every sixth, in which each shape and each dtype still occurs."""
    return list(enumerate(CASES))[:: 1 if exchange.size < 4 else 6]


def check_all_gather(exchange: Exchange) -> None:
    for case, (shape, dtype) in cases_for(exchange):
        each = [random_bytes_as(shape, dtype, case, rank) for rank in range(exchange.size)]
        for dim in range(len(shape) + 1):
            gathered = exchange.all_gather(each[exchange.rank], dim)
            assert gathered.dtype == dtype and gathered.is_contiguous()
            assert gathered.shape == (*shape[:dim], exchange.size, *shape[dim:])
            for rank, expected in enumerate(each):
                assert as_bytes(gathered.select(dim, rank)) == as_bytes(expected)


def check_all_to_all(exchange: Exchange) -> None:
    for case, (shape, dtype) in cases_for(exchange):
        sent = [random_bytes_as((exchange.size, *shape), dtype, case, rank) for rank in range(exchange.size)]
        received = exchange.all_to_all(sent[exchange.rank])
        assert received.dtype == dtype and received.shape == (exchange.size, *shape)
        for source in range(exchange.size):
            assert as_bytes(received[source]) == as_bytes(sent[source][exchange.rank])


def check_strides(exchange: Exchange) -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    for view in (base.transpose(0, 2), base[:, ::2, 1:], base.flip(1), base[0, 0, 0].expand(3, 2), base[:1, 0, 0]):
        assert exchange.all_gather(view + exchange.rank, 1).select(1, exchange.size - 1).equal(view + exchange.size - 1)
        assert exchange.all_gather(view.clone().requires_grad_())[0].equal(view)
        slots = view.unsqueeze(0).expand(exchange.size, *view.shape)
        assert exchange.all_to_all(slots)[exchange.size - 1].equal(view)


def check_rounds(exchange: Exchange) -> None:
    """Growing, shrinking and mixed rounds; ranks leave and enter at different times; what is kept stays intact."""
    pace = random.Random(exchange.rank)
    kept: list[tuple[torch.Tensor, float]] = []
    for step in range(30):
        size = random.Random(step).choice([1, 63, 4097, 1000 * step + 1])
        value = float(step * 100 + exchange.rank)
        with exchange.round() as opened:
            if pace.random() < 0.2:
                time.sleep(0.002)
            q = opened.all_gather(torch.full((3, size), value), dim=1)
            partial, statistics = opened.outbox((size, 2), torch.bfloat16), opened.outbox((size,), torch.float64)
            for peer in range(exchange.size):
                partial[peer].fill_(peer + exchange.rank)
                statistics[peer].fill_(value + peer / 64)
            digit = opened.all_gather(torch.tensor(exchange.rank))
            partials, all_statistics = opened.all_to_all(partial, statistics)
            for peer in range(exchange.size):
                assert (q[:, peer] == step * 100 + peer).all()
                assert (partials[peer] == peer + exchange.rank).all()
                assert (all_statistics[peer] == step * 100 + peer + exchange.rank / 64).all()
            assert digit.tolist() == list(range(exchange.size))
            assert partials[exchange.rank] is partial[exchange.rank]
        kept.append((statistics[exchange.rank], value + exchange.rank / 64))
    assert all((tensor == value).all() for tensor, value in kept)


def check_digests(exchange: Exchange) -> None:
    for step in range(50):
        expected = [bytes([step]) * (rank * step % MAX_DIGEST_BYTES) for rank in range(exchange.size)]
        assert exchange.exchange_digest(expected[exchange.rank]) == expected
    assert exchange.exchange_digest(b"\xff" * MAX_DIGEST_BYTES)[-1] == b"\xff" * MAX_DIGEST_BYTES
    with pytest.raises(ArgumentError, match="digest"):
        exchange.exchange_digest(b"x" * (MAX_DIGEST_BYTES + 1))
    exchange.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8])
def test_collectives(world_size):
    def body() -> None:
        for transport in ("shm", "gloo"):
            group, exchange = new_exchange(transport)
            check_digests(exchange)
            check_rounds(exchange)
            if world_size in (1, 2, 3) or transport == "shm":
                check_all_gather(exchange)
                check_all_to_all(exchange)
                check_strides(exchange)
            dist.destroy_process_group(group)

    run_ranks(body, world_size)


def test_barrier_holds_every_rank_until_the_last():
    def body() -> list[float]:
        times = []
        for transport in ("shm", "gloo"):
            _group, exchange = new_exchange(transport)
            exchange.barrier()
            time.sleep(0.3 * exchange.rank)
            times.append(time.time())
            exchange.barrier()
            times.append(time.time())
        return times

    results = run_ranks(body, 3)
    for before, after in ((0, 1), (2, 3)):
        assert min(times[after] for times in results) >= max(times[before] for times in results)


def test_waiting_costs_no_cpu_time():
    def body() -> float:
        _group, exchange = new_exchange("shm")
        exchange.barrier()
        if exchange.rank == 0:
            time.sleep(1.5)
        start = time.process_time()
        exchange.barrier()
        return time.process_time() - start

    assert max(run_ranks(body, 2)) < 0.5


def test_traffic_counts_what_peers_receive():
    def body() -> list[dict[str, int]]:
        counts = []
        for transport in ("shm", "gloo"):
            _group, exchange = new_exchange(transport)
            exchange.all_gather(torch.zeros(10, 3, dtype=torch.bfloat16))
            exchange.all_to_all(torch.zeros(4, 5, dtype=torch.float32))
            counts.append(exchange.traffic())
            exchange.reset_traffic()
            assert exchange.traffic() == {}
        return counts

    for counts in run_ranks(body, 4):
        assert counts == [{"all_gather": 3 * 60, "all_to_all": 3 * 20}] * 2


def test_overlapping_groups_with_rounds_open_at_once():
    def body(rank: int) -> None:
        groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3), (3, 1, 0))}
        mine = {ranks: exchange_for(group) for ranks, group in groups.items() if rank in ranks}
        mine[(0, 1, 2, 3)] = exchange_for()
        for step in range(30):
            with mine[next(ranks for ranks in ((0, 1), (2, 3)) if rank in ranks)].round() as outer:
                rows = outer.all_gather(torch.full((step, 1000), rank))
                with mine[next(ranks for ranks in ((0, 2), (1, 3)) if rank in ranks)].round() as inner:
                    columns = inner.all_gather(torch.full((1000, step), rank))
                    assert [row.max().item() for row in rows if step] == ([rank & 2, rank | 1] if step else [])
                    assert [row.max().item() for row in columns if step] == ([rank & 1, rank | 2] if step else [])
            if rank != 2:  # new_group sorts its ranks
                assert mine[(3, 1, 0)].exchange_digest(bytes([rank])) == [b"\0", b"\1", b"\3"]
            assert mine[(0, 1, 2, 3)].all_gather(torch.tensor(rank)).tolist() == [0, 1, 2, 3]
        with pytest.raises(ArgumentError, match="group"):
            exchange_for(groups[(2, 3) if rank < 2 else (0, 1)])

    run_ranks(_with_rank(body), 4)


def _with_rank(body):
    return lambda: body(dist.get_rank())


def test_an_exchange_goes_with_its_group():
    def body() -> None:
        def open_files() -> int:
            return len(os.listdir("/proc/self/fd"))

        def mapped() -> int:
            return sum("nki_parallel_attn" in line for line in open("/proc/self/maps"))

        gc.collect()
        before = files = None
        for cycle in range(12):
            group, exchange = new_exchange("shm")
            assert exchange_for(group) is exchange
            assert exchange.all_gather(torch.full((cycle * 1000 + 1,), cycle)).eq(cycle).all()
            dist.destroy_process_group(group)
            del group, exchange
            gc.collect()
            if cycle == 1:
                before, files = mapped(), open_files()
        assert mapped() == before == 0
        assert open_files() <= files
        assert not collectives_torch._exchanges

    run_ranks(body, 2)


def test_transports_are_chosen_by_all_ranks_together():
    def body() -> None:
        rank = dist.get_rank()
        assert exchange_for(dist.new_group()).transport == "shm"
        os.environ[TRANSPORT_VARIABLE] = "pigeon"
        with pytest.raises(ArgumentError, match="NKI_PARALLEL_ATTN_TRANSPORT: got 'pigeon'"):
            exchange_for(dist.new_group())
        os.environ[TRANSPORT_VARIABLE] = "gloo" if rank == 1 else "shm"
        with pytest.raises(RankMismatchError, match=r"\['shm', 'gloo', 'shm'\]"):
            exchange_for(dist.new_group())

        os.environ[TRANSPORT_VARIABLE] = ""
        identity = shared_memory_torch.process_identity
        if rank == 2:
            shared_memory_torch.process_identity = lambda: identity() | {"boot": "elsewhere"}
        exchange = exchange_for(dist.new_group())
        assert exchange.transport == "gloo"
        assert exchange.traffic() == {}
        assert exchange.all_gather(torch.tensor(rank)).tolist() == [0, 1, 2]
        os.environ[TRANSPORT_VARIABLE] = "shm"
        with pytest.raises(ArgumentError, match="rank 2: runs on another host"):
            exchange_for(dist.new_group())
        shared_memory_torch.process_identity = identity
        del os.environ[TRANSPORT_VARIABLE]

    run_ranks(body, 3)


def test_a_file_that_is_not_rank_0s_is_left_alone(tmp_path):
    stranger = tmp_path / "file"
    stranger.write_bytes(b"someone's data, longer than a nonce")
    with pytest.raises(OSError, match="is not the file that rank 0 made"):
        shared_memory_torch._Arena.attach(2, str(stranger), "00" * 16)
    assert stranger.read_bytes() == b"someone's data, longer than a nonce"


def test_without_a_process_group_one_rank_is_alone():
    exchange = exchange_for()
    assert (exchange.rank, exchange.size) == (0, 1)
    for check in (check_all_gather, check_all_to_all, check_strides, check_rounds, check_digests):
        check(exchange)
    assert set(exchange.traffic().values()) == {0}
    with pytest.raises(RuntimeError, match="already open"), exchange.round(), exchange.round():
        pass
    with pytest.raises(ArgumentError, match="tensor"):
        exchange.all_to_all(torch.zeros(2))


def test_shared_memory_names_ranks_that_make_different_calls():
    def body() -> None:
        rank = dist.get_rank()
        calls = {
            "op": lambda exchange: exchange.barrier() if rank else exchange.exchange_digest(b""),
            "shape": lambda exchange: exchange.all_gather(torch.zeros(4 + rank)),
            "dtype": lambda exchange: exchange.all_gather(torch.zeros(4, dtype=[torch.int32, torch.float32][rank])),
            "dim": lambda exchange: exchange.all_gather(torch.zeros(2, 2), dim=rank),
            "order": lambda exchange: exchange.all_to_all(torch.zeros(2, 1 + rank)),
        }
        for call in calls.values():
            _group, exchange = new_exchange("shm")
            with pytest.raises((RankMismatchError, PeerError), match="different calls: rank"):
                call(exchange)
            assert not exchange.ready()

    run_ranks(body, 2)


def test_a_rank_that_raises_in_a_round_stops_its_peers_at_once_and_the_group_recovers():
    def body() -> float:
        rank = dist.get_rank()
        group, exchange = new_exchange("shm")
        exchange.barrier()
        start = time.monotonic()
        if rank == 1:
            with pytest.raises(ZeroDivisionError), exchange.round() as opened:
                opened.all_gather(torch.zeros(3))
                _ = 1 / 0
        else:
            reason = "rank 1 of the group failed: ZeroDivisionError: division by zero"
            with pytest.raises(PeerError, match=reason), exchange.round() as opened:
                opened.all_gather(torch.zeros(3))
                opened.all_to_all(opened.outbox((5,), torch.float32))
        seconds = time.monotonic() - start
        with pytest.raises(PeerError, match="ZeroDivisionError"):
            exchange.barrier()
        again = exchange_for(group)
        assert again is not exchange
        assert again.all_gather(torch.tensor(rank)).tolist() == [0, 1, 2]
        return seconds

    assert max(run_ranks(body, 3)) < SOON


def test_a_rank_that_never_arrives_raises_after_the_timeout():
    def body() -> float:
        _group, exchange = new_exchange("shm")
        exchange._timeout = 1.0
        start = time.monotonic()
        if exchange.rank == 0:
            with pytest.raises(PeerError, match="rank 1 of the group did not arrive within 1 s"):
                exchange.barrier()
        return time.monotonic() - start

    assert 0.9 < run_ranks(body, 2)[0] < SOON

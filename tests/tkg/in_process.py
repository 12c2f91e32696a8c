"""All ranks of a decoding step in one process: a thread for each, which exchange tensors through shared lists."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from nki_parallel_attn.kernels.attention_block_tkg_arguments import BlockArguments
from nki_parallel_attn.kernels.attention_block_tkg_torch import attention_block_tkg
from nki_parallel_attn.kernels.collectives_torch import Exchange, Round
from nki_parallel_attn.ops.attention_block_tkg import attention_block_tkg as operation
from nki_parallel_attn.ops.attention_block_tkg_checks import block_sizes, check_arguments


class Board:
    """What the ranks of one group post."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def swap(self, rank: int, posted: Any) -> list[Any]:
        self.slots[rank] = posted
        self.barrier.wait(30)
        everyone = list(self.slots)
        self.barrier.wait(30)
        return everyone


class ThreadExchange(Exchange):
    transport = "threads"

    def __init__(self, board: Board, rank: int) -> None:
        super().__init__(rank, board.size)
        self.board = board

    def exchange_digest(self, digest: bytes) -> list[bytes]:
        return self.board.swap(self.rank, digest)

    def barrier(self) -> None:
        self.board.swap(self.rank, None)

    def _open_round(self) -> Round:
        return ThreadRound(self)

    def _close_round(self, error: BaseException | None) -> None:
        if error:
            self.board.barrier.abort()


class ThreadRound(Round):
    def __init__(self, exchange: ThreadExchange) -> None:
        self.exchange = exchange

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        return torch.stack(self.exchange.board.swap(self.exchange.rank, tensor.clone()), dim)

    def outbox(self, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        return [torch.full(tuple(shape), torch.nan, dtype=dtype) for _ in range(self.exchange.size)]

    def all_to_all(self, *outboxes: list[Tensor]) -> list[list[Tensor]]:
        posted = self.exchange.board.swap(self.exchange.rank, outboxes)
        return [[theirs[index][self.exchange.rank] for theirs in posted] for index in range(len(outboxes))]


def run_block(arguments: list[dict[str, Any]], kvdp: int, cp: int) -> list[Any]:
    """Each rank's three results from its arguments; rank index cp_rank*kvdp + kvdp_rank. Raises what a rank raised."""
    kvdp_boards, cp_boards = [Board(kvdp) for _ in range(cp)], [Board(cp) for _ in range(kvdp)]

    def body(index: int) -> Any:
        cp_rank, kvdp_rank = index // kvdp, index % kvdp
        args = block_arguments(arguments[index])
        sizes = block_sizes(args)
        check_arguments(args, sizes, kvdp_rank)
        return attention_block_tkg(
            args,
            sizes,
            ThreadExchange(kvdp_boards[cp_rank], kvdp_rank) if kvdp > 1 else None,
            ThreadExchange(cp_boards[kvdp_rank], cp_rank) if cp > 1 else None,
        )

    return in_threads(body, kvdp * cp)


def block_arguments(arguments: dict[str, Any]) -> BlockArguments:
    """The operation's arguments with its defaults."""
    defaults = {**(operation.__defaults__ and _defaults()), **arguments}
    return BlockArguments(**{field.name: defaults[field.name] for field in fields(BlockArguments)})


def _defaults() -> dict[str, Any]:
    code, values = operation.__code__, operation.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    return {**dict(zip(names[-len(values) :], values, strict=True)), **(operation.__kwdefaults__ or {})}


def in_threads(body: Callable[[int], Any], count: int) -> list[Any]:
    if count == 1:
        return [body(0)]
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = body(index)
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results

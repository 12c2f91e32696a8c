"""What the launchers share: the command line's types, cache blocks, the progress bar, and a check of the input."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError, RankMismatchError

SMALLEST_DEFAULT_BLOCK = 16


class Parser(argparse.ArgumentParser):
    """A parser whose --help is an ordinary flag, for rank 0 to act on, and whose errors are raised."""

    def __init__(self, script: str, description: str, epilog: str) -> None:
        super().__init__(
            usage=f"[torchrun --nproc-per-node N | python] launch/{script} [options]",
            description=description,
            epilog=epilog,
            add_help=False,
        )
        self.script = script
        self.add_argument("-h", "--help", action="store_true", help="show this text")

    def error(self, message: str) -> NoReturn:
        """Raise, so that one rank prints instead of all."""
        raise ArgumentError("command line", message, f"options as {self.script} --help lists them")


def positive(text: str) -> int:
    """A positive integer, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def check_report(path: Path | None, option: str = "--report") -> None:
    """Raise ArgumentError, naming the option, unless a report can be written to `path`."""
    if path is None:
        return
    if path.is_dir() or not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ArgumentError(option, path, "a file in a folder that exists and can be written")
    if path.exists() and not os.access(path, os.W_OK):
        raise ArgumentError(option, path, "a file that can be written")


def cache_block_size(asked: int | None, length: int, ranks: int) -> int:
    """Tokens of a cache block: as asked, else the power of two that gives each rank two blocks, from 16 to 128.

    Raises:
        ArgumentError: a block of more tokens than there are, to which prefill would pad them.
    """
    if asked is not None:
        if asked > max(length, SMALLEST_DEFAULT_BLOCK):
            raise ArgumentError("--block-size", asked, f"at most the {length} tokens that there are")
        return asked
    block_size = SMALLEST_DEFAULT_BLOCK
    while block_size < 128 and 2 * ranks * 2 * block_size <= length:
        block_size *= 2
    return block_size


@contextmanager
def show_progress(console: Console) -> Iterator[Progress]:
    """Bars that name their unit in the field `unit`; shown on one rank."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[unit]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=console.quiet) as progress:
        yield progress


def verify_tokens(sequences: Sequence[Tensor]) -> None:
    """Raise on every rank unless all read the same texts; hosts may differ in their files.

    Raises:
        RankMismatchError: names the ranks that differ from rank 0.
    """
    digest = hashlib.sha256()
    for token_ids in sequences:
        digest.update(f"{len(token_ids)} ".encode() + token_ids.numpy().tobytes())
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise RankMismatchError(f"ranks {different} read other tokens than rank 0: text or tokenizer files differ")

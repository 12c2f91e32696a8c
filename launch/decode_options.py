"""Command line of decode.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from launcher import Parser, check_report, positive
from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.integrations.synthetic import SHAPES

STRATEGIES = ("cp", "kvdp", "kvdp+cp")
DEFAULT_STEPS = 100
DEFAULT_SYNTHETIC_LENGTH = 512


def make_parser() -> argparse.ArgumentParser:
    """The parser; --help is an ordinary flag."""
    parser = Parser(
        "decode.py",
        description="Prefill prompts with their KV cache dealt over the ranks, decode greedily over the sharded cache, "
        "and compare the tokens with the unsharded model's. Without options: the trained model of the package glassllm "
        "continues the start of a built-in passage.",
        epilog="Exit status: 0 when all tokens are equal, else 1.",
    )
    model = parser.add_argument_group("model and prompts")
    source = model.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, metavar="DIR", help="Llama-family checkpoint in Hugging Face format")
    source.add_argument("--synthetic", choices=SHAPES, help="random weights of a known attention shape, one layer")
    model.add_argument("--prompt", action="append", metavar="TEXT", help="a text to continue; once for each sequence")
    model.add_argument("--batch", type=positive, metavar="B", help="sequences (default: 1, under kvdp its ranks)")
    model.add_argument(
        "--seq-len",
        type=positive,
        metavar="N",
        help=f"prompt tokens for --synthetic (default {DEFAULT_SYNTHETIC_LENGTH})",
    )
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="cp",
        help="share KV by sequence (cp, the default), by batch (kvdp), or by both (kvdp+cp: kvdp=2)",
    )
    decoding.add_argument(
        "--steps", type=positive, default=DEFAULT_STEPS, metavar="N", help=f"decoding steps (default {DEFAULT_STEPS})"
    )
    decoding.add_argument("--kv-dtype", choices=("model", "fp8"), default="model", help="what the cache stores")
    decoding.add_argument(
        "--block-size", type=positive, metavar="N", help="tokens of a cache block (default 16 to 128)"
    )
    decoding.add_argument(
        "--backend",
        choices=("auto", "torch", "sim", "neuron"),
        default="auto",
        help="torch; the others have no decode kernel yet",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the result as JSON")
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of one run.

    Raises:
        ArgumentError: unknown, malformed or contradicting options.
    """
    options = make_parser().parse_args(arguments)
    if options.seq_len and not options.synthetic:
        raise ArgumentError("--seq-len", options.seq_len, "--synthetic beside it; a text has its own length")
    if options.synthetic and options.prompt:
        raise ArgumentError("--prompt", "a text", "none with --synthetic, which reads random tokens")
    if options.batch and options.prompt and options.batch != len(options.prompt):
        raise ArgumentError("--batch", options.batch, f"{len(options.prompt)}, the number of prompts, or left out")
    if options.backend in ("sim", "neuron"):
        reason = "attention_block_tkg has no NKI kernel yet"
        raise ArgumentError("--backend", options.backend, "torch, or left out", reason)
    check_report(options.report)
    return options


def sharing(strategy: str, ranks: int) -> tuple[int, int]:
    """(kvdp, cp) of a `strategy` on so many ranks.

    Raises:
        ArgumentError: kvdp+cp on a number of ranks that is no product of 2 and more.
    """
    if strategy == "kvdp+cp":
        if ranks < 4 or ranks % 2:
            raise ArgumentError("--strategy", f"kvdp+cp on {ranks} ranks", "an even number of ranks, at least 4")
        return 2, ranks // 2
    return (ranks, 1) if strategy == "kvdp" else (1, ranks)

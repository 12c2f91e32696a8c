"""Command line of kvp_prefill.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from launcher import Parser, check_report, positive
from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.integrations.synthetic import SHAPES

DEFAULT_SYNTHETIC_LENGTH = 2048


def make_parser() -> argparse.ArgumentParser:
    """The parser; --help is an ordinary flag."""
    parser = Parser(
        "kvp_prefill.py",
        description="Prefill a decoder with its KV cache dealt over the ranks and compare with the unsharded model. "
        "Without options: the trained model of the package glassllm reads a built-in passage.",
        epilog="Exit status: 0 when the logits agree within the stated tolerance, else 1.",
    )
    model = parser.add_argument_group("model and text")
    source = model.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, metavar="DIR", help="Llama-family checkpoint in Hugging Face format")
    source.add_argument("--synthetic", choices=SHAPES, help="random weights of a known attention shape, one layer")
    text = model.add_mutually_exclusive_group()
    text.add_argument("--prompt", help="text to read")
    text.add_argument("--prompt-file", type=Path, metavar="FILE", help="UTF-8 file with the text to read")
    model.add_argument(
        "--seq-len", type=positive, metavar="N", help=f"tokens for --synthetic (default {DEFAULT_SYNTHETIC_LENGTH})"
    )
    model.add_argument(
        "--sliding-window",
        type=positive,
        metavar="N",
        help="tokens each query sees, in every layer (default: model's)",
    )
    sharding = parser.add_argument_group("sharding")
    sharding.add_argument(
        "--layout",
        choices=("round-robin", "contiguous"),
        default="round-robin",
        help="which rank holds which blocks of the cache (default: round-robin)",
    )
    sharding.add_argument(
        "--block-size", type=positive, metavar="N", help="tokens of a cache block (default: two per rank, 16 to 128)"
    )
    sharding.add_argument(
        "--seg-size",
        type=positive,
        metavar="N",
        help="tokens of a segment (default: ranks x block size, less for a short text)",
    )
    sharding.add_argument("--apc", action="store_true", help="two calls, the second over a prefix known at run time")
    sharding.add_argument(
        "--backend",
        choices=("auto", "torch", "sim", "neuron"),
        default="auto",
        help="what runs the operations (default: auto, by the tensors' device: torch here)",
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
    if options.synthetic and (options.prompt is not None or options.prompt_file):
        raise ArgumentError("--prompt", "a text", "none with --synthetic, which reads random tokens")
    if options.apc and options.layout == "contiguous":
        raise ArgumentError("--apc", "--layout contiguous", "--layout round-robin", "apc_mode needs kvp_group_size > 0")
    check_report(options.report)
    return options

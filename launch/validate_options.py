"""Command line of validate.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from launcher import Parser, check_report, positive
from nki_parallel_attn.backends.nki_binding import LNC_VARIABLE, machine_lnc
from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.topology.platforms import LNC_VALUES, TARGETS
from nki_parallel_attn.validation.matrix import DEFAULT_RANKS, Selection, values

SECONDS_PER_CASE = {"torch": 120.0, "sim": 120.0, "neuron": 900.0}
"""On device a case includes the compilation of its kernel."""


def make_parser() -> argparse.ArgumentParser:
    """The parser; --help is an ordinary flag, for rank 0 to act on."""
    parser = Parser(
        "validate.py",
        description="Run the operations on inputs from a seed, over layouts, ranks, LNC and dtypes, and compare with "
        "dense float64 attention. As a plain script it starts the ranks itself; under torchrun the job's ranks are "
        "used, several groups side by side where a case needs fewer.",
        epilog="Exit status: 0 when a case passed and none failed, else 1.",
    )
    parser.add_argument("--backend", choices=("torch", "sim", "neuron"), default="sim", help="(default: sim)")
    parser.add_argument("--target", choices=TARGETS, default="trn2", help="of the simulator (default: trn2)")
    cases = parser.add_argument_group("cases; by default all")
    cases.add_argument(
        "--kernel", nargs="+", choices=values("kernel"), default=[], metavar="NAME", help=", ".join(values("kernel"))
    )
    cases.add_argument(
        "--layout", nargs="+", choices=values("layout"), default=[], metavar="NAME", help=", ".join(values("layout"))
    )
    cases.add_argument(
        "--dtype", nargs="+", choices=values("dtype"), default=[], metavar="NAME", help=", ".join(values("dtype"))
    )
    cases.add_argument(
        "--ranks",
        nargs="+",
        type=positive,
        metavar="N",
        help="ranks that work together (default: 1 2 4 8; under torchrun those that divide the job's, and all of it)",
    )
    cases.add_argument(
        "--lnc", nargs="+", type=int, choices=LNC_VALUES, default=[], help=f"(on device: {LNC_VARIABLE}, or 2)"
    )
    cases.add_argument(
        "-k", "--filter", default="", metavar="EXPR", help='words of case names, as "prefix and not float8"'
    )
    cases.add_argument("--list", action="store_true", help="print the names of the cases and end")
    run = parser.add_argument_group("run")
    run.add_argument("--seed", type=_natural, default=0, metavar="N", help="of the inputs (default: 0)")
    run.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="of a case (default: 120, on device 900); then it failed"
    )
    run.add_argument("--fail-fast", action="store_true", help="end after the first failure")
    run.add_argument("--junit", type=Path, metavar="FILE", help="write the result as JUnit XML")
    run.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of one run.

    Raises:
        ArgumentError: unknown, malformed or contradicting options.
    """
    options = make_parser().parse_args(arguments)
    if options.backend == "neuron":
        lnc = machine_lnc()
        if set(options.lnc) - {lnc}:
            raise ArgumentError("--lnc", options.lnc, f"{lnc}, the cores of a rank on this machine ({LNC_VARIABLE})")
        options.lnc = [lnc]
    options.timeout = options.timeout or SECONDS_PER_CASE[options.backend]
    return options


def check_files(options: argparse.Namespace) -> None:
    """Refuse reports that cannot be written.

    Raises:
        ArgumentError: names the option.
    """
    check_report(options.junit, "--junit")
    check_report(options.json, "--json")
    if options.junit and options.json and options.junit.absolute() == options.json.absolute():
        raise ArgumentError("--json", options.json, "another file than --junit")


def selection(options: argparse.Namespace, world_size: int | None) -> Selection:
    """What to run; `world_size` is the torchrun job's, None without one."""
    ranks = options.ranks
    if not ranks:
        ranks = [count for count in DEFAULT_RANKS if not world_size or world_size % count == 0]
        ranks += [world_size] if world_size else []
    return Selection(
        options.backend,
        options.target,
        tuple(ranks),
        tuple(options.kernel),
        tuple(options.layout),
        tuple(options.dtype),
        tuple(options.lnc),
        options.filter,
    )


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a natural number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds

"""`python -m nki_parallel_attn.sim run SCRIPT [ARGS]`: a script whose NKI kernels run on the simulator."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from .serve import run_script


def main(argv: Sequence[str] | None = None) -> None:
    """Run one subcommand."""
    parser = argparse.ArgumentParser(prog="python -m nki_parallel_attn.sim", description="NKI on the CPU.")
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser(
        "run",
        help="run a Python script with the simulator as nki",
        description="Run a Python script with the simulator as nki, nki.language, nki.isa and nki.collectives.",
    )
    run.add_argument("script", help="path of the script")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    given = parser.parse_args(argv)
    if not os.path.exists(given.script):
        run.error(f"there is no {given.script}")
    run_script(given.script, given.arguments)


if __name__ == "__main__":
    main()

"""Multi-rank testing: `run_ranks()` and the pytest marker `multirank`.

    run.py          run_ranks(): one call on every rank, its results or its failures
    plugin.py       the pytest plugin: the marker and the fixtures `rank` and `world_size`
    pool.py         the caller's side: starts, watches, ends the rank processes, relays what they print
    rank_server.py  a process that has torch loaded and forks ranks from itself
    rank_worker.py  a rank: sets up the process group, runs the call, reports
    protocol.py     what the caller and the ranks tell each other
    pickling.py     how functions, arguments, results and exceptions travel
    report.py       the text of failures and stacks

Loaded with every pytest session, so nothing is imported until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nki_parallel_attn.testing.run import run_ranks

__all__ = ["run_ranks"]


def __getattr__(name: str) -> Any:
    if name == "run_ranks":
        from nki_parallel_attn.testing.run import run_ranks

        return run_ranks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

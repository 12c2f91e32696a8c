"""The text of failures: which ranks, what happened, and where the others were."""

from __future__ import annotations

import linecache
import re
import signal
from collections.abc import Iterable, Mapping

# Frames of ours (and of the start of the process) below the caller's function.
_OWN_FRAME = re.compile(r"rank_(server|worker)\.py$|^<string>$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')


def failure_report(
    world_size: int, failures: Mapping[int, tuple[str, str]], stacks: Mapping[int, str], headline: str
) -> str:
    """The message of a RankFailedError.

    Args:
        failures: (title, text) of every rank that failed, the likely cause first.
        stacks: for every rank that had not finished, what faulthandler wrote.
        headline: what the caller should know first.
    """
    parts = [headline]
    sections = {rank: f"{title} ---\n{text}".rstrip() for rank, (title, text) in failures.items()}
    sections |= {rank: f"not finished, and here ---\n{format_stacks(text)}" for rank, text in sorted(stacks.items())}
    for section, ranks in _group_equal(sections).items():
        parts.append(f"--- {rank_names(ranks)}: {section}")
    quiet = sorted(set(range(world_size)) - set(failures) - set(stacks))
    if quiet:
        parts.append(f"--- {rank_names(quiet)}: returned ---")
    return "\n".join(parts)


def rank_names(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0, 2" or "ranks 0-7"."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 2:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def death_title(exit_status: int) -> str:
    """How a process ended: "died with exit code 3" or "died of SIGKILL (signal 9)"."""
    if exit_status >= 0:
        return f"died with exit code {exit_status}"
    try:
        name = signal.Signals(-exit_status).name
    except ValueError:
        name = "a signal"
    return f"died of {name} (signal {-exit_status})"


def format_stacks(text: str) -> str:
    """faulthandler's output, thread by thread, oldest call first and with source lines, as in a traceback."""
    threads: list[tuple[str, list[re.Match[str]]]] = []
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if frame and threads:
            threads[-1][1].append(frame)
        elif "most recent call first" in line:
            threads.append((line.split(" (most")[0], []))
    if not threads:
        return "(no Python stack)"
    linecache.checkcache()
    parts = []
    for name, frames in threads:
        if len(threads) > 1:
            parts.append(f"{name}:")
        parts += [_format_frame(frame) for frame in _without_own_frames(frames[::-1])]
    return "\n".join(parts)


def _without_own_frames(frames: list[re.Match[str]]) -> list[re.Match[str]]:
    """Drop our frames from the start of the stack, unless there is nothing else."""
    first = next((i for i, frame in enumerate(frames) if not _OWN_FRAME.search(frame["file"])), 0)
    return frames[first:]


def _format_frame(frame: re.Match[str]) -> str:
    source = linecache.getline(frame["file"], int(frame["line"])).strip()
    where = f'  File "{frame["file"]}", line {frame["line"]}, in {frame["name"]}'
    return f"{where}\n    {source}" if source else where


def _group_equal(texts: Mapping[int, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(text, []).append(rank)
    return groups

"""What the caller and the rank processes tell each other. Standard library only: every pytest session loads this."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import NoReturn

RELEASE = b"release"  # after a call: end its process group; sent back when that is done
STACK_SIGNAL = signal.SIGUSR2  # makes a rank write its stacks, from inside a blocked C call too

# Modules whose functions and classes travel as code instead of by name: pytest's test modules and conftests. A rank
# could not always import them by the same name, and the asserts in this code are already rewritten.
by_value_modules: set[str] = set()

_this_rank: int | None = None  # set in a rank process, before the arguments of a call are rebuilt there


@dataclass(frozen=True)
class Call:
    """One call, as a rank is told of it; the pickled (fn, args, kwargs) follow in a message of their own.

    Attributes:
        store: path of a file that does not exist yet, for the rendezvous of the process group.
        pg_timeout: seconds after which collectives give up; the caller does so first, as its report says more.
        environment, directory, sys_path: the caller's at the time of the call.
    """

    rank: int
    world_size: int
    pg_backend: str
    store: str
    pg_timeout: float
    environment: dict[str, str]
    directory: str | None
    sys_path: list[str]


@dataclass(frozen=True)
class Outcome:
    """What became of a call on one rank.

    Attributes:
        returned: fn returned and its result could be pickled.
        pickled: the result or the exception; None when the exception could not be pickled.
        title: one line about the failure.
        text: the failure's traceback.
    """

    returned: bool
    pickled: bytes | None
    title: str = ""
    text: str = ""


class RankPlaceholder:
    """Stands for the rank in the caller's process; pickled, it becomes the rank's number."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return this_rank, ()

    def __repr__(self) -> str:
        return "<the rank, known on the ranks only>"

    def __index__(self) -> NoReturn:
        raise TypeError("the rank is known on the ranks only; fixtures run once, in the pytest process")


def set_this_rank(rank: int) -> None:
    global _this_rank
    _this_rank = rank


def this_rank() -> int:
    if _this_rank is None:
        raise RuntimeError("not a rank process")
    return _this_rank

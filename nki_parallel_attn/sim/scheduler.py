"""Cooperative, deterministic scheduling of cores and ranks.

Each task (one core of one rank) is a thread, but only the task that holds the baton runs. It gives the baton up when it
blocks at a synchronisation point or ends; the next one is chosen among those that can run, lowest first, or at random
from a seed. So a run is reproducible, threads never compete for the interpreter, and a deadlock is a fact (nobody can
run) rather than a timeout.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

from . import location
from .errors import DeadlockError, DivergenceError


class _Aborted(BaseException):
    """Unwinds a task after another one failed. Not an Exception, so that kernels do not catch it."""


class Task:
    """One schedulable program instance.

    Attributes:
        name: how reports call it, e.g. "rank 3 core 1".
        waiting_for: what it blocks on, or None.
        waiting_at: "file:line" of the blocking call, or None.
        result: what its function returned.
    """

    def __init__(self, name: str, function: Callable[[], Any]) -> None:
        self.name = name
        self.function = function
        self.result: Any = None
        self.finished = False
        self.error: BaseException | None = None
        self.predicate: Callable[[], bool] | None = None
        self.waiting_for: str | None = None
        self.waiting_at: str | None = None
        self.waiting_error: type[DivergenceError] = DeadlockError
        self.turn = threading.Semaphore(0)

    @property
    def can_run(self) -> bool:
        """Whether it is neither finished nor waiting for something that has not happened."""
        return not self.finished and (self.predicate is None or self.predicate())


class Scheduler:
    """Runs tasks one at a time.

    Args:
        seed: None always picks the first task that can run; a number picks at random, reproducibly.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.tasks: list[Task] = []
        self._random = random.Random(seed) if seed is not None else None
        self._current: Task | None = None
        self._done = threading.Semaphore(0)
        self._failure: BaseException | None = None
        self._aborting = False

    @property
    def current(self) -> Task | None:
        """The task that holds the baton."""
        return self._current

    def run(self, tasks: Sequence[Task]) -> list[Any]:
        """Run `tasks` to their end and return their results in order.

        The first error of any task ends the others and is raised here. One task alone runs in the calling thread.
        """
        self.tasks = list(tasks)
        if len(self.tasks) == 1:
            self._current = self.tasks[0]
            self._execute(self.tasks[0])
        else:
            threads = [threading.Thread(target=self._thread, args=(task,), name=task.name) for task in self.tasks]
            for thread in threads:
                thread.daemon = True
                thread.start()
            self._hand_over(self._choose())
            try:
                self._done.acquire()
            except BaseException:
                self._aborting = True
                self._release_all()
                raise
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure
        return [task.result for task in self.tasks]

    def block_until(
        self, predicate: Callable[[], bool], description: str, error: type[DivergenceError] = DeadlockError
    ) -> None:
        """Let others run until `predicate()` holds. Call it at every synchronisation point.

        Args:
            predicate: cheap, without side effects; evaluated by whichever task holds the baton.
            description: what is waited for, for the deadlock report, e.g. "core_barrier with core 1".
            error: what it means when this wait never ends; DivergenceError where other ranks are waited for.

        Raises:
            DeadlockError, DivergenceError: nobody can run any more; the message says what every unfinished task
                waits for, and where.
        """
        task = self._current
        assert task is not None
        if self._random is None and predicate():
            return
        task.predicate, task.waiting_for, task.waiting_error = predicate, description, error
        task.waiting_at = location.show(location.caller())
        chosen = self._choose()
        if chosen is None:
            raise self._deadlock()
        if chosen is not task:
            self._hand_over(chosen)
            task.turn.acquire()
            if self._aborting:
                raise _Aborted
        task.predicate = task.waiting_for = task.waiting_at = None

    def _deadlock(self) -> DivergenceError:
        stuck = [task for task in self.tasks if not task.finished]
        diverged = any(task.waiting_error is DivergenceError for task in stuck)
        return (DivergenceError if diverged else DeadlockError)(self.deadlock_report())

    def deadlock_report(self) -> str:
        """What every unfinished task waits for and which tasks have ended."""
        waiting = [task for task in self.tasks if not task.finished]
        ended = [task.name for task in self.tasks if task.finished]
        lines = [f"{len(waiting)} of {len(self.tasks)} program instances wait and none can run:"]
        lines += [f"  {task.name} waits for {task.waiting_for} at {task.waiting_at}" for task in waiting]
        if ended:
            lines.append(f"  ended: {', '.join(ended)}")
        return "\n".join(lines)

    def _choose(self) -> Task | None:
        if self._random is None:
            return next((task for task in self.tasks if task.can_run), None)
        runnable = [task for task in self.tasks if task.can_run]
        return self._random.choice(runnable) if runnable else None

    def _hand_over(self, task: Task | None) -> None:
        assert task is not None
        self._current = task
        task.turn.release()

    def _thread(self, task: Task) -> None:
        task.turn.acquire()
        if not self._aborting:
            self._execute(task)
        if self._aborting:
            self._done.release()
            return
        if all(other.finished for other in self.tasks):
            self._done.release()
            return
        chosen = self._choose()
        if chosen is None:
            self._fail(self._deadlock())
            self._done.release()
        else:
            self._hand_over(chosen)

    def _execute(self, task: Task) -> None:
        try:
            task.result = task.function()
        except _Aborted:
            pass
        except BaseException as error:
            task.error = error
            if len(self.tasks) > 1 and hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"raised by {task.name}")
            self._fail(error)
        task.finished = True

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._aborting = True
        self._release_all()

    def _release_all(self) -> None:
        for task in self.tasks:
            task.turn.release()

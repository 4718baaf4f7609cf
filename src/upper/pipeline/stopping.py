"""A stop within bounds: tasks that take longer than the stop may take are abandoned.

Tasks commit nothing (`Task`), so an abandoned one leaves at most files that no commit names; the next process
starts from the last commit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from upper.pipeline.target import NoWorkers, Runner, Task

T = TypeVar("T")
POLL_INTERVAL = 0.1  # seconds between two looks at the request


class WorkStopped(NoWorkers):
    """Tasks were abandoned, because a stop was requested and they did not end in time."""


class StopDeadline:
    """When work has to end after a stop was requested. The time begins with the first look after that."""

    def __init__(
        self, stopping: threading.Event, within: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stopping = stopping
        self._within, self._clock, self._lock = within, clock, threading.Lock()
        self._noticed: float | None = None

    @property
    def remaining(self) -> float:
        """Seconds; infinite before the request."""
        if not self.stopping.is_set():
            return float("inf")
        with self._lock:
            if self._noticed is None:
                self._noticed = self._clock()
        return max(0.0, self._noticed + self._within - self._clock())


class StoppableRunner:
    """Runs tasks on other workers, and abandons them at the deadline."""

    def __init__(self, runner: Runner, deadline: StopDeadline) -> None:
        self._runner, self._deadline = runner, deadline

    @property
    def width(self) -> int:
        return self._runner.width

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        answer: Future[list[T]] = Future()

        def run() -> None:
            try:
                answer.set_result(self._runner.run(tasks))
            except BaseException as error:  # noqa: BLE001 (raised in the thread that waits)
                answer.set_exception(error)

        if self._deadline.remaining > 0:
            # A daemon: it does not keep the process from ending.
            threading.Thread(target=run, name="stoppable-tasks", daemon=True).start()
            while self._deadline.remaining > 0:
                if wait([answer], POLL_INTERVAL).done:
                    return answer.result()
        raise WorkStopped("the sync was stopped while tasks were running; the next one does them again")

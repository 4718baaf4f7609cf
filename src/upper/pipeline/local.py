"""Threads of this process as workers, for small buckets: nothing has to be started, and nothing is sent.

Decoding, sorting, compressing and waiting for the network release Python's lock, so the threads use all
cores. Work that holds the lock is slower than in Spark's processes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from upper.errors import UpperError
from upper.pipeline.target import Task, WorkFailed

T = TypeVar("T")


class LocalRunner:
    """Runs tasks in threads, at most `width` at a time."""

    def __init__(self, *, width: int | None = None, watch: Callable[[float], None] | None = None) -> None:
        """`watch` is called with the share of the tasks that are done."""
        self.width = width or max(2, os.cpu_count() or 1)
        self._watch = watch or (lambda _: None)

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        answers: list[Future[T]] = [Future() for _ in tasks]
        waiting = iter(zip(tasks, answers, strict=True))
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    task, answer = next(waiting, (None, None))
                if task is None or answer is None:
                    return
                try:
                    answer.set_result(task())
                except BaseException as error:  # noqa: BLE001 (raised in the thread that waits)
                    answer.set_exception(error)

        # Daemons: Ctrl-C ends the wait below, and the process, without waiting for the tasks.
        for number in range(min(self.width, len(tasks))):
            threading.Thread(target=work, name=f"worker-{number}", daemon=True).start()
        failures = []
        for number, answer in enumerate(answers, 1):
            # All of them, also after a failure: a task that continues would run beside the next attempt.
            if (error := answer.exception()) is not None:
                failures.append(error)
            self._watch(number / len(tasks))
        for failure in failures:
            if isinstance(failure, UpperError) or not isinstance(failure, Exception):
                raise failure
            raise WorkFailed(f"a task failed: {type(failure).__name__}: {failure}") from failure
        return [answer.result() for answer in answers]

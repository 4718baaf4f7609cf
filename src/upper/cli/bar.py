"""The progress bar of a verb: redrawn in place on standard error, and erased at the end.

If the total is not known, it shows the elapsed time and what is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class Bar:
    """The state of a bar. Callers only count; the display reads it ten times a second."""

    def __init__(self, total: int | None) -> None:
        self.done, self.total = 0, total

    def advance(self, steps: int = 1) -> None:
        self.done += steps

    def reached(self, done: int, total: int | None = None) -> None:
        self.done = done
        if total is not None:
            self.total = total


class _Bars(Progress):
    seen: Bar

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            self.update(task.id, completed=self.seen.done, total=self.seen.total)
        yield from super().get_renderables()


class _Done(TextColumn):
    """The steps done, and the total."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        done = f"{task.completed:,.0f}" if task.completed else ""
        return Text(done if task.total is None else f"{task.completed:,.0f} of {task.total:,.0f}")


class _Time(TimeRemainingColumn):
    """The remaining time, or the elapsed time if the total is not known."""

    def render(self, task: Task) -> Text:
        return TimeElapsedColumn().render(task) if task.total is None else super().render(task)


@contextmanager
def bar(what: str, total: int | None, file: TextIO) -> Iterator[Bar]:
    """Draw a bar on this terminal while the block runs."""
    bars = _Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        _Done(),
        _Time(),
        console=Console(file=file),
        transient=True,
        # Verbs write to their own streams; rich must not replace sys.stdout and sys.stderr.
        redirect_stdout=False,
        redirect_stderr=False,
    )
    bars.seen = Bar(total)
    bars.add_task(what, total=total)
    with bars:
        yield bars.seen

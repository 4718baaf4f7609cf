"""How work on Spark is seen: the live line of a sync, and a bar for what ends by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from upper.cli.output import Output

if TYPE_CHECKING:
    from upper.apps.lake.follow import Progress
    from upper.apps.lake.sync import Batch

PERCENT = 100
WINDOW = 10.0  # seconds over which a rate is taken


@contextmanager
def share_done(out: Output, what: str) -> Iterator[Callable[[float], None]]:
    """A bar that is told which share of the work is done; it never goes back."""
    with out.progress(what, PERCENT) as bar:
        shown = 0

        def tell(share: float) -> None:
            nonlocal shown
            now = min(PERCENT, int(share * PERCENT))
            if now > shown:
                bar.advance(now - shown)
                shown = now

        yield tell


class SyncProgress:
    """Draws one line over itself on a terminal; says only what matters where nobody looks."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._past: list[tuple[float, int, int]] = []  # (when, rows, bytes)
        self._committed = 0.0
        self._drawn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawn:
            self._out.draw("")

    def tell(self, progress: Progress, batch: Batch | None) -> None:
        """One round is over."""
        now = time.monotonic()
        if batch is not None and batch.number:
            self._committed = now
            if self._out.as_json:
                self._out.show(
                    {
                        "commit": batch.number,
                        "rows": batch.rows,
                        "bytes": batch.size,
                        "behind": batch.behind,
                        "seconds": round(batch.seconds, 3),
                        "rollbacks": len(batch.taken_back),
                        "lost": batch.lost,
                    }
                )
            if batch.taken_back and self._drawn:
                self._out.draw("")  # the line makes room for what should stay
            for taken in batch.taken_back:
                self._out.note(
                    f"partition {taken.partition}: back to {taken.keep.position.seqno}, {taken.why}"
                )
        if self._out.watched:
            self._drawn = True
            self._out.draw(self._line(progress, now))

    def _line(self, progress: Progress, now: float) -> str:
        if progress.doing and not progress.rows:
            return progress.doing
        self._past = [(when, *rest) for when, *rest in self._past if now - when <= WINDOW]  # type: ignore[misc]
        self._past.append((now, progress.rows, progress.bytes))
        first, last = self._past[0], self._past[-1]
        span = max(last[0] - first[0], 1e-9) if len(self._past) > 1 else max(progress.seconds, 1e-9)
        rows = last[1] - (first[1] if len(self._past) > 1 else 0)
        size = last[2] - (first[2] if len(self._past) > 1 else 0)
        since = f"{now - self._committed:.0f} s ago" if self._committed else "none yet"
        line = (
            f"{progress.rows:,} rows · {rows / span:,.0f}/s · {size / span / 1e6:.1f} MB/s · "
            f"behind {progress.behind:,} changes, {progress.lag:.1f} s · "
            f"commit {progress.last_commit}, {since}"
        )
        return " · ".join(filter(None, (line, progress.doing, progress.trouble)))

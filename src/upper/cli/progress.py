"""Progress of work on Spark: the live line of a sync, and a bar for work with an end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from upper.cli.output import Output

if TYPE_CHECKING:
    from upper.apps.lake.follow import SyncTotals
    from upper.apps.lake.sync import SyncRound

PERCENT = 100
WINDOW = 10.0  # seconds over which a rate is taken


@contextmanager
def share_done(out: Output, what: str) -> Iterator[Callable[[float], None]]:
    """A bar, and a function that sets the share of the work that is done; the bar never goes back."""
    with out.progress(what, PERCENT) as bar:
        shown = 0

        def report(share: float) -> None:
            nonlocal shown
            now = min(PERCENT, int(share * PERCENT))
            if now > shown:
                bar.advance(now - shown)
                shown = now

        yield report


class SyncProgress:
    """Draws one line over itself on a terminal; elsewhere it prints commits and rollbacks only."""

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

    def report(self, progress: SyncTotals, batch: SyncRound | None) -> None:
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
                        "rollbacks": len(batch.rolled_back),
                        "lost": batch.lost,
                    }
                )
            if batch.rolled_back and self._drawn:
                self._out.draw("")  # erase the line before printing
            for taken in batch.rolled_back:
                self._out.note(
                    f"partition {taken.partition}: back to {taken.keep.position.seqno}, {taken.why}"
                )
        if self._out.watched:
            self._drawn = True
            self._out.draw(self._line(progress, now))

    def _line(self, progress: SyncTotals, now: float) -> str:
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

"""Shared by the verbs that follow a bucket into another system: the ready line, progress, the summary."""

from __future__ import annotations

import logging
import os
from argparse import ArgumentParser, Namespace, _MutuallyExclusiveGroup
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from threading import Event
from typing import TYPE_CHECKING

from upper.cli.common import as_typed, log_to_stderr, number
from upper.cli.durations import seconds
from upper.cli.output import Output

if TYPE_CHECKING:
    from upper.apps.push.follow import Follow, PushReport, PushSettings, PushTotals
    from upper.apps.push.rounds import PushRound


def add_following(parser: ArgumentParser, source: str) -> _MutuallyExclusiveGroup:
    """Adds the arguments; returns the group of the interval. `source`: the name of the source in the help."""
    parser.add_argument(
        "--prefix", type=as_typed, default=b"", metavar="PREFIX", help="only keys that begin with this"
    )
    parser.add_argument(
        "--name", default="", metavar="NAME", help=f"under which TARGET keeps positions ({source})"
    )
    parser.add_argument(
        "--new-history",
        action="store_true",
        help="continue with a source that was created again: TARGET is brought to its state",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--every", type=seconds, default=1.0, metavar="TIME", help="a round this often, as 500ms (1s)"
    )
    how.add_argument("--once", action="store_true", help="bring TARGET up to now, and end")
    return how


def push_settings(args: Namespace) -> PushSettings:
    from upper.apps.push.follow import PushSettings

    return PushSettings(once=args.once, every=args.every, metrics_port=args.metrics_port)


def add_metrics(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--metrics-port", type=number(0, 65535), metavar="PORT", help="serve metrics here, on loopback"
    )


def progress_line(out: Output) -> PushReport:
    """Draws one line over itself on a terminal."""

    def report(totals: PushTotals, rounds: Sequence[PushRound]) -> None:
        if out.watched:
            state = "paused" if totals.paused else totals.trouble or f"behind {totals.behind:,} changes"
            out.draw(f"{totals.rows:,} changes · {totals.seconds:,.0f} s · {state}")

    return report


def run_until_stopped(following: Follow, out: Output, *, once: bool) -> None:
    """Run the rounds and print the summary. Repairs and errors that are retried are logged."""
    from upper.pipeline.signals import stop_signals

    log_to_stderr(out)
    logging.getLogger("upper").setLevel(logging.INFO)

    def ready(port: int | None) -> None:
        if not once:
            metrics = "" if port is None else f", metrics on port {port}"
            out.show({"ready": True, "metrics_port": port}, text=f"ready: following{metrics}")

    following.run(Event() if once else stop_signals(_announce), ready=ready)
    if out.watched:
        out.draw("")
    out.show(asdict(following.totals), text=following.totals.sentence())


def _announce() -> None:
    # From a signal handler: unlike print, write() cannot collide with a line that is being printed.
    with suppress(OSError):
        os.write(2, b"\nupper: stopping after this round; press Ctrl-C again to stop at once\n")

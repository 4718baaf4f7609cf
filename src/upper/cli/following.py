"""What the verbs share that follow a bucket into another system: the ready line, progress, the summary."""

from __future__ import annotations

import logging
import os
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from threading import Event
from typing import TYPE_CHECKING

from upper.cli.common import log_to_stderr, number
from upper.cli.output import Output

if TYPE_CHECKING:
    from upper.apps.push.follow import Follow, PushTotals, Tell
    from upper.apps.push.rounds import PushRound


def add_metrics(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--metrics-port", type=number(0, 65535), metavar="PORT", help="serve metrics here, on loopback"
    )


def teller(out: Output) -> Tell:
    """Draws one line over itself on a terminal."""

    def tell(totals: PushTotals, rounds: Sequence[PushRound]) -> None:
        if out.watched:
            state = "paused" if totals.paused else totals.trouble or f"behind {totals.behind:,} changes"
            out.draw(f"{totals.rows:,} changes · {totals.seconds:,.0f} s · {state}")

    return tell


def run_until_stopped(following: Follow, out: Output, *, once: bool) -> None:
    """Run the rounds and print the summary. Repairs and errors that are retried are logged."""
    from upper.apps.lake.follow import stop_signals

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

"""Print the changes of a bucket, from the beginning, from now, or from a checkpoint.

It follows every partition across restarts and failovers, until Ctrl-C, or with --until now until it has
printed everything that is there. With --checkpoint it resumes from the file and saves its position there.
A `rollback` line means that history branched: what was printed of that partition past that seqno is no longer
part of it.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from upper.cli.common import add_url, as_typed, log_to_stderr, partitions, reach
from upper.cli.output import ExitCode, Output, text_of
from upper.model.values import Seqno

if TYPE_CHECKING:
    from upper.client.bucket import Bucket
    from upper.client.events import Event
    from upper.client.feed import Feed
    from upper.client.positions import Positions

FILTER_MODES = ("view", "events")
EXAMPLES = """
upper tail upr://127.0.0.1:11210/default
upper tail upr://127.0.0.1:11210/default --from now --key-prefix user: --json
upper tail upr://127.0.0.1:11210/default --until now --checkpoint here.json
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument(
        "--from",
        dest="since",
        default="beginning",
        metavar="beginning|now|FILE",
        help="where to start; FILE is a checkpoint, which is not changed (%(default)s)",
    )
    parser.add_argument("--until", choices=("now",), help="stop at the end of what is there now")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="resume from this file, and save the position to it"
    )
    parser.add_argument(
        "-p", "--partitions", type=partitions, metavar="0-15,99", help="only these partitions"
    )
    parser.add_argument("--keys-only", action="store_true", help="do not send values")
    parser.add_argument("--key-prefix", metavar="TEXT", help="only keys with this prefix")
    parser.add_argument("--key-pattern", metavar="RE2", help="only keys in which this pattern is found")
    parser.add_argument(
        "--value-filter", metavar="TEXT", help='only JSON values for which this holds: $.type == "order"'
    )
    parser.add_argument(
        "--filter-mode",
        choices=FILTER_MODES,
        help="view: print a deletion when a value stops matching; events: only matching changes (view)",
    )
    parser.add_argument("--operations", metavar="LIST", help="any of mutation,deletion,expiration (all)")
    parser.add_argument("--snapshots", action="store_true", help="also print where snapshots end")
    parser.add_argument(
        "-t", "--timestamps", action="store_true", help="begin each line with the time of the change (UTC)"
    )


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.client.checkpoint import Checkpoint
    from upper.client.events import SnapshotEnd
    from upper.errors import BadCheckpoint

    log_to_stderr(out)
    since: str | Positions = args.since
    if args.since not in ("beginning", "now"):
        saved = Checkpoint(args.since).load()
        if saved is None:
            raise BadCheckpoint(f"there is no checkpoint {args.since}; --from is beginning, now or a file")
        since = saved
    with reach(args, "upper tail") as bucket:
        feed = bucket.changes(
            since=since,
            until=args.until,
            checkpoint=None if args.checkpoint is None else Checkpoint(args.checkpoint),
            partitions=args.partitions,
            keys_only=args.keys_only,
            key_prefix=None if args.key_prefix is None else as_typed(args.key_prefix),
            key_pattern=args.key_pattern,
            value_filter=args.value_filter,
            filter_mode=args.filter_mode,
            operations=None if args.operations is None else args.operations.split(","),
            on_rollback="continue",
            name="upper tail",
        )
        width = get_terminal_size().columns if out.on_screen else None
        with feed, _progress(args, bucket, feed, out) as moved:
            for event in feed:
                moved(event)
                if args.snapshots or not isinstance(event, SnapshotEnd):
                    text = None if out.as_json else line(event, width=width, timestamps=args.timestamps)
                    out.show(fields(event) if out.as_json else {}, text=text)
    return ExitCode.OK


@contextmanager
def _progress(
    args: Namespace, bucket: Bucket, feed: Feed[Event], out: Output
) -> Iterator[Callable[[Event], None]]:
    """A progress bar for --until now; an event advances it by the seqnos that it covers."""
    from upper.wire.session import DIALECTS

    if args.until is None:
        yield lambda event: None
        return
    at = {partition: int(position.seqno) for partition, position in feed.positions.items()}
    total = None
    if DIALECTS[bucket.address.dialect].positions:
        highs = bucket.seqnos()
        total = sum(max(0, highs.get(partition, Seqno(0)) - at[partition]) for partition in at)
    with out.progress("reading", total, answering=True) as progress:

        def moved(event: Event) -> None:
            if event.seqno is None:
                progress.advance()
            elif (step := event.seqno - at[event.partition]) > 0:
                at[event.partition] = event.seqno
                progress.advance(step)

        yield moved


def fields(event: Event) -> dict[str, object]:
    """An event as an object. 64-bit ids are text, because many JSON parsers round large numbers."""
    from upper.client.events import Rollback

    branch = None if event.branch is None else str(event.branch)
    shown: dict[str, object] = {
        "operation": event.operation,
        "partition": event.partition,
        "seqno": event.seqno,
        "branch": branch,
    }
    for name in ("key", "value", "revision", "cas", "flags", "expiration", "lock_time", "state"):
        if hasattr(event, name):
            value = getattr(event, name)
            shown[name] = str(value) if name == "cas" else value
    if xattrs := getattr(event, "xattrs", None):
        shown["xattrs"] = {name: content.decode(errors="replace") for name, content in xattrs.items()}
    if (when := changed_at(event)) is not None:
        shown["changed_at"] = when
    if isinstance(event, Rollback):
        shown |= {"to": event.to, "why": event.why, "lost": list(event.lost)}
    return shown


def changed_at(event: Event) -> str | None:
    """When the change was made: its CAS is the node's clock in nanoseconds since 1970. TAP sends none."""
    cas = int(getattr(event, "cas", 0))
    if not cas:
        return None
    moment = datetime.fromtimestamp(cas // 1_000_000_000, UTC).replace(microsecond=cas // 1000 % 1_000_000)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def line(event: Event, *, width: int | None = None, timestamps: bool = False) -> str:
    """An event as one line of text, cut to the width of the terminal if there is one."""
    from upper.client.events import Deletion, Expiration, Mutation, Rollback

    seqno = "-" if event.seqno is None else event.seqno
    text = f"{event.operation:<12} {event.partition:>4} {seqno:>8}"
    if timestamps:
        text = f"{changed_at(event) or '-':<24}  {text}"
    match event:
        case Mutation():
            text = f"{text}  {text_of(event.key)}  {text_of(event.value)}".rstrip()
        case Deletion() | Expiration():
            text = f"{text}  {text_of(event.key)}"
        case Rollback():
            text = f"{text}  {event.why}; {event.lost[0] + 1} to {event.lost[1]} are lost"
    return text if width is None or len(text) <= width else text[: width - 1] + "…"

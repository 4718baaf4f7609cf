"""Show changes as they happen, from the beginning, from now, or from where a checkpoint stands.

It follows every partition across restarts and failovers, and ends only when it has everything (--until now)
or is stopped. With --checkpoint it takes up where it left and keeps its place there. A history that branched
shows as a `rollback`: what was printed past that seqno is no longer true.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from upper.cli.output import ExitCode, Output, text_of
from upper.cli.reaching import add_url, as_typed, partitions, reach
from upper.model.values import Seqno

if TYPE_CHECKING:
    from upper.client.bucket import Bucket
    from upper.client.events import Event
    from upper.client.feed import Feed
    from upper.client.positions import Positions

EXAMPLES = """
upper tail upr://127.0.0.1:11210/default
upper tail upr://127.0.0.1:11210/default --from now --key-prefix user: --json
upper tail upr://127.0.0.1:11210/default --until now --checkpoint here.json
"""
WIDTH = 72  # of a value in text; --json has all of it


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument(
        "--from", dest="since", default="beginning", metavar="beginning|now|FILE", help="where to begin"
    )
    parser.add_argument("--until", choices=("now",), help="end with what is there now, instead of never")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="take up from here, and keep the place"
    )
    parser.add_argument("--partitions", type=partitions, metavar="0-15,99", help="only these")
    parser.add_argument("--keys-only", action="store_true", help="leave the values with the node")
    parser.add_argument("--key-prefix", metavar="TEXT", help="only keys that begin like this")
    parser.add_argument("--operations", metavar="LIST", help="only these: mutation,deletion,expiration")
    parser.add_argument("--snapshots", action="store_true", help="show where snapshots end, too")


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.client.checkpoint import Checkpoint
    from upper.client.events import SnapshotEnd
    from upper.errors import BadCheckpoint

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
            operations=None if args.operations is None else args.operations.split(","),
            on_rollback="continue",
            name="upper tail",
        )
        with feed, _progress(args, bucket, feed, out) as moved:
            for event in feed:
                moved(event)
                if args.snapshots or not isinstance(event, SnapshotEnd):
                    out.show(fields(event), text=None if out.as_json else line(event))
    return ExitCode.OK


@contextmanager
def _progress(
    args: Namespace, bucket: Bucket, feed: Feed[Event], out: Output
) -> Iterator[Callable[[Event], None]]:
    """A bar for those who send everything into a file and wait; events move it by the history they cover."""
    if args.until is None:
        yield lambda event: None
        return
    at = {partition: int(position.seqno) for partition, position in feed.positions.items()}
    total = None
    if bucket.address.dialect != "tap":  # which has no seqnos
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
    """An event as an object: 64-bit numbers as text, because many readers of JSON round them."""
    from upper.client.events import Mutation, Rollback

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
    if isinstance(event, Mutation) and not event.value:
        shown["value"] = b""
    if isinstance(event, Rollback):
        shown |= {"to": event.to, "why": event.why, "lost": list(event.lost)}
    return shown


def line(event: Event) -> str:
    """An event for people: one line, whatever is in it."""
    from upper.client.events import Deletion, Expiration, Mutation, Rollback

    seqno = "-" if event.seqno is None else event.seqno
    head = f"{event.operation:<12} {event.partition:>4} {seqno:>8}"
    match event:
        case Mutation():
            value = text_of(event.value)
            cut = value if len(value) <= WIDTH else value[: WIDTH - 1] + "…"
            return _printable(f"{head}  {text_of(event.key)}  {cut}".rstrip())
        case Deletion() | Expiration():
            return _printable(f"{head}  {text_of(event.key)}")
        case Rollback():
            return f"{head}  {event.why}; {event.lost[0] + 1} to {event.lost[1]} are lost"
        case _:
            return head


def _printable(text: str) -> str:
    """A newline or an escape sequence in a key must not reach the terminal."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()

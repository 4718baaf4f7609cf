"""Shared by the verbs that can wait for a write: --after, --timeout and --url."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from upper.cli.common import add_credentials, url_of
from upper.cli.durations import seconds


def add_after(parser: ArgumentParser, what: str) -> None:
    """`what` has to have the write: the lake, or an index of it."""
    parser.add_argument(
        "--after",
        action="append",
        default=[],
        metavar="TOKEN",
        help=f"wait until the {what} has this write; may be repeated",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=30.0, metavar="TIME", help="wait at most this long (30s)"
    )
    parser.add_argument("--url", metavar="URL", help="ask this bucket whether a write was taken back")
    add_credentials(parser)


@contextmanager
def after(args: Namespace, name: str) -> Iterator[dict[str, Any]]:
    """The arguments of a call that waits. `name`: of the connection to the bucket."""
    found: dict[str, Any] = {"after": args.after, "timeout": args.timeout}
    if not (args.url and args.after):
        yield found
        return
    from upper.pipeline.source import BucketSource

    with closing(BucketSource(url_of(args), name=name)) as source:
        yield {**found, "bucket_state": source.bucket_state}

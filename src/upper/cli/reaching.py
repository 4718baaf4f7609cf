"""What the verbs that talk to a node share: the URL, how long to wait, and which partitions."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from upper.client.bucket import Bucket


def add_url(parser: ArgumentParser) -> None:
    """The arguments with which any verb reaches a bucket."""
    parser.add_argument("url", metavar="URL", help="upr://[USER:PASSWORD@]HOST[:PORT][,HOST...][/BUCKET]")
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="how long a node may take to answer (10)"
    )


def reach(args: Namespace, name: str) -> Bucket:
    """The bucket that the arguments name."""
    from upper.client.bucket import connect

    return connect(args.url, timeout=args.timeout, name=name)


def partitions(text: str) -> list[int]:
    """`0-15,99` as numbers."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ArgumentTypeError(f"{part!r} is not a partition or a range of them; write 0-15,99")
        low, high = int(first), int(last or first)
        if high < low or high > 65535:
            raise ArgumentTypeError(f"{part!r} is not a range of partitions; write the smaller number first")
        found.update(range(low, high + 1))
    return sorted(found)

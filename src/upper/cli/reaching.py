"""What the verbs that talk to a node share: the URL, how long to wait, and which partitions."""

from __future__ import annotations

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from upper.client.bucket import Bucket


def add_url(parser: ArgumentParser) -> None:
    """The arguments with which any verb reaches a bucket."""
    parser.add_argument("url", metavar="URL", help="upr://[USER:PASSWORD@]HOST[:PORT][,HOST...][/BUCKET]")
    parser.add_argument(
        "--timeout", type=some_seconds, metavar="SECONDS", help="how long a node may take to answer (10)"
    )


def reach(args: Namespace, name: str) -> Bucket:
    """The bucket that the arguments name."""
    from upper.client.bucket import connect

    return connect(args.url, timeout=args.timeout, name=name)


def as_typed(text: str) -> bytes:
    """A key or a value as the shell gave it, which need not be text."""
    return os.fsencode(text)


def number(first: int, last: int) -> Callable[[str], int]:
    """A whole number in this range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not first <= value <= last:
            raise ArgumentTypeError(f"{text} is not a number from {first} to {last}")
        return value

    return parse


def some_seconds(text: str) -> float:
    """A time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def partitions(text: str) -> list[int]:
    """`0-15,99` as numbers."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ArgumentTypeError(f"{part!r} is not a partition or a range of them; write 0-15,99")
        low, high = int(first), int(last or first)
        if high < low:
            raise ArgumentTypeError(f"{part!r} is not a range of partitions; write the smaller number first")
        if high > 65535:
            raise ArgumentTypeError(f"there is no partition {high}; a bucket has at most 65536 of them")
        found.update(range(low, high + 1))
    return sorted(found)

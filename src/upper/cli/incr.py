"""Add to the decimal number under a key, or subtract from it (not below 0), and print the result."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from upper.cli.common import add_url, as_typed, number, reach
from upper.cli.durations import whole_seconds
from upper.cli.output import ExitCode, Output, text_of
from upper.errors import KeyNotFound

EXAMPLES = """
upper incr upr://127.0.0.1:11210/default visits --initial 1
upper incr upr://127.0.0.1:11210/default stock --by -3
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("key", metavar="KEY", help="the key that holds the number")
    parser.add_argument(
        "--by",
        type=number(-(2**64) + 1, 2**64 - 1),
        default=1,
        metavar="N",
        help="how much to add; may be negative (%(default)s)",
    )
    parser.add_argument(
        "--initial", type=number(0, 2**64 - 1), metavar="N", help="create a missing key with this number"
    )
    parser.add_argument(
        "--expiry",
        type=whole_seconds(2**32 - 2),
        default=0,
        metavar="TIME",
        help="how long a key that is created exists (for ever)",
    )


def run(args: Namespace, out: Output) -> ExitCode:
    key = as_typed(args.key)
    with reach(args, "upper incr") as bucket:
        count = bucket.incr if args.by >= 0 else bucket.decr
        try:
            result = count(key, abs(args.by), initial=args.initial, expiry=args.expiry)
        except KeyNotFound:
            raise KeyNotFound(f"no such key: {text_of(key)}; create it with --initial N") from None
    out.show({"key": key, "value": result}, text=str(result))
    return ExitCode.OK

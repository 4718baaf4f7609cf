"""Count: add to the decimal number under a key (or take from it, down to 0), and show the new one."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from upper.cli.output import ExitCode, Output
from upper.cli.reaching import add_url, as_typed, number, reach
from upper.errors import KeyNotFound

EXAMPLES = """
upper incr upr://127.0.0.1:11210/default visits --initial 1
upper incr upr://127.0.0.1:11210/default stock --by -3
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("key", metavar="KEY")
    parser.add_argument(
        "--by",
        type=number(-(2**64) + 1, 2**64 - 1),
        default=1,
        metavar="N",
        help="how much, also negative (%(default)s)",
    )
    parser.add_argument(
        "--initial", type=number(0, 2**64 - 1), metavar="N", help="what a key that is not there begins with"
    )
    parser.add_argument(
        "--expiry", type=number(0, 2**32 - 2), default=0, metavar="SECONDS", help="of a key that begins"
    )


def run(args: Namespace, out: Output) -> ExitCode:
    key = as_typed(args.key)
    with reach(args, "upper incr") as bucket:
        count = bucket.incr if args.by >= 0 else bucket.decr
        try:
            result = count(key, abs(args.by), initial=args.initial, expiry=args.expiry)
        except KeyNotFound:
            raise KeyNotFound(f"no such key: {args.key}; give --initial N to begin it with") from None
    out.show({"key": key, "value": result}, text=str(result))
    return ExitCode.OK

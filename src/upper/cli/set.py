"""Store a value under a key, and show where that write stands in the history of its partition."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from upper.cli.output import ExitCode, Output
from upper.cli.reaching import add_url, as_typed, number, reach

EXAMPLES = """
upper set upr://127.0.0.1:11210/default user:1 '{"name": "Ann"}' --expiry 60
upper set upr://127.0.0.1:11210/default picture - < picture.png
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("key", metavar="KEY")
    parser.add_argument("value", metavar="VALUE", help="what to store; - reads it from standard input")
    parser.add_argument(
        "--expiry", type=number(0, 2**32 - 1), default=0, metavar="SECONDS", help="forget it after so long"
    )
    parser.add_argument(
        "--flags", type=number(0, 2**32 - 1), default=0, metavar="N", help="a number kept with the value"
    )
    parser.add_argument(
        "--cas", type=number(0, 2**64 - 1), default=0, metavar="CAS", help="only if it has not changed since"
    )


def run(args: Namespace, out: Output) -> ExitCode:
    key = as_typed(args.key)
    value = sys.stdin.buffer.read() if args.value == "-" else as_typed(args.value)
    with reach(args, "upper set") as bucket:
        stored = bucket.set(key, value, expiry=args.expiry, flags=args.flags, cas=args.cas)
        partition = bucket.partition_of(key)
    out.show(
        {
            "key": key,
            "partition": partition,
            "seqno": stored.seqno,
            "branch": None if stored.branch is None else str(stored.branch),
            "cas": str(stored.cas),
        }
    )
    return ExitCode.OK

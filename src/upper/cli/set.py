"""Store a value under a key, and print the seqno and the branch of the write."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from upper.cli.common import add_url, as_typed, number, reach
from upper.cli.durations import whole_seconds
from upper.cli.output import ExitCode, Output

EXAMPLES = """
upper set upr://127.0.0.1:11210/default user:1 '{"name": "Ann"}' --expiry 60
upper set upr://127.0.0.1:11210/default picture - < picture.png
upper set upr://127.0.0.1:11210/default order:1 '{"total": 12}' --token
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("key", metavar="KEY", help="the key")
    parser.add_argument("value", metavar="VALUE", help="the value; - reads it from standard input")
    parser.add_argument(
        "--expiry",
        type=whole_seconds(2**32 - 1),
        default=0,
        metavar="TIME",
        help="how long the key exists, as 90s or 7d (for ever)",
    )
    parser.add_argument(
        "--flags",
        type=number(0, 2**32 - 1),
        default=0,
        metavar="N",
        help="a number that is stored with the value (%(default)s)",
    )
    parser.add_argument(
        "--cas",
        type=number(0, 2**64 - 1),
        default=0,
        metavar="CAS",
        help="store only if this is still the CAS of the key",
    )
    parser.add_argument(
        "--persist",
        type=number(1, 4),
        default=1,
        metavar="N",
        help="wait until the value is on the disks of N nodes (%(default)s)",
    )
    parser.add_argument(
        "--replicate",
        type=number(0, 3),
        default=0,
        metavar="N",
        help="wait until N replicas have the value (%(default)s)",
    )
    parser.add_argument(
        "--token", action="store_true", help="print only the token of the write, for `upper query --after`"
    )


def run(args: Namespace, out: Output) -> ExitCode:
    key = as_typed(args.key)
    value = sys.stdin.buffer.read() if args.value == "-" else as_typed(args.value)
    with reach(args, "upper set") as bucket:
        stored = bucket.set(key, value, expiry=args.expiry, flags=args.flags, cas=args.cas)
        if args.persist > 1 or args.replicate:
            bucket.wait_until_durable(key, stored, persist=args.persist, replicate=args.replicate)
        partition = bucket.partition_of(key)
    if args.token:
        out.show({"token": stored.token}, text=stored.token)
        return ExitCode.OK
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

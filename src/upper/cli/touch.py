"""Set the expiry of a key, or remove it with 0. The exit code is 1 if the key does not exist."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from upper.cli.common import add_url, as_typed, reach
from upper.cli.durations import whole_seconds
from upper.cli.output import ExitCode, Output, text_of

EXAMPLES = """
upper touch upr://127.0.0.1:11210/default user:1 1h
upper touch upr://127.0.0.1:11210/default user:1 0
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("key", metavar="KEY", help="the key to change")
    parser.add_argument(
        "expiry",
        type=whole_seconds(2**32 - 1),
        metavar="TIME",
        help="time from now, as 90s or 7d; 0: the key never expires",
    )


def run(args: Namespace, out: Output) -> ExitCode:
    key = as_typed(args.key)
    with reach(args, "upper touch") as bucket:
        stored = bucket.touch(key, args.expiry)
    when = f"expires in {args.expiry:,} s" if args.expiry else "never expires"
    out.show({"key": key, "ttl": args.expiry or None, "cas": str(stored.cas)}, text=f"{text_of(key)} {when}")
    return ExitCode.OK

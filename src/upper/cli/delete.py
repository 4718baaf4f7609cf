"""Delete keys. The exit code is 1 if one of them does not exist."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from upper.cli.common import add_url, as_typed, reach
from upper.cli.output import ExitCode, Output

EXAMPLES = """
upper delete upr://127.0.0.1:11210/default user:1
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("keys", metavar="KEY", nargs="+", help="the keys to delete")


def run(args: Namespace, out: Output) -> ExitCode:
    with reach(args, "upper delete") as bucket:
        deleted = bucket.delete_many(map(as_typed, args.keys))
    out.show({"asked": len(args.keys), "deleted": deleted}, text=f"deleted {deleted} of {len(args.keys)}")
    return ExitCode.OK if deleted == len(args.keys) else ExitCode.DIFFERENT

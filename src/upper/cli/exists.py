"""Print whether keys exist. The exit code is 0 if all of them do, else 1."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from upper.cli.common import add_url, as_typed, reach
from upper.cli.output import ExitCode, Output

EXAMPLES = """
upper exists upr://127.0.0.1:11210/default user:1 user:2
upper exists upr://127.0.0.1:11210/default user:1 > /dev/null && echo yes
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("keys", metavar="KEY", nargs="+", help="the keys to look up")


def run(args: Namespace, out: Output) -> ExitCode:
    with reach(args, "upper exists") as bucket:
        rows = [{"key": key, "exists": bucket.exists(key)} for key in map(as_typed, args.keys)]
    out.show(rows)
    return ExitCode.OK if all(row["exists"] for row in rows) else ExitCode.DIFFERENT

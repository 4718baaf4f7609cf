"""Print the keys of a bucket that begin with a prefix, with their values, one per line.

It reads a change stream of keys, then their values, so the user needs the roles `stream` and `read`.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from itertools import islice

from upper.cli.common import add_prefix, add_url, as_typed, reach
from upper.cli.output import ExitCode, Output, text_of

EXAMPLES = """
upper scan upr://127.0.0.1:11210/default user: --limit 10
upper scan upr://127.0.0.1:11210/default --json | jq -r .value
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    add_prefix(parser)


def run(args: Namespace, out: Output) -> ExitCode:
    with reach(args, "upper scan") as bucket:
        for key, item in islice(bucket.scan(as_typed(args.prefix)), args.limit):
            row = {"key": key, "value": item.value, "flags": item.flags, "cas": str(item.cas)}
            out.show(row, text=f"{text_of(key)}  {text_of(item.value)}")
    return ExitCode.OK

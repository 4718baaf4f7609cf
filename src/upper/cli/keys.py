"""Print the keys of a bucket that begin with a prefix, one per line, partition by partition.

It reads a change stream of keys without values, so the user needs the role `stream`.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from itertools import islice

from upper.cli.common import add_prefix, add_url, as_typed, reach
from upper.cli.output import ExitCode, Output, text_of

EXAMPLES = """
upper keys upr://127.0.0.1:11210/default
upper keys upr://127.0.0.1:11210/default user: --limit 10
upper keys upr://127.0.0.1:11210/default user: --json
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    add_prefix(parser)


def run(args: Namespace, out: Output) -> ExitCode:
    with reach(args, "upper keys") as bucket:
        for key in islice(bucket.keys(as_typed(args.prefix)), args.limit):
            out.show({"key": key}, text=text_of(key))
    return ExitCode.OK

"""Read keys. One key prints its value, byte for byte into a file or a pipe; several print a table."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from upper.cli.output import ExitCode, Output, text_of
from upper.cli.reaching import add_url, as_typed, reach

EXAMPLES = """
upper get upr://127.0.0.1:11210/default user:1
upper get upr://127.0.0.1:11210/default user:1 user:2 --json
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("keys", metavar="KEY", nargs="+", help="what to read")


def run(args: Namespace, out: Output) -> ExitCode:
    keys = [as_typed(key) for key in args.keys]
    with reach(args, "upper get") as bucket:
        found = bucket.get_many(keys)
    rows = [
        {"key": key, "value": item.value, "flags": item.flags, "cas": str(item.cas)}
        for key in keys
        if (item := found.get(key)) is not None
    ]
    if len(keys) == 1 and rows and not out.as_json:
        out.raw(found[keys[0]].value)
    elif rows:
        out.show(rows)
    missing = [text_of(key) for key in keys if key not in found]
    if missing:
        out.note(f"upper: no such key: {', '.join(missing)}")
    return ExitCode.DIFFERENT if missing else ExitCode.OK

"""Read keys. One key prints its value as it is; several print a table."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from upper.cli.output import ExitCode, Output
from upper.cli.reaching import add_url, reach

EXAMPLES = """
upper get upr://127.0.0.1:11210/default user:1
upper get upr://127.0.0.1:11210/default user:1 user:2 --json
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("keys", metavar="KEY", nargs="+", help="what to read")


def run(args: Namespace, out: Output) -> ExitCode:
    with reach(args, "upper get") as bucket:
        found = bucket.get_many(args.keys)
    rows = [
        {"key": key, "value": item.value, "flags": item.flags, "cas": str(item.cas)}
        for key in args.keys
        if (item := found.get(key.encode())) is not None
    ]
    if len(args.keys) == 1 and rows and not out.as_json:
        value = found[args.keys[0].encode()].value
        out.raw(value if value.endswith(b"\n") else value + b"\n")
    elif rows:
        out.show(rows)
    missing = [key for key in args.keys if key.encode() not in found]
    if missing:
        out.note(f"upper: no such key: {', '.join(missing)}")
    return ExitCode.DIFFERENT if missing else ExitCode.OK

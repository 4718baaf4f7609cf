"""Read keys.

One key prints its value, unchanged, byte for byte; several keys print a table. --verbose and --json add the
seconds that are left until a key expires (ttl). The exit code is 1 if a key does not exist.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from upper.cli.common import add_url, as_typed, reach
from upper.cli.output import ExitCode, Output, text_of
from upper.errors import KeyNotFound

if TYPE_CHECKING:
    from upper.client.bucket import Bucket

EXAMPLES = """
upper get upr://127.0.0.1:11210/default user:1
upper get upr://127.0.0.1:11210/default user:1 user:2 --json
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("keys", metavar="KEY", nargs="+", help="the keys to read")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also print flags, CAS and time to live, as a table"
    )


def run(args: Namespace, out: Output) -> ExitCode:
    keys = [as_typed(key) for key in args.keys]
    verbose = args.verbose or out.as_json
    with reach(args, "upper get") as bucket:
        found = bucket.get_many(keys)
        rows = [
            {"key": key, "value": item.value, "flags": item.flags, "cas": str(item.cas)}
            | ({"ttl": _ttl(bucket, key)} if verbose else {})
            for key in keys
            if (item := found.get(key)) is not None
        ]
    if len(keys) == 1 and rows and not verbose:
        out.raw(found[keys[0]].value)
    elif rows:
        out.show(rows)
    missing = [text_of(key) for key in keys if key not in found]
    if missing:
        out.note(f"upper: no such key: {', '.join(missing)}")
    return ExitCode.DIFFERENT if missing else ExitCode.OK


def _ttl(bucket: Bucket, key: bytes) -> int | None:
    """Seconds until the key expires, None if it does not, or has gone since it was read."""
    try:
        return bucket.ttl(key)
    except KeyNotFound:
        return None

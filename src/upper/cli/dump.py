"""Print the items in the data directory of a bucket, in the order in which they last changed.

The node must be stopped; nothing is changed. Options that `upper tail` has too have the same names. Of a
damaged directory everything that can be read is printed, and the exit code is that of damage.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from upper.cli.common import as_typed, partitions
from upper.cli.output import ExitCode, Output

if TYPE_CHECKING:
    from upper.storage.bucket import BucketStore

EXAMPLES = """
upper dump data
upper dump data --partitions 7 --deleted
upper dump data --key-prefix user: --keys-only
upper dump data --json | jq -r .key
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="the directory that holds bucket.json")
    parser.add_argument(
        "-p", "--partitions", type=partitions, metavar="0-15,99", help="only these partitions"
    )
    parser.add_argument("--keys-only", action="store_true", help="leave the values out")
    parser.add_argument("--key-prefix", metavar="TEXT", help="only keys with this prefix")
    parser.add_argument("--deleted", action="store_true", help="also deletions that are still stored")


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.errors import InvalidArguments
    from upper.storage.check import scanned, weight

    with ExitStack() as stack:
        with out.progress("reading", weight(args.directory)) as bar:
            scan = stack.enter_context(scanned(args.directory, bar.advance))
        count = len(scan.bucket.partitions)
        if args.partitions is not None and args.partitions[-1] >= count:
            raise InvalidArguments(f"there is no partition {args.partitions[-1]}; they are 0 to {count - 1}")
        items = _items(scan.bucket, args)
        if out.as_json:
            out.show(items)
        else:
            out.show(list(items), empty="no items")
        for finding in scan.damages:
            out.note(str(finding))
        return ExitCode.CORRUPT if scan.damages else ExitCode.OK


def _items(bucket: BucketStore, args: Namespace) -> Iterator[dict[str, object]]:
    from upper.model.values import ZERO
    from upper.record.change import item_of

    wanted = range(len(bucket.partitions)) if args.partitions is None else args.partitions
    prefix = b"" if args.key_prefix is None else as_typed(args.key_prefix)
    for store in (bucket.partitions[number] for number in wanted):
        for chunk in store.changes_after(ZERO).chunks(1 << 20):
            for item in map(item_of, chunk):
                if (item.deleted and not args.deleted) or not item.key.startswith(prefix):
                    continue
                yield {
                    "partition": store.id,
                    "seqno": item.seqno,
                    "revision": item.revision,
                    "cas": str(item.cas),  # 64 bits do not survive every JSON reader as a number
                    "flags": item.flags,
                    "expiration": item.expiration,
                    **({"deleted": item.deleted} if args.deleted else {}),
                    "key": item.key,
                    **({} if args.keys_only else {"value": item.value}),
                }

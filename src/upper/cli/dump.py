"""Print the items in the data directory of a bucket, in the order in which they last changed.

The node must be stopped; nothing is changed. Of a damaged directory everything that can be read is
printed, and the exit code says that it is not all.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from upper.cli.output import ExitCode, Output

if TYPE_CHECKING:
    from upper.storage.bucket import Bucket

EXAMPLES = """
upper dump data
upper dump data --partition 7 --deleted
upper dump data --json | jq -r .key
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="the directory that holds bucket.json")
    parser.add_argument("--partition", type=int, metavar="N", help="only this one")
    parser.add_argument("--deleted", action="store_true", help="deletions that are remembered, too")
    parser.add_argument("--keys", action="store_true", help="leave the values out")


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.errors import InvalidArguments
    from upper.storage.check import surveyed, weight

    with ExitStack() as stack:
        with out.progress("reading", weight(args.directory)) as bar:
            survey = stack.enter_context(surveyed(args.directory, bar.advance))
        count = len(survey.bucket.partitions)
        if args.partition is not None and not 0 <= args.partition < count:
            raise InvalidArguments(f"there is no partition {args.partition}; they are 0 to {count - 1}")
        items = _items(survey.bucket, args)
        if out.as_json:
            out.show(items)
        else:
            out.show(list(items), empty="no items")
        for finding in survey.findings:
            out.note(str(finding))
        return ExitCode.CORRUPT if survey.findings else ExitCode.OK


def _items(bucket: Bucket, args: Namespace) -> Iterator[dict[str, object]]:
    from upper.model.values import ZERO
    from upper.storage.records import item_of

    stores = bucket.partitions if args.partition is None else [bucket.partitions[args.partition]]
    for store in stores:
        for chunk in store.changes_after(ZERO).chunks(1 << 20):
            for item in map(item_of, chunk):
                if item.deleted and not args.deleted:
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
                    **({} if args.keys else {"value": item.value}),
                }

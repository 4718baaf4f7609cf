"""Write the items of a bucket, or of a commit of a lake, to a file: JSON lines, CSV or Parquet.

FILE is - for standard output. The format follows from the suffix of FILE (.jsonl, .csv, .parquet), or is
given with --format. Each partition is exported at a consistent point. Bytes that are not UTF-8 are
hexadecimal in JSON lines and CSV. `upper import` reads these files.
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import IO

from upper.cli.common import add_credentials, add_storage_options, as_typed, is_lake, number, url_of
from upper.cli.durations import moment
from upper.cli.output import ExitCode, Output
from upper.errors import InvalidArguments

EXAMPLES = """
upper export upr://127.0.0.1:11210/default items.jsonl
upper export upr://127.0.0.1:11210/default users.csv --prefix user:
upper export ./lake items.parquet --at 2026-01-31T12:00
upper export ./lake - --format jsonl --commit 12
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL|LAKE", help="the bucket or the lake")
    parser.add_argument("file", metavar="FILE", help="the file to write; - is standard output")
    add_credentials(parser)
    add_storage_options(parser)
    parser.add_argument(
        "--format", choices=("jsonl", "csv", "parquet"), help="default: by the suffix of FILE"
    )
    parser.add_argument("--prefix", default="", metavar="TEXT", help="only keys that begin with TEXT")
    point = parser.add_mutually_exclusive_group()
    point.add_argument("--commit", type=number(1, 2**48), metavar="N", help="of a lake: commit N")
    point.add_argument(
        "--at", type=moment, metavar="TIME", help="of a lake: the newest commit up to this time"
    )


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.apps.lake.store import open_store
    from upper.apps.transfer import items
    from upper.apps.transfer.formats import format_of, writer

    kind = format_of(args.file, args.format)
    prefix = as_typed(args.prefix)
    if not is_lake(args.url):
        if args.commit is not None or args.at is not None:
            raise InvalidArguments("--commit and --at are for a lake; a bucket is exported as it is now")
        tables = items.of_bucket(url_of(args), prefix)
    else:
        store = open_store(args.url, dict(args.storage_option))
        tables = items.of_lake(store, number=args.commit, at=args.at, prefix=prefix)
    count = 0
    to_stdout = args.file == "-"
    part = None if to_stdout else _beside(Path(args.file))
    sink: IO[bytes] = sys.stdout.buffer if part is None else part.open("wb")
    try:
        with out.progress("exporting", answering=to_stdout) as progress:
            to = writer(kind, sink)
            for table in tables:
                to.write(table)
                count += len(table)
                progress.advance(len(table))
            to.close()
        if part is not None:
            os.fsync(sink.fileno())
            sink.close()
            part.replace(args.file)
    except OSError as error:
        if part is None or error.filename is None:
            raise
        raise _unwritable(args.file, error) from None
    finally:
        if part is not None:
            sink.close()
            part.unlink(missing_ok=True)
    if not to_stdout:
        out.show({"items": count, "file": args.file}, text=f"{count:,} items written to {args.file}")
    return ExitCode.OK


def _beside(file: Path) -> Path:
    """An empty file with a name of its own: what has the name of `file` is whole."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    except OSError as error:
        raise _unwritable(str(file), error) from None
    os.umask(mask := os.umask(0o077))
    os.fchmod(descriptor, 0o666 & ~mask)
    os.close(descriptor)
    return Path(name)


def _unwritable(file: str, error: OSError) -> InvalidArguments:
    return InvalidArguments(f"{file} cannot be written ({error.strerror}); name another file")

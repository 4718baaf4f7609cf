"""Store the rows of a file in a bucket: JSON lines, CSV or Parquet, of `upper export` or of other programs.

A row has a key and a value; flags and expiration (seconds since 1970) are used where present. With
--metadata CAS, revision and data type are kept too. A value in JSON lines that is not text is stored as JSON;
--value . stores the whole row. Bad rows are written to --bad with their line and the reason, nothing else is
lost, and the exit code is then 1. FILE is - for standard input.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from upper.cli.common import add_url, as_typed, reach
from upper.cli.output import ExitCode, Output
from upper.errors import InvalidArguments

EXAMPLES = """
upper import items.jsonl upr://127.0.0.1:11210/default
upper import items.parquet upr://127.0.0.1:11210/default --metadata
upper import users.csv upr://127.0.0.1:11210/default --key id --value . --prefix user:
"""
SHOWN = 5  # bad rows that are shown


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the file to read; - is standard input")
    add_url(parser)
    parser.add_argument(
        "--format", choices=("jsonl", "csv", "parquet"), help="default: by the suffix of FILE"
    )
    parser.add_argument("--key", default="key", metavar="FIELD", help="the field with the key (key)")
    parser.add_argument(
        "--value", default="value", metavar="FIELD", help="the field with the value (value), or . for the row"
    )
    parser.add_argument("--prefix", default="", metavar="TEXT", help="put TEXT before every key")
    parser.add_argument("--metadata", action="store_true", help="keep CAS, revision and data type")
    parser.add_argument("--bad", metavar="BAD", help="where bad rows go (FILE.bad)")


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.apps.transfer.formats import format_of, read
    from upper.apps.transfer.imports import BadRow, Imported, ImportOptions, import_rows

    if "://" in args.file:
        raise InvalidArguments(f"{args.file!r} is not a file; the file comes first: upper import FILE URL")
    kind = format_of(args.file, args.format)
    if "://" not in args.url:
        raise InvalidArguments(
            f"{args.url!r} is not the URL of a bucket; a lake follows a bucket: import into that, and sync"
        )
    options = ImportOptions(args.key, args.value, as_typed(args.prefix), args.metadata)
    bad_path = Path(args.bad or ("import.bad" if args.file == "-" else f"{args.file}.bad"))
    with ExitStack() as stack:
        source: IO[bytes] = (
            sys.stdin.buffer if args.file == "-" else stack.enter_context(open(args.file, "rb"))
        )
        bucket = stack.enter_context(reach(args, "upper import"))
        bad: list[IO[str]] = []
        shown, done = 0, Imported()

        def reject(row: BadRow) -> None:
            nonlocal shown
            if not bad:
                bad.append(stack.enter_context(bad_path.open("w")))
            bad[0].write(json.dumps({"line": row.line, "error": row.error, "row": row.row}) + "\n")
            shown += 1
            if shown <= SHOWN:
                out.note(f"upper: {args.file}, line {row.line}: {row.error}")

        try:
            with out.progress("importing") as progress:
                rows = read(kind, source)
                import_rows(bucket, rows, options, reject=reject, progress=progress.advance, done=done)
        except BaseException:
            if done.rows:
                out.note(
                    f"upper: stopped; {done.written:,} of the first {done.rows:,} rows are written, and "
                    "the next ones may be; the same command writes all of them again"
                )
            raise
    text = f"{done.written:,} of {done.rows:,} rows written"
    if done.expired:
        text += f", {done.expired:,} have expired"
    if done.bad:
        text += f"; {done.bad:,} bad rows are in {bad_path}"
    out.show({**vars(done), "bad_file": str(bad_path) if done.bad else None}, text=text)
    return ExitCode.DIFFERENT if done.bad else ExitCode.OK

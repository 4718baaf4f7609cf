"""Store the rows of a file in a bucket or a lake: JSON lines, CSV or Parquet, of `upper export` or of others.

A row has a key and a value; flags and expiration (seconds since 1970) are used where present. With
--metadata CAS, revision and data type are kept too. A value in JSON lines that is not text is stored as JSON;
--value . stores the whole row. Bad rows are written to --bad with their line and the reason, nothing else is
lost, and the exit code is then 1. FILE is - for standard input.

LAKE is a new directory, or a lake of earlier imports: it has its own history, without a bucket. An import
that was interrupted continues after its last commit. A lake that follows a bucket is refused: import into the
bucket.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import copyfileobj
from typing import IO, TYPE_CHECKING

from upper.cli.common import (
    add_credentials,
    add_storage_options,
    add_timeout,
    as_typed,
    is_lake,
    number,
    reach,
)
from upper.cli.output import ExitCode, Output
from upper.errors import InvalidArguments

if TYPE_CHECKING:
    from upper.apps.transfer.formats import RawRow
    from upper.apps.transfer.imports import BadRow, Imported, ImportOptions

EXAMPLES = """
upper import items.jsonl upr://127.0.0.1:11210/default
upper import items.parquet upr://127.0.0.1:11210/default --metadata
upper import users.csv upr://127.0.0.1:11210/default --key id --value . --prefix user:
upper import items.jsonl ./imported
"""
SHOWN = 5  # bad rows that are shown


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the file to read; - is standard input")
    parser.add_argument(
        "url",
        metavar="URL|LAKE",
        help="upr://[USER@]HOST[:PORT][,HOST...][/BUCKET], or a lake that follows no bucket",
    )
    add_credentials(parser)
    add_storage_options(parser)
    add_timeout(parser)
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
    parser.add_argument(
        "--partitions",
        type=number(1, 32768),
        metavar="N",
        help="of a new lake: partitions, a power of two (1024)",
    )


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.apps.transfer.formats import format_of
    from upper.apps.transfer.imports import Imported, ImportOptions

    if "://" in args.file:
        raise InvalidArguments(
            f"{args.file!r} is not a file; the file comes first: upper import FILE URL, or FILE LAKE"
        )
    kind = format_of(args.file, args.format)
    options = ImportOptions(args.key, args.value, as_typed(args.prefix), args.metadata)
    to_lake, done = is_lake(args.url), Imported()
    if args.partitions is not None and (not to_lake or args.partitions & (args.partitions - 1)):
        raise InvalidArguments("--partitions is for a new lake, and a power of two; a bucket has its own")
    with _bad_rows(args, out) as (reject, bad_path):
        try:
            if to_lake:
                _into_lake(args, kind, options, reject, out, done)
            else:
                _into_bucket(args, kind, options, reject, out, done)
        except BaseException:
            if done.rows:
                out.note(_stopped(done, to_lake=to_lake))
            raise
    text = f"{done.written:,} of {done.rows:,} rows written"
    if done.commits:
        text += f" in {done.commits:,} commit{'s' * (done.commits > 1)}"
    if done.present:
        text += f", {done.present:,} by an earlier import"
    if done.expired:
        text += f", {done.expired:,} have expired"
    if done.bad:
        text += f"; {done.bad:,} bad {'row is' if done.bad == 1 else 'rows are'} in {bad_path}"
    out.show({**vars(done), "bad_file": str(bad_path) if done.bad else None}, text=text)
    return ExitCode.DIFFERENT if done.bad else ExitCode.OK


def _stopped(done: Imported, *, to_lake: bool) -> str:
    if to_lake:
        return (
            f"upper: stopped; {done.written + done.present:,} of the first {done.rows:,} rows are committed, "
            "and the same command continues after them"
        )
    return (
        f"upper: stopped; {done.written:,} of the first {done.rows:,} rows are written, and "
        "the next ones may be; the same command writes all of them again"
    )


@contextmanager
def _bad_rows(args: Namespace, out: Output) -> Iterator[tuple[Callable[[BadRow], None], Path]]:
    """Writes bad rows to their file, which is made with the first one, and shows some of them."""
    path = Path(args.bad or ("import.bad" if args.file == "-" else f"{args.file}.bad"))
    held: list[IO[str]] = []
    shown = 0
    with ExitStack() as stack:

        def reject(row: BadRow) -> None:
            nonlocal shown
            if not held:
                held.append(stack.enter_context(path.open("w")))
            held[0].write(json.dumps({"line": row.line, "error": row.error, "row": row.row}) + "\n")
            shown += 1
            if shown <= SHOWN:
                out.note(f"upper: {args.file}, line {row.line}: {row.error}")

        yield reject, path


def _into_bucket(
    args: Namespace,
    kind: str,
    options: ImportOptions,
    reject: Callable[[BadRow], None],
    out: Output,
    done: Imported,
) -> None:
    from upper.apps.transfer.imports import import_rows

    with (
        _reader(args.file, kind) as rows,
        reach(args, "upper import") as bucket,
        out.progress("importing") as progress,
    ):
        import_rows(bucket, rows(), options, reject=reject, progress=progress.advance, done=done)


def _into_lake(
    args: Namespace,
    kind: str,
    options: ImportOptions,
    reject: Callable[[BadRow], None],
    out: Output,
    done: Imported,
) -> None:
    from upper.apps.lake.lake import held
    from upper.apps.lake.store import open_store
    from upper.apps.transfer.lake_import import LakeImport, finish, open_imported
    from upper.pipeline.local import LocalRunner

    store = open_store(args.url, dict(args.storage_option))
    if args.file != "-":
        open(args.file, "rb").close()  # before a lake is made for it
    with held(store):
        lake = open_imported(store, args.partitions)
        work = LakeImport(lake, options)
        with _reader(args.file, kind, again=work.before.rows > 0) as rows:
            with out.progress("importing") as progress:
                work.run(rows, reject=reject, progress=progress.advance, done=done)
            with out.progress("bringing `latest` up to date"):
                finish(lake, LocalRunner())


@contextmanager
def _reader(file: str, kind: str, *, again: bool = False) -> Iterator[Callable[[], Iterator[RawRow]]]:
    """Reads the rows of a file, each time from its beginning. `again`: more than once.

    Standard input is copied to a temporary file where it is read again, or where its end comes first.
    """
    from upper.apps.transfer.formats import read

    with ExitStack() as stack:

        def rows() -> Iterator[RawRow]:
            return read(kind, stack.enter_context(open(path, "rb")))

        if file != "-":
            path = file
            yield rows
        elif again or kind == "parquet":
            copy = stack.enter_context(tempfile.NamedTemporaryFile(prefix="upper-import-"))
            copyfileobj(sys.stdin.buffer, copy)
            copy.flush()
            path = copy.name
            yield rows
        else:
            yield lambda: read(kind, sys.stdin.buffer)

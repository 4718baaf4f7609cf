"""Query a lake in SQL: DuckDB over its tables changes, latest and lost.

Keys and values are BLOBs, shown as text where they are UTF-8; text(key) converts one to a string, and
value->>'city' reads a field of a JSON value. doc(value) is the value as JSON, or null if it is not JSON: use
it before other operators and functions, as in doc(value)->'address'->>'city'.
A query reads the lake and nothing else. With --allow-files it can also read and write other files, attach
databases and load extensions, with your permissions: run only SQL that you trust with that.

--after TOKEN waits until the lake has a write, and never returns an older state: `upper set --token` prints
a token, several are separated by commas. If a rollback took the write back, the query ends with an error
instead of waiting; with --url it also asks the bucket. The relation `current` is the bucket at the
position of `changes`.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace

from upper.cli.common import add_lake, lake_of
from upper.cli.output import ExitCode, Output
from upper.cli.waiting import add_after, after

EXAMPLES = """
upper query ./lake "select operation, count(*) from changes group by all"
upper query ./lake "select key, value from latest where text(key) like 'user:%' limit 5"
upper query ./lake "select partition, seqno, key, why from lost"
upper query ./lake "select count(*) from current" --after 528:201@52125187200004 --timeout 10s
upper query ./lake "copy latest to 'latest.csv'" --allow-files
"""
# DuckDB's operator and functions read a BLOB in its text notation, which is no JSON: the result is null.
JSON_OF_BLOB = re.compile(
    r"\b(?:(key|value)\s*->(?!>)|json_\w+\s*\(\s*(?:\w+\.)?(key|value)\b)", re.IGNORECASE
)


def add_arguments(parser: ArgumentParser) -> None:
    add_lake(parser)
    parser.add_argument("sql", metavar="SQL", help="the query")
    parser.add_argument("--allow-files", action="store_true", help="allow SQL to read and write other files")
    add_after(parser, "lake")


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.apps.lake.query import query

    with after(args, "upper-query") as waiting:
        rows = query(
            lake_of(args),
            args.sql,
            allow_files=args.allow_files,
            **waiting,
        )
        out.show(rows, empty="no rows")
    if found := JSON_OF_BLOB.search(args.sql):
        name = found[1] or found[2]
        out.note(
            f"upper: JSON operators and functions return null for a BLOB such as {name}; write doc({name})"
        )
    return ExitCode.OK

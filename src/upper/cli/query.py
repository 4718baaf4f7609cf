"""Ask a lake in SQL: DuckDB over its three tables, changes, latest and lost.

Keys and values are BLOBs; text(key) makes a string of one. They are shown as text where they are UTF-8.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from upper.cli.output import ExitCode, Output

EXAMPLES = """
upper query ./lake "select operation, count(*) from changes group by all"
upper query ./lake "select key, value from latest where text(key) like 'user:%' limit 5"
upper query ./lake "select partition, seqno, key, why from lost"
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("lake", metavar="LAKE", type=Path, help="the directory of the lake")
    parser.add_argument("sql", metavar="SQL", help="the query")


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.apps.lake.home import Lake
    from upper.apps.lake.query import query

    out.show(query(Lake(args.lake), args.sql), empty="no rows")
    return ExitCode.OK

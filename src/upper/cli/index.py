"""Create, list, rebuild or drop full-text indexes of a lake, which `upper search` searches.

An index has a document for each value that is a JSON object. --text names paths whose words are searched,
--fields paths whose values are matched exactly or compared, and shown: title, address.city. A sync that runs
builds an index and keeps it up to date, through rollbacks too; the verb does so itself while none runs.

The files of an index are in LAKE/indexes, or in the directory that --path names. If the lake is in an object
store, --path is needed; the machines on which Spark works must see it.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from upper.cli.common import add_lake, lake_of
from upper.cli.output import ExitCode, Output
from upper.cli.workers import add_workers, working
from upper.errors import DirectoryInUse, InvalidArguments

EXAMPLES = """
upper index create ./lake articles --text title,body --fields city,price
upper index list ./lake
upper index status ./lake articles
upper index rebuild ./lake articles
upper index drop ./lake articles
"""
DO = ("create", "list", "status", "rebuild", "drop")


def paths(text: str) -> list[str]:
    return [path.strip() for path in text.split(",") if path.strip()]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("do", metavar="|".join(DO), choices=DO)
    add_lake(parser)
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="the name of the index; list and status take none"
    )
    parser.add_argument("--text", type=paths, default=[], metavar="PATH,…", help="create: search these words")
    parser.add_argument(
        "--fields", type=paths, default=[], metavar="PATH,…", help="create: match and show these values"
    )
    parser.add_argument("--path", metavar="DIR", help="create: keep the files of the index here")
    add_workers(parser)


def run(args: Namespace, out: Output) -> ExitCode:
    from datetime import UTC, datetime
    from pathlib import Path

    from upper.apps.index import manage
    from upper.apps.lake.lake import Lake

    if (args.name is None) != (args.do == "list") and args.do != "status":
        raise InvalidArguments("list takes no NAME, the other commands take one; see `upper index --help`")
    store = lake_of(args)
    lake = Lake(store)
    if args.do in ("list", "status"):
        out.show(manage.reports(lake, args.name), empty="no indexes")
    elif args.do == "drop":
        manage.drop(store, args.name)
        out.show({"index": args.name}, text=f"index {args.name} dropped")
    else:
        if args.do == "create":
            place = None if args.path is None else Path(args.path)
            manage.create(
                store, args.name, text=args.text, fields=args.fields, now=datetime.now(UTC), place=place
            )
        else:
            manage.rebuild(store, args.name)
        try:
            with working(args, out, "upper index", "indexing") as (held, runner):
                manage.refresh(held, runner, args.name)
            report = manage.reports(Lake(store), args.name)[0]
            size = f"{report.size / 1e6:,.1f} MB"
            out.show(report, text=f"index {args.name}: {report.documents:,} documents, {size}")
        except DirectoryInUse:
            out.show({"index": args.name}, text=f"index {args.name}: the sync that runs builds it")
    return ExitCode.OK

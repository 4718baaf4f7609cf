"""Create, list, refresh or drop views of a lake: named SQL over its relations.

A view is one SELECT over current, changes, latest, lost or other views. doc(value) is the value as JSON, or
null if it is not JSON, so that columns get types: (doc(value)->>'price')::double. `upper query` uses a view
like a table, also with --after TOKEN.

A view is computed when it is queried. With --materialize it is also kept as a Delta table in LAKE/views/NAME,
if it is a projection, filter or aggregate of current: a sync that runs keeps it up to date, through rollbacks
too, and `refresh` does so while none runs.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from upper.cli.common import add_lake, lake_of
from upper.cli.output import ExitCode, Output
from upper.cli.workers import add_workers, working
from upper.errors import DirectoryInUse, InvalidArguments

EXAMPLES = """
upper view create ./lake users "select text(key) as id, doc(value)->>'name' as name from current"
upper view create ./lake sizes "select partition, count(*) as n from current group by 1" --materialize
upper view list ./lake
upper view refresh ./lake
upper view drop ./lake users
"""
DO = ("create", "list", "refresh", "drop")
GIVEN = {"create": (2,), "list": (0,), "refresh": (0, 1), "drop": (1,)}  # how many of NAME and SQL


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("do", metavar="|".join(DO), choices=DO)
    add_lake(parser)
    parser.add_argument("name", metavar="NAME", nargs="?", help="create, refresh, drop: the name of the view")
    parser.add_argument("sql", metavar="SQL", nargs="?", help="create: one SELECT")
    parser.add_argument("--materialize", action="store_true", help="create: keep it as a Delta table")
    add_workers(parser)


def run(args: Namespace, out: Output) -> ExitCode:
    from datetime import UTC, datetime

    from upper.apps.lake.query import require_lake
    from upper.apps.views import manage

    if (args.name is not None) + (args.sql is not None) not in GIVEN[args.do]:
        raise InvalidArguments("create takes NAME and SQL, drop takes NAME; see `upper view --help`")
    lake = lake_of(args)
    require_lake(lake)
    if args.do == "list":
        out.show(manage.listed(lake), empty="no views")
    elif args.do == "refresh":
        try:
            count = _refresh(args, out)
        except DirectoryInUse:
            raise DirectoryInUse(
                f"a sync of the lake {lake} runs, and keeps its views up to date; `upper view list {lake}` "
                "shows how far they are behind"
            ) from None
        out.show({"views": count}, text=f"{count} materialised views are up to date")
    elif args.do == "drop":
        manage.drop(lake, args.name)
        out.show({"view": args.name}, text=f"view {args.name} dropped")
    else:
        columns = manage.create(
            lake, args.name, args.sql, now=datetime.now(UTC), materialize=args.materialize
        )
        shown = ", ".join(f"{name} {kind}" for name, kind in columns)
        text = f"view {args.name} ({shown})"
        if args.materialize:
            try:
                _refresh(args, out)
            except DirectoryInUse:
                text += "; the sync that runs builds its table"
        out.show({"view": args.name, "columns": dict(columns)}, text=text)
    return ExitCode.OK


def _refresh(args: Namespace, out: Output) -> int:
    """Bring the tables of views up to date, if no sync runs."""
    from upper.apps.views.manage import refresh

    with working(args, out, "upper view refresh", "refreshing views") as (lake, runner):
        return refresh(lake, runner, args.name)

"""Look at a lake, or look after it.

Without more it shows the tables, where they stand and what was taken back; with --url also how far the
bucket is ahead. compact merges small files, vacuum removes files that no table needs any more, trim forgets
changes that are older than a time.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from math import ceil
from pathlib import Path

from upper.cli.output import ExitCode, Output
from upper.cli.spans import seconds

EXAMPLES = """
upper lake ./lake
upper lake ./lake --url upr://127.0.0.1:11210/default
upper lake ./lake compact
upper lake ./lake trim --older-than 30d
upper lake ./lake vacuum --keep 7d
"""
DO = ("show", "compact", "vacuum", "trim")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("lake", metavar="LAKE", type=Path, help="the directory of the lake")
    parser.add_argument("do", metavar="show|compact|vacuum|trim", nargs="?", default="show", choices=DO)
    parser.add_argument("--url", metavar="URL", help="ask this bucket how far ahead it is")
    parser.add_argument(
        "--rollbacks", action="store_true", help="show: each partition that went back, not only how many"
    )
    parser.add_argument(
        "--older-than",
        type=seconds,
        default=seconds("30d"),
        metavar="TIME",
        help="trim: what goes (default 30d)",
    )
    parser.add_argument(
        "--keep",
        type=seconds,
        default=seconds("7d"),
        metavar="TIME",
        help="vacuum: how long files stay for those who still read them (default 7d)",
    )
    parser.add_argument(
        "--master", default="local[*]", metavar="MASTER", help="where Spark works, for compact and trim"
    )


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.apps.lake.home import Lake, held

    if args.do == "show":
        _show(args, out)
        return ExitCode.OK
    Lake(args.lake)  # a lake that is not there is not made by looking after it
    with held(args.lake):
        lake = Lake(args.lake)
        lake.repair()
        if args.do == "vacuum":
            from upper.apps.lake.care import vacuum

            with out.progress("looking for files that nobody needs"):
                gone = vacuum(lake, hours=ceil(args.keep / 3600))  # Delta counts hours
            out.show({"files": len(gone)}, text=f"{len(gone)} files removed")
        else:
            _work(args, lake, out)
    return ExitCode.OK


def _show(args: Namespace, out: Output) -> None:
    from upper.apps.lake.home import Lake
    from upper.apps.lake.report import report

    outlook = None
    if args.url:
        from contextlib import closing

        from upper.spark.feed import BucketFeed

        with closing(BucketFeed(args.url, name="upper-lake")) as feed:
            outlook = feed.outlook()
    made = report(Lake(args.lake), outlook)
    if out.as_json:
        out.show(made)
        return
    ahead = "" if made.behind is None else f", {made.behind:,} changes behind the bucket"
    out.say(f"bucket {made.bucket!r}, {made.partitions} partitions in {made.groups} groups{ahead}")
    out.say(f"position: {made.seqnos:,} changes of the bucket's history")
    out.show(made.tables)
    if made.trimmed:
        out.say(f"changes are trimmed in {made.trimmed} partitions")
    if made.rollbacks:
        out.say(f"{made.rollbacks:,} rollbacks of partitions; what they took back is in `lost`:")
        nothing = "nothing: no change of the lake was lost"
        if args.rollbacks:
            out.show(made.lost, empty=nothing)
        else:
            out.show(made.losses, empty=nothing)


def _work(args: Namespace, lake: object, out: Output) -> None:
    from datetime import UTC, datetime, timedelta

    from upper.apps.lake.care import compact, trim
    from upper.apps.lake.home import Lake
    from upper.cli.progress import share_done
    from upper.spark.session import SparkRunner, start, stop

    assert isinstance(lake, Lake)
    with share_done(out, "merging files" if args.do == "compact" else "forgetting changes") as watch:
        session = start(app=f"upper lake {args.do}", master=args.master)
        try:
            runner = SparkRunner(session, watch=watch)
            if args.do == "compact":
                count = compact(lake, runner)
            else:
                count = trim(lake, runner, older_than=datetime.now(UTC) - timedelta(seconds=args.older_than))
        finally:
            stop(session)
    if args.do == "compact":
        out.show({"files": count}, text=f"{count} files fewer")
    else:
        out.show({"rows": count}, text=f"{count:,} changes forgotten")

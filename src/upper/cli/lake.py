"""Show a lake, or maintain one while no sync runs. A sync maintains its lake by itself.

show (the default) prints the tables, their positions and the rollbacks; with --url also how far the bucket
is ahead. compact merges small files, vacuum removes files that no table needs any more, trim removes old
changes. erase KEY removes a key from all tables, from their older versions and from the disk.

types lists the typed tables of a lake, which `upper sync --types FILE` makes; types infer proposes such a
file from the data, and types drop NAME removes a table. The next sync removes its files.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from math import ceil
from typing import TYPE_CHECKING

from upper.cli.common import add_credentials, add_lake, agreed, lake_of, url_of
from upper.cli.durations import seconds
from upper.cli.output import ExitCode, Output
from upper.cli.workers import add_workers, worker_settings
from upper.errors import InvalidArguments

if TYPE_CHECKING:
    from upper.apps.lake.lake import Lake

EXAMPLES = """
upper lake ./lake
upper lake ./lake --url upr://127.0.0.1:11210/default
upper lake ./lake compact
upper lake ./lake trim --older-than 30d --local
upper lake ./lake vacuum --keep 7d
upper lake ./lake erase user:17 --yes --local
upper lake ./lake types infer > types.yml
upper lake ./lake types
"""
DO = ("show", "compact", "vacuum", "trim", "erase", "types")


def add_arguments(parser: ArgumentParser) -> None:
    add_lake(parser)
    parser.add_argument("do", metavar="|".join(DO), nargs="?", default="show", choices=DO)
    parser.add_argument(
        "words", metavar="WORD", nargs="*", help="erase: KEY; types: nothing, infer, or drop NAME"
    )
    parser.add_argument("--url", metavar="URL", help="show how far this bucket is ahead of the lake")
    add_credentials(parser)
    parser.add_argument(
        "--rollbacks", action="store_true", help="show: each partition that went back, not only how many"
    )
    parser.add_argument(
        "--older-than",
        type=seconds,
        default=seconds("30d"),
        metavar="TIME",
        help="trim: remove changes that are older than this (default 30d)",
    )
    parser.add_argument(
        "--keep",
        type=seconds,
        default=seconds("7d"),
        metavar="TIME",
        help="vacuum: keep replaced files this long, for readers of older versions (default 7d)",
    )
    add_workers(parser)
    parser.add_argument("--yes", action="store_true", help="erase, trim, types drop: do not ask")
    parser.add_argument("--live", action="store_true", help="erase: also a key that the bucket still has")


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.apps.lake.lake import Lake, held

    if args.do == "types":
        from upper.cli.lake_types import run_types

        run_types(lake_of(args), args.words, out, yes=args.yes)
        return ExitCode.OK
    if len(args.words) != (args.do == "erase"):
        raise InvalidArguments("erase takes one key, the other commands none; see `upper lake --help`")
    if args.do == "show":
        _show(args, out)
        return ExitCode.OK
    store = lake_of(args)
    Lake(store)  # the lock below would create the directory
    if args.do == "erase" and not args.yes and not _confirmed(args.words[0]):
        raise InvalidArguments("nothing was erased; answer `yes`, or use --yes")
    if args.do == "trim" and not args.yes:
        days = f"{args.older_than / 86400:g} days"
        question = (
            f"Remove changes that are older than {days}? They cannot be queried or restored afterwards."
        )
        if not agreed(out, question, unattended=True):
            raise InvalidArguments("nothing was removed; keep more with --older-than, or add --yes")
    with held(store):
        lake = Lake(store)
        lake.repair()
        if args.do == "vacuum":
            from upper.apps.lake.maintenance import vacuum

            with out.progress("removing files that no table needs"):
                gone = vacuum(lake, hours=ceil(args.keep / 3600))  # Delta counts hours
            out.show({"files": len(gone)}, text=f"{len(gone)} files removed")
        else:
            _work(args, lake, out)
    return ExitCode.OK


def _confirmed(key: str) -> bool:
    sys.stderr.write(
        f"Erase every version of {key!r} from the lake? Older versions of its tables cannot be read "
        "afterwards. Type yes: "
    )
    sys.stderr.flush()
    return sys.stdin.readline().strip() == "yes"


def _show(args: Namespace, out: Output) -> None:
    from upper.apps.lake.lake import Lake
    from upper.apps.lake.report import report

    bucket_state = None
    if args.url:
        from contextlib import closing

        from upper.pipeline.source import BucketSource

        with closing(BucketSource(url_of(args), name="upper-lake")) as source:
            bucket_state = source.bucket_state()
    made = report(Lake(lake_of(args)), bucket_state)
    if out.as_json:
        out.show(made)
        return
    ahead = "" if made.behind is None else f", {made.behind:,} changes behind the bucket"
    origin = "made by `upper import`" if made.imported else f"bucket {made.bucket!r}"
    out.print_line(f"{origin}, {made.partitions} partitions in {made.groups} groups{ahead}")
    whose = "its own" if made.imported else "the bucket's"
    out.print_line(f"position: {made.seqnos:,} changes of {whose} history")
    out.show(made.tables)
    if made.trimmed:
        out.print_line(f"changes are trimmed in {made.trimmed} partitions")
    if made.rollbacks:
        out.print_line(f"{made.rollbacks:,} rollbacks of partitions; what they took back is in `lost`:")
        nothing = "nothing: no change of the lake was lost"
        if args.rollbacks:
            out.show(made.lost, empty=nothing)
        else:
            out.show(made.losses, empty=nothing)


def _work(args: Namespace, lake: Lake, out: Output) -> None:
    from datetime import UTC, datetime, timedelta

    from upper.apps.lake.erase import erase
    from upper.apps.lake.maintenance import compact, trim
    from upper.cli.progress import share_done
    from upper.spark.workers import workers

    what = {"compact": "merging files", "trim": "removing changes", "erase": "erasing"}[args.do]
    with share_done(out, what) as watch, workers(f"upper lake {args.do}", worker_settings(args)) as make:
        runner = make(watch=watch)
        if args.do == "compact":
            count = compact(lake, runner)
            shown: object = {"files": count}
            text = f"{count} files merged"
        elif args.do == "trim":
            count = trim(lake, runner, older_than=datetime.now(UTC) - timedelta(seconds=args.older_than))
            shown, text = {"rows": count}, f"{count:,} changes removed"
        else:
            done = erase(lake, runner, args.words[0].encode(errors="surrogateescape"), live=args.live)
            shown = done
            text = (
                f"erased: {done.files_rewritten} files rewritten without the key, {done.files_removed} "
                "old files removed; copies, backups and snapshots of the disk are not touched"
            )
    out.show(shown, text=text)

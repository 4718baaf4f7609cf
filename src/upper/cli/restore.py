"""Bring a bucket to a commit of a lake: every live item, with CAS, revision, flags, expiry and data type.

The bucket must be empty, or hold only items of that commit: an interrupted restore continues when it is
started again. --merge adds to any bucket and keeps the newer version of each item; --overwrite makes the
bucket equal to the commit, which deletes other items. --dry-run counts and writes nothing. Locks are not
restored, and items whose time to live has passed are left out. The number of partitions may differ.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from upper.cli.common import add_bucket, add_lake, agreed, as_typed, lake_of, number, url_of
from upper.cli.durations import moment
from upper.cli.output import ExitCode, Output
from upper.cli.workers import add_workers, worker_settings
from upper.errors import InvalidArguments

EXAMPLES = """
upper restore ./lake upr://127.0.0.1:11210/default
upper restore ./lake upr://127.0.0.1:11210/default --commit 12 --dry-run
upper restore ./lake upr://127.0.0.1:11210/default --at 2026-01-31T12:00 --prefix user: --overwrite
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_lake(parser)
    add_bucket(parser)
    point = parser.add_mutually_exclusive_group()
    point.add_argument(
        "--commit", type=number(1, 2**48), metavar="N", help="restore commit N (default: the newest)"
    )
    point.add_argument(
        "--at",
        type=moment,
        metavar="TIME",
        help="restore the newest commit up to this time, as 2026-01-31T12:00 (local) or with +00:00",
    )
    parser.add_argument("--prefix", default="", metavar="TEXT", help="only keys that begin with TEXT")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--merge", action="store_true", help="into any bucket; the newer version of an item stays"
    )
    how.add_argument("--overwrite", action="store_true", help="make the bucket equal to the commit")
    parser.add_argument("--yes", action="store_true", help="--overwrite: do not ask for confirmation")
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would be written, and write nothing"
    )
    add_workers(parser)


def run(args: Namespace, out: Output) -> ExitCode:
    import time
    from contextlib import closing

    from upper.apps.backup.commits import find, plan
    from upper.apps.backup.restore import Mode, RestoreOptions, restore
    from upper.apps.backup.target import BucketTarget
    from upper.apps.lake.lake import Lake
    from upper.cli.progress import share_done
    from upper.spark.workers import workers

    lake = Lake(lake_of(args))
    commit = find(lake, number=args.commit, at=args.at)
    plan(lake, commit)  # an error comes before Spark starts
    mode: Mode = "merge" if args.merge else "overwrite" if args.overwrite else "empty"
    options = RestoreOptions(mode, as_typed(args.prefix), args.dry_run)
    if args.overwrite and not (args.dry_run or args.yes):
        question = f"Make the bucket equal to commit {commit.number}, and delete items that it does not have?"
        if not agreed(out, question, unattended=True):
            raise InvalidArguments("nothing was changed; see what it would do with --dry-run, or add --yes")
    with closing(BucketTarget(url_of(args))) as target:
        target.items()
        where = workers("upper restore", worker_settings(args))
        with share_done(out, "comparing" if args.dry_run else "restoring") as watch, where as runner:
            began = time.monotonic()
            try:
                done = restore(lake, runner(watch=watch), target, commit, options)
            except KeyboardInterrupt:
                if not args.dry_run:
                    out.note("upper: stopped; what was restored stays, and the same command continues")
                raise
            seconds = time.monotonic() - began
    shown = {"commit": commit.number, "at": commit.at.isoformat(), **vars(done), "seconds": round(seconds, 3)}
    counts = {
        "present": "in the bucket already",
        "newer": "newer in the bucket",
        "replaced": "replaced",
        "deleted": "deleted",
        "expired": "expired since",
    }
    rest = "".join(f", {shown[name]:,} {text}" for name, text in counts.items() if shown[name])
    verb = "would write" if args.dry_run else "wrote"
    out.show(
        shown,
        text=f"commit {commit.number} of {commit.at:%Y-%m-%d %H:%M:%S} UTC: {verb} {done.written:,} of "
        f"{done.items:,} items ({done.bytes / 1e6:,.1f} MB) in {seconds:.1f} s{rest}",
    )
    return ExitCode.OK

"""List, verify or prune the commits of a lake, which are its backups. `upper restore` restores one.

list shows the newest commits and whether each can be restored. verify reads every file with its checksums and
compares the tables with each other, without the node; the exit code is 1 if anything is wrong. prune removes
what only older commits need, while no sync runs: every commit that --keep-days or --keep-commits keeps can
still be restored.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import TYPE_CHECKING

from upper.cli.common import add_lake, agreed, lake_of, number
from upper.cli.output import ExitCode, Output
from upper.cli.workers import add_workers, worker_settings
from upper.errors import InvalidArguments

if TYPE_CHECKING:
    from upper.apps.lake.store import LakeStore

EXAMPLES = """
upper backup list ./lake
upper backup verify ./lake
upper backup prune ./lake --keep-days 30 --keep-commits 10
"""
DO = ("list", "verify", "prune")
VACUUM_HOURS = 2  # replaced files stay this long for readers, as with `upper sync`


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("do", metavar="|".join(DO), choices=DO)
    add_lake(parser)
    parser.add_argument(
        "--limit", type=number(1, 2**31), default=20, metavar="N", help="list: show N commits (20)"
    )
    parser.add_argument(
        "--keep-days", type=_days, metavar="N", help="prune: keep every moment of the last N days"
    )
    parser.add_argument(
        "--keep-commits", type=number(1, 2**31), metavar="N", help="prune: keep the newest N commits"
    )
    parser.add_argument("--yes", action="store_true", help="prune: do not ask for confirmation")
    add_workers(parser)


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.apps.lake.lake import Lake

    if args.do != "prune" and (args.keep_days is not None or args.keep_commits is not None):
        raise InvalidArguments(
            "--keep-days and --keep-commits are options of prune; see `upper backup --help`"
        )
    lake = Lake(lake_of(args))
    if args.do == "list":
        from upper.apps.backup.commits import listed

        with out.progress("reading the log of the lake"):
            found = listed(lake, args.limit)
        out.show(found, empty="no commits; `upper sync` makes them")
        return ExitCode.OK
    if args.do == "verify":
        return _verify(args, lake.root, out)
    return _prune(args, out)


def _verify(args: Namespace, root: LakeStore, out: Output) -> ExitCode:
    from upper.apps.backup.audit import audit
    from upper.apps.lake.lake import Lake
    from upper.cli.progress import share_done
    from upper.spark.workers import workers

    where = workers("upper backup verify", worker_settings(args))
    with share_done(out, "checking") as watch, where as runner:
        found = audit(Lake(root), runner(watch=watch))
    if out.as_json:
        out.show(found)
    else:
        for problem in found.damaged:
            out.print_line(problem)
        for difference in found.differences:
            out.print_line(difference.sentence())
        out.print_line(found.sentence())
    return ExitCode.OK if found.sound else ExitCode.DIFFERENT


def _prune(args: Namespace, out: Output) -> ExitCode:
    from datetime import UTC, datetime

    from upper.apps.backup.retention import Pruned, oldest_kept, prune
    from upper.apps.lake.lake import Lake, held
    from upper.apps.lake.maintenance import vacuum
    from upper.cli.progress import share_done
    from upper.spark.workers import workers

    if args.keep_days is None and args.keep_commits is None:
        raise InvalidArguments("prune needs --keep-days N or --keep-commits N")
    with held(lake_of(args)):
        lake = Lake(lake_of(args))
        lake.repair()
        kept = oldest_kept(lake, now=datetime.now(UTC), days=args.keep_days, count=args.keep_commits)
        if kept is None:
            out.show(Pruned(0), text="nothing to prune: every commit is kept")
            return ExitCode.OK
        oldest = f"commit {kept.number} of {kept.at:%Y-%m-%d %H:%M:%S} UTC"
        question = f"Prune the lake, so that {oldest} is the oldest that can be restored?"
        if not args.yes and not agreed(out, question, unattended=True):
            raise InvalidArguments("nothing was pruned; keep more with --keep-days, or add --yes")
        where = workers("upper backup prune", worker_settings(args))
        with share_done(out, "pruning") as watch, where as runner:
            done = prune(lake, runner(watch=watch), kept)
        gone = vacuum(lake, hours=VACUUM_HOURS)
    text = "nothing to remove: no row is needed by older commits alone"
    if done.rows:
        text = (
            f"{done.rows:,} rows removed from {done.files} files, {len(gone)} old files deleted; {oldest} is "
            f"the oldest that stays; earlier ones can be restored until the files that were replaced now are "
            f"deleted, by a sync or a prune in {VACUUM_HOURS} hours"
        )
    out.show(done, text=text)
    return ExitCode.OK


def _days(text: str) -> float:
    try:
        days = float(text.removesuffix("d"))
    except ValueError:
        days = -1.0
    if not 0 <= days < 36500:
        raise ArgumentTypeError(f"{text!r} is not a number of days")
    return days

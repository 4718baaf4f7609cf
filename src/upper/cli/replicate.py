"""Replicate a bucket to another one, in one direction or in both.

Changes are written with their revision, CAS, flags and expiration; deletions and expirations are carried over
as such. Of two versions of a key the one with the higher revision wins, then the higher CAS; with --conflicts
lww the one that was written last. Positions are stored in the target, so a replication that was stopped
continues where it ended. When the source loses changes in a failover, the keys that they reached in the
target are brought back to the state of the source. Without --once it follows until Ctrl-C or SIGTERM.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from upper.cli.common import url_of
from upper.cli.following import add_following, add_metrics, progress_line, push_settings, run_until_stopped
from upper.cli.output import ExitCode, Output
from upper.cli.workers import add_workers, worker_settings

EXAMPLES = """
upper replicate upr://127.0.0.1:11210 upr://127.0.0.1:11310 --once --local
upper replicate upr://127.0.0.1:11210 upr://127.0.0.1:11310 --both-ways --once --local --name pair
upper replicate upr://127.0.0.1:11210 upr://127.0.0.1:11310 --status
"""


def add_arguments(parser: ArgumentParser) -> None:
    url = "upr://[USER@]HOST[:PORT][,HOST...][/BUCKET]"
    parser.add_argument("source", metavar="SOURCE", help=f"the bucket that is read: {url}")
    parser.add_argument("target", metavar="TARGET", help="the bucket that is written")
    for side in ("source", "target"):
        parser.add_argument(
            f"--{side}-password-file",
            type=Path,
            metavar="FILE",
            help=f"read the password of {side.upper()} from the first line of FILE (UPPER_PASSWORD)",
        )
    parser.add_argument("--both-ways", action="store_true", help="replicate TARGET to SOURCE as well")
    parser.add_argument(
        "--conflicts",
        choices=("revision", "lww"),
        default="revision",
        help="which version of a key wins: the one with more updates, or the one written last (revision)",
    )
    how = add_following(parser, "the bucket of SOURCE")
    how.add_argument("--status", action="store_true", help="print the lag and the state, and end")
    how.add_argument("--pause", action="store_true", help="let the running replication pause, and end")
    how.add_argument("--resume", action="store_true", help="let it continue, and end")
    add_metrics(parser)
    add_workers(parser)


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.apps.push.follow import Follow
    from upper.apps.replicate.replicate import BucketPair, ReplicationSettings
    from upper.spark.workers import workers

    source = url_of(Namespace(url=args.source, user=None, password_file=args.source_password_file))
    target = url_of(Namespace(url=args.target, user=None, password_file=args.target_password_file))
    settings = ReplicationSettings(
        name=args.name,
        prefix=args.prefix,
        conflicts=args.conflicts,
        both_ways=args.both_ways,
        new_history=args.new_history,
    )
    with BucketPair(source, target, settings) as replication:
        if args.pause or args.resume:
            replication.pause(args.pause)
        if args.status or args.pause or args.resume:
            out.show(replication.status())
            return ExitCode.OK
        with workers("upper replicate", worker_settings(args)) as make:
            following = Follow(
                replication.pushes(make()),
                push_settings(args),
                report=progress_line(out),
                paused=replication.paused,
            )
            run_until_stopped(following, out, once=args.once)
    return ExitCode.OK

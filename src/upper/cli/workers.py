"""Arguments for where the tasks of a verb run."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from upper.spark.workers import WorkerSettings


def add_workers(parser: ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--master",
        default="local[*]",
        metavar="MASTER",
        help="where Spark works: local[*] or spark://HOST:PORT",
    )
    where.add_argument(
        "--local", action="store_true", help="work in this process, without Spark: for small buckets"
    )


def worker_settings(args: Namespace) -> WorkerSettings:
    from upper.spark.workers import WorkerSettings

    return WorkerSettings(local=args.local, master=args.master)

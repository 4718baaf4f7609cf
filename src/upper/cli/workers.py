"""Arguments for where the tasks of a verb run."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from upper.cli.common import lake_of
from upper.cli.output import Output

if TYPE_CHECKING:
    from upper.apps.lake.lake import Lake
    from upper.pipeline.target import Runner
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


@contextmanager
def working(args: Namespace, out: Output, verb: str, what: str) -> Iterator[tuple[Lake, Runner]]:
    """The lake of the arguments, held, and workers for it; raises DirectoryInUse while a sync runs."""
    from upper.apps.lake.lake import Lake, held
    from upper.cli.progress import share_done
    from upper.spark.workers import workers

    store = lake_of(args)
    with held(store), share_done(out, what) as watch:
        lake = Lake(store)
        lake.repair()
        with workers(verb, worker_settings(args)) as make:
            yield lake, make(watch=watch)

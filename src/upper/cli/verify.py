"""Compare a lake with its bucket, and its tables with each other.

A checksum per partition, computed on Spark, or with --local in this process, compares the bucket at the
position of LAKE/latest with that table, and LAKE/latest with LAKE/changes. Differences are printed; the exit
code is then 1.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from upper.cli.common import add_bucket, add_lake, lake_of, url_of
from upper.cli.output import ExitCode, Output
from upper.cli.workers import add_workers, worker_settings

EXAMPLES = """
upper verify upr://127.0.0.1:11210/default ./lake
upper verify upr://127.0.0.1:11210/default ./lake --local --json
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_bucket(parser)
    add_lake(parser)
    add_workers(parser)


def run(args: Namespace, out: Output) -> ExitCode:
    from contextlib import closing

    from upper.apps.lake.lake import Lake
    from upper.apps.lake.verify import verify
    from upper.cli.progress import share_done
    from upper.pipeline.source import BucketSource
    from upper.spark.workers import workers

    lake = Lake(lake_of(args))
    with closing(BucketSource(url_of(args), name="upper-verify")) as source:
        lake.agrees_with(source.bucket.address.bucket, source.bucket.partitions)
        where = workers("upper verify", worker_settings(args))
        with share_done(out, "comparing") as watch, where as runner:
            verdict = verify(lake, source, runner(watch=watch))
    if out.as_json:
        out.show(verdict)
    else:
        for difference in verdict.differences:
            out.print_line(difference.sentence())
        out.print_line(verdict.sentence())
    return ExitCode.DIFFERENT if verdict.differences else ExitCode.OK

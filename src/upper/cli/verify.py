"""Prove that a lake is true: compare it with the bucket it follows, and with itself.

The bucket at the position of LAKE/latest against LAKE/latest, and that against LAKE/changes, by a checksum
a partition, computed on Spark. Partitions and keys that differ are printed, and the exit code is 1.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from upper.cli.output import ExitCode, Output

EXAMPLES = """
upper verify upr://127.0.0.1:11210/default ./lake
upper verify upr://127.0.0.1:11210/default ./lake --json
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the bucket, as upr://HOST:PORT/BUCKET")
    parser.add_argument("lake", metavar="LAKE", type=Path, help="the directory of the lake")
    parser.add_argument(
        "--master",
        default="local[*]",
        metavar="MASTER",
        help="where Spark works: local[*] or spark://HOST:PORT",
    )


def run(args: Namespace, out: Output) -> ExitCode:
    from contextlib import closing

    from upper.apps.lake.home import Lake
    from upper.apps.lake.verify import verify
    from upper.cli.progress import share_done
    from upper.spark.feed import BucketFeed
    from upper.spark.session import SparkRunner, start, stop

    lake = Lake(args.lake)
    with closing(BucketFeed(args.url, name="upper-verify")) as feed:
        lake.agrees_with(feed.bucket.address.bucket, feed.bucket.partitions)
        with share_done(out, "comparing") as watch:
            session = start(app="upper verify", master=args.master)
            try:
                verdict = verify(lake, feed, SparkRunner(session, watch=watch))
            finally:
                stop(session)
    if out.as_json:
        out.show(verdict)
    else:
        for difference in verdict.differences:
            keys = ", ".join(map(repr, difference.keys))
            out.say(f"partition {difference.partition}: {difference.what}{f': {keys}' if keys else ''}")
        out.say(verdict.sentence())
    return ExitCode.DIFFERENT if verdict.differences else ExitCode.OK

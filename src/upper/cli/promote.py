"""Record a history branch by hand, as a failover would: for drills.

With --to the partition first goes back to the newest point at or below that seqno that storage can rebuild,
as after a failover to a replica that lagged behind. Changes past it are gone; consumers must roll back.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from upper.cli.output import ExitCode, Output
from upper.cli.reaching import add_url, number, partitions, reach

EXAMPLES = """
upper promote upr://127.0.0.1:11210/default -p 7
upper promote upr://127.0.0.1:11210/default -p 7 --to 1000
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("-p", "--partitions", type=partitions, required=True, metavar="N", help="which ones")
    parser.add_argument("--to", type=number(0, 2**48 - 1), metavar="SEQNO", help="go back to here, or before")


def run(args: Namespace, out: Output) -> ExitCode:
    with reach(args, "upper promote") as bucket:
        before = bucket.seqnos()
        made = [bucket.promote(partition, to=args.to) for partition in out.each("promoting", args.partitions)]
    out.show(
        [
            {
                "partition": branch.partition,
                "branch": str(branch.log.branch),
                "seqno": branch.seqno,
                "was_at": before.get(branch.partition),
                "lost": max(0, before.get(branch.partition, branch.seqno) - branch.seqno),
            }
            for branch in made
        ]
    )
    return ExitCode.OK

"""Print failover logs: the branches of a history, newest first, with the seqno at which each began."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from upper.cli.common import add_url, partitions, reach
from upper.cli.output import ExitCode, Output

EXAMPLES = """
upper failover-log upr://127.0.0.1:11210/default
upper failover-log upr://127.0.0.1:11210/default -p 0-3 --json
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument(
        "-p", "--partitions", type=partitions, metavar="N", help="some, such as 0-15,99 (all)"
    )


def run(args: Namespace, out: Output) -> ExitCode:
    with reach(args, "upper failover-log") as bucket:
        logs = bucket.failover_logs(args.partitions)
    rows = [
        {"partition": partition, "branch": str(version.branch), "seqno": version.seqno, "newest": index == 0}
        for partition, log in logs.items()
        for index, version in enumerate(log)
    ]
    out.show(rows)
    return ExitCode.OK

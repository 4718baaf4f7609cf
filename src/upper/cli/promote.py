"""Record a history branch by hand, as a failover would: for drills.

With --to the partition first goes back to the newest point at or below that seqno that storage can rebuild,
as after a failover to a replica that lagged behind. Changes past it are gone; consumers must roll back. Where
it would go back further than --to, the command asks first. --dry-run shows where it would go.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping

from upper.cli.common import add_url, agreed, number, partitions, reach
from upper.cli.output import ExitCode, Output

EXAMPLES = """
upper promote upr://127.0.0.1:11210/default -p 7
upper promote upr://127.0.0.1:11210/default -p 7 --to 1000 --dry-run
upper promote upr://127.0.0.1:11210/default -p 7 --to 1000 --yes
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument(
        "-p",
        "--partitions",
        type=partitions,
        required=True,
        metavar="N",
        help="partitions, such as 7 or 0-15",
    )
    parser.add_argument(
        "--to", type=number(0, 2**48 - 1), metavar="SEQNO", help="go back to this seqno, or an earlier one"
    )
    parser.add_argument("--dry-run", action="store_true", help="show where it would go, and change nothing")
    parser.add_argument("--yes", action="store_true", help="go back further than --to without asking")


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.errors import InvalidArguments

    with reach(args, "upper promote") as bucket:
        before = {int(partition): int(seqno) for partition, seqno in bucket.seqnos().items()}
        if args.dry_run or (args.to is not None and not args.yes):
            plan = {
                partition: int(bucket.plan_promotion(partition, to=args.to))
                for partition in out.each("planning", args.partitions)
            }
            if args.dry_run:
                out.show([_row(partition, seqno, before) for partition, seqno in plan.items()])
                return ExitCode.OK
            further = {p: at for p, at in plan.items() if at < min(args.to, before.get(p, args.to))}
            if further and not _confirmed(further, args.to, before, out):
                raise InvalidArguments("nothing was changed; choose another --to, or add --yes")
        rows = []
        for partition in out.each("promoting", args.partitions):
            made = bucket.promote(partition, to=args.to)
            rows.append(_row(partition, made.seqno, before, branch=str(made.log.branch)))
    out.show(rows)
    return ExitCode.OK


def _row(partition: int, seqno: int, before: Mapping[int, int], **more: object) -> dict[str, object]:
    high = before.get(partition)
    lost = 0 if high is None else max(0, high - seqno)
    return {"partition": partition, **more, "seqno": seqno, "was_at": high, "lost": lost}


def _confirmed(further: Mapping[int, int], to: int, before: Mapping[int, int], out: Output) -> bool:
    """Name the partitions that would go back further than requested, and ask on a terminal."""
    for partition, at in further.items():
        high = before.get(partition, to)
        out.note(
            f"partition {partition}: no complete snapshot between {at} and {to} can be rebuilt; "
            f"it would go back from {high} to {at}, and lose {high - at} changes"
        )
    return agreed(out, "go back further than --to?")

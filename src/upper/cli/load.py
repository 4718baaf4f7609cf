"""Write many items quickly, and print throughput and latency.

Every item is written once; --updates and --deletes then change items that a pattern selects. The same seed
writes the same items. Values are random hexadecimal text. The rate is that of this client, one Python process
on the same machine: `make bench` measures the node with a faster one, and its numbers are higher.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import TYPE_CHECKING

from upper.cli import interrupts
from upper.cli.common import add_url, number, reach
from upper.cli.durations import whole_seconds
from upper.cli.output import ExitCode, Output

if TYPE_CHECKING:
    from upper.cli.load_generator import LoadResult

EXAMPLES = """
upper load upr://127.0.0.1:11210/default --items 100000
upper load upr://127.0.0.1:11210/default --items 10000 --updates 50000 --pattern zipf
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument(
        "--items", type=_count, default=100_000, metavar="N", help="how many items (%(default)s)"
    )
    parser.add_argument(
        "--value-size", type=_count, default=100, metavar="BYTES", help="size of each value (%(default)s)"
    )
    parser.add_argument(
        "--updates",
        type=_count,
        default=0,
        metavar="N",
        help="how many writes of existing items (%(default)s)",
    )
    parser.add_argument(
        "--deletes",
        type=_share,
        default=0.0,
        metavar="P",
        help="share of the items to delete, such as 0.1 or 10%% (0)",
    )
    parser.add_argument(
        "--pattern",
        choices=("uniform", "zipf"),
        default="uniform",
        help="which items are updated and deleted (%(default)s)",
    )
    parser.add_argument(
        "--connections", type=_some, default=4, metavar="C", help="connections to each node (%(default)s)"
    )
    parser.add_argument(
        "--depth",
        type=_some,
        default=100,
        metavar="N",
        help="requests in flight on each connection (%(default)s)",
    )
    parser.add_argument(
        "--key-prefix", default="key:", metavar="TEXT", help="prefix of the keys (%(default)s)"
    )
    parser.add_argument(
        "--expiry",
        type=whole_seconds(2**32 - 1),
        default=0,
        metavar="TIME",
        help="how long every item exists (for ever)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="seed of the random numbers (%(default)s)"
    )


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.cli.load_generator import LoadResult, LoadSettings, load
    from upper.errors import Unreachable

    settings = LoadSettings(
        items=args.items,
        value_size=args.value_size,
        updates=args.updates,
        deletes=args.deletes,
        pattern=args.pattern,
        connections=args.connections,
        depth=args.depth,
        seed=args.seed,
        key_prefix=args.key_prefix,
        expiry=args.expiry,
    )
    total = args.items + args.updates + round(args.items * args.deletes)
    result, code = LoadResult(), ExitCode.OK
    try:
        with reach(args, "upper load") as bucket, out.progress("loading", total) as progress:
            load(bucket, settings, progress.advance, result)
    except (KeyboardInterrupt, Unreachable) as error:
        if not (done := result.sets + result.deletes):
            raise
        if stopped := isinstance(error, KeyboardInterrupt):
            interrupts.handled()
        code = ExitCode.INTERRUPTED if stopped else ExitCode.UNREACHABLE
        out.note(
            f"upper: {'interrupted' if stopped else error}; {done:,} of {total:,} operations are confirmed, "
            f"and up to {settings.depth * settings.connections:,} more on each node may have been written"
        )
    _show(result, out)
    return code


def _show(result: LoadResult, out: Output) -> None:
    done, seconds = result.sets + result.deletes, max(result.seconds, 1e-9)
    table = [
        {
            "operation": operation,
            "count": spread.count,
            **{
                f"{name}_ms": round(spread.at(share) * 1000, 2)
                for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))
            },
        }
        for operation, spread in result.latency.items()
        if spread.count
    ]
    summary = {
        "operations": done,
        "seconds": round(seconds, 3),
        "per_second": round(done / seconds),
        "megabytes_per_second": round(result.bytes_sent / seconds / 1e6, 1),
        "deletes_of_missing": result.missing,
        "latency": table,
    }
    text = f"{done:,} operations in {seconds:.2f} s: {done / seconds:,.0f} a second"
    out.show(summary, text=f"{text}, {summary['megabytes_per_second']} MB/s")
    if not out.as_json:
        out.show(table)


def _count(text: str) -> int:
    return number(0, 2**48)(text.replace("_", ""))


def _some(text: str) -> int:
    return number(1, 2**16)(text)


def _share(text: str) -> float:
    try:
        share = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ArgumentTypeError(f"{text} is not a share; give a number from 0 to 1, or a percentage")
    return share

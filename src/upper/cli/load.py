"""Write a lot of items, quickly, and show how long it took: something to follow, query and measure.

Every item is written once; --updates and --deletes then change items that a pattern chooses. The same seed
writes the same items. Values are text without meaning.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace

from upper.cli.output import ExitCode, Output
from upper.cli.reaching import add_url, number, reach

EXAMPLES = """
upper load upr://127.0.0.1:11210/default --items 100000
upper load upr://127.0.0.1:11210/default --items 10000 --updates 50000 --pattern zipf --deletes 0.1 --seed 7
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("--items", type=_count, default=100_000, metavar="N", help="how many (%(default)s)")
    parser.add_argument(
        "--value-size", type=_count, default=100, metavar="BYTES", help="of each value (%(default)s)"
    )
    parser.add_argument(
        "--updates", type=_count, default=0, metavar="N", help="writes of items that are there"
    )
    parser.add_argument(
        "--deletes", type=_share, default=0.0, metavar="P", help="share of the items, 0.1 or 10%%"
    )
    parser.add_argument(
        "--pattern", choices=("uniform", "zipf"), default="uniform", help="which items change (%(default)s)"
    )
    parser.add_argument("--connections", type=_some, default=4, metavar="C", help="a node (%(default)s)")
    parser.add_argument(
        "--depth", type=_some, default=100, metavar="N", help="requests under way on each (%(default)s)"
    )
    parser.add_argument("--key-prefix", default="key:", metavar="TEXT", help="how keys begin (%(default)s)")
    parser.add_argument(
        "--expiry", type=number(0, 2**32 - 1), default=0, metavar="SECONDS", help="of every item"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="the same items again (%(default)s)")


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.client.load import LoadSettings, load

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
    with reach(args, "upper load") as bucket, out.progress("loading", total) as progress:
        result = load(bucket, settings, progress.advance)
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
    return ExitCode.OK


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

"""Search an index of a lake: the best hits first, each with its score and the fields of the index.

A query has words, which are searched in all --text paths of the index, "phrases", path:word, AND, OR, NOT or
-word, city:Oslo for fields, and price:[10 TO 20] or price:>10 for numbers. All words must be there, unless OR
joins them.

--after TOKEN waits until the index has a write, and never answers from before it: `upper set --token` prints
a token. If a rollback took the write back, the search ends with an error instead of waiting.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import ExitStack, closing

from upper.cli.common import add_credentials, add_lake, lake_of, number, url_of
from upper.cli.durations import seconds
from upper.cli.output import ExitCode, Output

EXAMPLES = """
upper search ./lake articles 'old sea'
upper search ./lake articles 'title:"old man" AND city:Oslo' --limit 3
upper search ./lake articles 'price:[10 TO 20] -sea' --json
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_lake(parser)
    parser.add_argument("name", metavar="NAME", help="the name of the index")
    parser.add_argument("query", metavar="QUERY", help="what to search for")
    parser.add_argument("--limit", type=number(1, 10_000), default=10, metavar="N", help="hits to show (10)")
    parser.add_argument(
        "--after",
        action="append",
        default=[],
        metavar="TOKEN",
        help="wait until the index has this write; may be repeated",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=30.0, metavar="TIME", help="wait at most this long (30s)"
    )
    parser.add_argument("--url", metavar="URL", help="ask this bucket whether a write was taken back")
    add_credentials(parser)


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.apps.index.search import search

    with ExitStack() as stack:
        bucket_state = None
        if args.url and args.after:
            from upper.pipeline.source import BucketSource

            source = stack.enter_context(closing(BucketSource(url_of(args), name="upper-search")))
            bucket_state = source.bucket_state
        found = search(
            lake_of(args),
            args.name,
            args.query,
            limit=args.limit,
            after=args.after,
            timeout=args.timeout,
            bucket_state=bucket_state,
        )
    rows = [{"key": hit.key, "score": round(hit.score, 4), **hit.fields} for hit in found.hits]
    if out.as_json:
        out.show({"total": found.total, "hits": rows})
        return ExitCode.OK
    out.show(rows, empty="no hits")
    if found.total > len(rows):
        out.say(f"{found.total:,} hits; --limit shows more")
    return ExitCode.OK

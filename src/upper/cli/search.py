"""Search an index of a lake: the best hits first, each with its score and the fields of the index.

A query has words, which are searched in all --text paths of the index, "phrases", path:word, AND, OR, NOT or
-word, city:Oslo for fields, and price:[10 TO 20] or price:>10 for numbers. All words are required, unless OR
joins them.

--after TOKEN waits until the index has a write, and never returns an older state: `upper set --token` prints
a token. If a rollback took the write back, the search ends with an error instead of waiting.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from upper.cli.common import add_lake, lake_of, number
from upper.cli.output import ExitCode, Output
from upper.cli.waiting import add_after, after

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
    add_after(parser, "index")


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.apps.index.search import search

    with after(args, "upper-search") as waiting:
        found = search(
            lake_of(args),
            args.name,
            args.query,
            limit=args.limit,
            **waiting,
        )
    rows = [{"key": hit.key, "score": round(hit.score, 4), **hit.fields} for hit in found.hits]
    if out.as_json:
        out.show({"total": found.total, "hits": rows})
        return ExitCode.OK
    out.show(rows, empty="no hits")
    if found.total > len(rows):
        out.print_line(f"{found.total:,} hits; --limit shows more")
    return ExitCode.OK

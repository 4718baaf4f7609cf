"""The reference page of statistics and of stream settings, made from the tables that the node uses.

`python -m upper.server.reference` prints it; a test sees to it that the page in the documentation is this.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from upper.server import stats
from upper.server.controls import ABOUT
from upper.server.stats import Kind


def page() -> str:
    """docs/reference/statistics.md."""
    return "\n".join(_lines()) + "\n"


HEAD = """\
# Statistics

Made from the tables of the node by `python -m upper.server.reference`; change those, not this.

`upper stats URL [GROUP]` shows a group; on the wire it is STAT (0x10) with the group as key. The numbers of
the general group and of `memory` are also Prometheus metrics at `--metrics-port`, under `upper_NAME`
(counters: `upper_NAME_total`); see [operations](../operations.md).
"""
STREAMS = """\
One row for each field of each connection that follows, named `CONNECTION:FIELD`, and totals: `total:items`
and `total:bytes` of all streams, `total:ended_items` and `total:ended_bytes` of connections that have closed.
The items of all connections and `total:ended_items` add up to `total:items`.
"""
FAILOVERS = """\
`vb_PARTITION:num_entries`, and for each version, newest first, `vb_PARTITION:PLACE:id` (the branch) and
`vb_PARTITION:PLACE:seq` (the seqno at which it began)."""
TIMINGS = """\
For each command that ran: `COMMAND:count`, how often; `COMMAND:total_us`, microseconds in all; `COMMAND:Nus`,
how many took less than N microseconds and at least half of that. Waiting for the disk is not part of it.

Plain GET, SET, DELETE and NOOP are answered in runs: a stretch of such requests, as they came in one read, is
one `run`, with one time for all of them. Whatever a run leaves to the table (a CAS, an expiration, a lock) is
timed under the name of its command. How many requests there were of each kind, the general statistics say."""


def _lines() -> Iterator[str]:
    yield HEAD
    yield from _table(
        ("group", "what"), ((_code(name) or "(none)", about) for name, about in stats.GROUPS.items())
    )
    for title, rows in (("The node in general", stats.GENERAL), ("memory", stats.MEMORY)):
        yield from _section(title)
        yield from _table(("name", "kind", "what"), ((_code(row.name), row.kind, row.about) for row in rows))
    yield from _section("streams")
    yield STREAMS
    yield from _fields((field.name, field.about) for field in stats.STREAMS)
    yield ""
    yield "`streams CONNECTION` shows every stream of it, named `vb_PARTITION:FIELD`:"
    yield ""
    yield from _fields((name, about) for name, (about, _) in stats.ONE_STREAM.items())
    yield ""
    yield "Of a TAP client, for every partition that it follows:"
    yield ""
    yield from _fields((name, about) for name, (about, _) in stats.TAP_STREAM.items())
    yield from _section("vbucket-details")
    yield "Named `vb_PARTITION:FIELD`."
    yield ""
    yield from _fields((name, about) for name, (about, _) in stats.PARTITION.items())
    yield from _section("failovers")
    yield FAILOVERS
    yield from _section("timings")
    yield TIMINGS
    yield from _section("Metrics of consumers")
    yield "With the labels `connection`, `peer` and `name`:"
    yield ""
    yield from _table(("metric", "kind"), _consumer_metrics())
    yield from _section("Settings of streams")
    yield "What CONTROL (0x5e) may set for the streams that a connection opens afterwards:"
    yield ""
    yield from _fields(ABOUT.items())


def _consumer_metrics() -> Iterator[tuple[str, str]]:
    from upper.server.metrics import NUMERIC

    for name, kind in NUMERIC.items():
        yield f"`upper_consumer_{name}{'_total' if kind is Kind.COUNTER else ''}`", kind
    yield "`upper_command_seconds_bucket`, `..._sum`, `..._count`", "histogram, label `command`"


def _code(name: str) -> str:
    return f"`{name}`" if name else ""


def _fields(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    return _table(("name", "what"), ((_code(name), about) for name, about in rows))


def _section(title: str) -> Iterator[str]:
    yield from ("", f"## {title}", "")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    sys.stdout.write(page())

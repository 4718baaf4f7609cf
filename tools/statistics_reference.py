"""The reference page of statistics and of stream settings, made from the tables that the node uses.

`python -m tools.statistics_reference` prints it; a test keeps docs/reference/statistics.md equal to it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from upper.server import stats, stream_stats
from upper.server.controls import ABOUT
from upper.server.stats import Kind


def page() -> str:
    """docs/reference/statistics.md."""
    return "\n".join(_lines()) + "\n"


HEAD = """\
# Statistics

Written from the tables of the node by `python -m tools.statistics_reference`; edit those instead.

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
timed under the name of its command. The general statistics count the requests of each kind."""


def _lines() -> Iterator[str]:
    yield HEAD
    yield from _table(
        ("group", "what"), ((_code(name) or "(none)", about) for name, about in stats.GROUPS.items())
    )
    for title, rows in (
        ("The node in general", stats.GENERAL),
        ("memory", stats.MEMORY),
        ("disk", stats.DISK),
    ):
        yield from _section(title)
        yield from _table(("name", "kind", "what"), ((_code(row.name), row.kind, row.about) for row in rows))
    yield from _section("streams")
    yield STREAMS
    yield from _fields((field.name, field.about) for field in stream_stats.STREAMS)
    yield ""
    yield "`streams CONNECTION` shows every stream of it, named `vb_PARTITION:FIELD`:"
    yield ""
    yield from _fields((name, about) for name, (about, _) in stream_stats.ONE_STREAM.items())
    yield ""
    yield "Of a TAP client, for every partition that it follows:"
    yield ""
    yield from _fields((name, about) for name, (about, _) in stream_stats.TAP_STREAM.items())
    yield from _section("consumers")
    yield "Named `NUMBER:FIELD`. A consumer that is away is listed for seven days, until the node restarts."
    yield ""
    yield from _fields((name, about) for name, (about, _) in stats.CONSUMERS.items())
    yield "| `at_risk` | 1 if deletions that it lacks are purged, or soon will be |"
    yield from _section("vbucket-details")
    yield "Named `vb_PARTITION:FIELD`."
    yield ""
    yield from _fields((name, about) for name, (about, _) in stats.PARTITION.items())
    yield from _section("replication")
    yield "Named `vb_PARTITION:FIELD`; nothing on a node that is alone."
    yield ""
    yield from _fields((name, about) for name, (about, _) in stats.REPLICATION.items())
    yield "| `lag:NODE` | seqnos on the disk of this node that a replica has not acknowledged |"
    yield from _section("cluster")
    yield "Nothing on a node that is alone. The numbers are also metrics, under `upper_cluster_NAME`."
    yield ""
    known = ((_code(name), kind, about) for name, (kind, about) in stats.CLUSTER.items())
    yield from _table(("name", "kind", "what"), known)
    yield from _section("failovers")
    yield FAILOVERS
    yield from _section("timings")
    yield TIMINGS
    yield from _section("Metrics of consumers")
    yield "With the labels `name`, `dialect` and `user`, which a reconnect does not change:"
    yield ""
    yield from _table(("metric", "kind"), _consumer_metrics())
    yield from _section("Settings of streams")
    yield "What CONTROL (0x5e) may set for the streams that a connection opens afterwards:"
    yield ""
    yield from _fields(ABOUT.items())


def _consumer_metrics() -> Iterator[tuple[str, str]]:
    from upper.server.metrics import NUMERIC

    for name, (kind, _) in NUMERIC.items():
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

"""Show rates, streams, lag and memory of a node, or of all nodes of a cluster, on a live screen.

Leave it with q or Ctrl-C. Numbers are sums over the nodes that answer. If a node is away, the screen shows it
and continues when it is back. If the output is not a terminal that can draw, or with --json, one line is
printed per interval; --count ends it after that many.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from upper.cli.common import add_url, number, reach
from upper.cli.durations import some_seconds
from upper.cli.output import ExitCode, Output, text_of
from upper.errors import Refused, Unreachable

if TYPE_CHECKING:
    from upper.client.bucket import Bucket
    from upper.client.url import NodeAddress

EXAMPLES = """
upper top upr://127.0.0.1:11210/default
upper top upr://127.0.0.1:11210/default --every 5 --count 3 --json
"""
CLUSTER = ("nodes", "nodes_alive", "partitions_in_sync", "partitions_unavailable", "moves")
RATES = ("requests", "changes", "commits", "stream_items", "stream_bytes")
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the alternate screen, without a cursor
GAP = "  "
NARROW = 12  # columns to which a name or a state is cut before another column is left out


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument(
        "--every", type=some_seconds, default=1.0, metavar="TIME", help="interval, as 500ms (1s)"
    )
    parser.add_argument("--count", type=number(1, 2**31), metavar="N", help="stop after N intervals (never)")


def run(args: Namespace, out: Output) -> ExitCode:
    drawn = out.on_screen and not out.as_json and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    with reach(args, "upper top") as bucket, _screen_of(drawn) as (draw, wait):
        for moment in _moments(bucket, args, wait):
            if drawn:
                draw(screen(moment, *get_terminal_size()))
            elif out.as_json or not moment.get("trouble"):
                out.show(moment, text=_line(moment))
            else:
                out.note(f"upper: {moment['trouble']}")
    return ExitCode.OK


@contextmanager
def _screen_of(drawn: bool) -> Iterator[tuple[Callable[[Sequence[str]], None], Callable[[float], bool]]]:
    """Ways to draw lines, and to wait some seconds or until q is pressed."""

    def draw(lines: Sequence[str]) -> None:
        sys.stdout.write("\x1b[H" + "\x1b[K\r\n".join(lines) + "\x1b[K\x1b[J")
        sys.stdout.flush()

    def wait(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while keys and (left := end - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left)[0] and os.read(0, 1) in (b"q", b"Q", b""):
                return True
        time.sleep(max(0.0, end - time.monotonic()))
        return False

    keys = drawn and sys.stdin.isatty()
    if not drawn:
        yield draw, wait
        return
    before = None
    if keys:
        before = termios.tcgetattr(0)
        tty.setcbreak(0)
    sys.stdout.write(ENTER)
    try:
        yield draw, wait
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
        if before is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, before)


def _moments(bucket: Bucket, args: Namespace, wait: Callable[[float], bool]) -> Iterator[dict[str, Any]]:
    """One set of numbers per interval. While no node answers, it has the reason under `trouble`."""
    last: Mapping[NodeAddress, Mapping[str, str]] = {}
    moment: dict[str, Any] = {}
    then, shown = time.monotonic(), 0
    while args.count is None or shown < args.count:
        if (last or moment) and wait(max(0.0, then + args.every - time.monotonic())):
            return
        now = time.monotonic()
        try:
            bucket.learn()  # nodes may have joined
            general = bucket.stats()
            # Counters of a node that was restarted begin again.
            compared = {
                node: (last[node], lines)
                for node, lines in general.items()
                if node in last and all(_number(lines, n) >= _number(last[node], n) for n in RATES)
            }
            moment = _moment(bucket, general, compared, now - then) if compared else moment
            last, then = general, now
            if not compared:
                continue
        except (Unreachable, Refused) as error:
            if isinstance(error, Refused) and not shown:
                raise  # a role is missing: the next answer would be the same
            last, then = {}, now
            moment = {**moment, "trouble": str(error)}
        yield moment
        shown += 1


def _moment(
    bucket: Bucket,
    general: Mapping[NodeAddress, Mapping[str, str]],
    compared: Mapping[NodeAddress, tuple[Mapping[str, str], Mapping[str, str]]],
    seconds: float,
) -> dict[str, Any]:
    """The numbers of now; rates of the nodes that also answered before."""
    total, memory, streams = _sum(general), _sum(bucket.stats("memory")), _streams(bucket)
    rates = {}
    for name in RATES:
        grown = sum(_number(now, name) - _number(before, name) for before, now in compared.values())
        rates[f"{name}_per_second"] = round(grown / max(seconds, 1e-9), 1)
    silent = [str(node) for node in bucket.routes.nodes if node not in general]
    return {
        "nodes": len(general),
        **({"silent_nodes": silent} if silent else {}),
        "items": _number(total, "curr_items"),
        "connections": _number(total, "curr_connections"),
        **rates,
        "memory": _number(memory, "mem_process"),
        "memory_quota": _number(memory, "mem_quota"),
        "lag": sum(int(stream["remaining"]) for stream in streams),
        "cluster": _cluster(bucket),
        "streams": streams,
    }


def _cluster(bucket: Bucket) -> dict[str, int] | None:
    """The cluster as the node with the newest map sees it; None for nodes that are alone."""
    answers = [lines for lines in bucket.stats("cluster").values() if lines]
    if not answers:
        return None
    newest = max(answers, key=lambda lines: _number(lines, "revision"))
    return {name: _number(newest, name) for name in CLUSTER}


def _streams(bucket: Bucket) -> list[dict[str, Any]]:
    """The connections with open streams, then the consumers that are away; the largest lag first in each."""
    found: list[dict[str, Any]] = []
    for node, lines in bucket.stats("streams").items():
        by_number: dict[str, dict[str, str]] = {}
        for name, value in lines.items():
            number, _, of = name.partition(":")
            by_number.setdefault(number, {})[of] = value
        for number, stream in by_number.items():
            if number.isdigit() and stream.get("streams", "0") != "0":
                found.append(
                    {
                        "node": str(node),
                        "name": stream.get("name", ""),
                        "peer": stream.get("peer", ""),
                        "dialect": stream.get("dialect", ""),
                        "streams": int(stream["streams"]),
                        "state": stream.get("state", ""),
                        "items": int(stream.get("items", 0)),
                        "bytes": int(stream.get("bytes", 0)),
                        "remaining": int(stream.get("remaining", 0)),
                    }
                )
    return sorted([*found, *_away(bucket)], key=lambda stream: (not stream["streams"], -stream["remaining"]))


def _away(bucket: Bucket) -> Iterator[dict[str, Any]]:
    """Named consumers that are not connected now, such as a sync between two batches."""
    for node, lines in bucket.stats("consumers").items():
        by_number: dict[str, dict[str, str]] = {}
        for name, value in lines.items():
            number, _, of = name.partition(":")
            by_number.setdefault(number, {})[of] = value
        for consumer in by_number.values():
            if consumer.get("name") and consumer["streams"] == "0":
                yield {
                    "node": str(node),
                    "name": consumer["name"],
                    "peer": "",
                    "dialect": consumer["dialect"],
                    "streams": 0,
                    "state": "away, deletions at risk" if consumer["at_risk"] == "1" else "away",
                    "items": int(consumer["items"]),
                    "bytes": int(consumer["bytes"]),
                    "remaining": int(consumer["lag"]),
                }


def _sum(answers: Mapping[Any, Mapping[str, str]]) -> dict[str, str]:
    """The sum of each number over all nodes; of text, the value of the first node."""
    total: dict[str, str] = {}
    for lines in answers.values():
        for name, value in lines.items():
            before = total.get(name)
            if before is not None and before.isdigit() and value.isdigit():
                value = str(int(before) + int(value))
            total[name] = value if before is None or value.isdigit() else before
    return total


def _number(lines: Mapping[str, str], name: str) -> int:
    text = lines.get(name, "0")
    return int(text) if text.isdigit() else 0


def _line(moment: Mapping[str, Any]) -> str:
    return (
        f"{moment['items']:>10} items  {moment['changes_per_second']:>10,.0f} changes/s  "
        f"{moment['stream_items_per_second']:>10,.0f} streamed/s  {len(moment['streams']):>3} followers  "
        f"lag {moment['lag']:>8}  {moment['memory'] / 2**20:>7.0f} MiB"
    )


def screen(moment: Mapping[str, Any], width: int, height: int) -> list[str]:
    """The lines of the screen: rates above, streams below. Columns that do not fit are left out; no number is
    ever cut."""
    trouble = moment.get("trouble") or ", ".join(moment.get("silent_nodes", ()))
    lines = [cut(f"no answer, trying again: {trouble}", width)] if trouble else []
    if "items" not in moment:
        return [*lines, "q leaves"]
    lines += _in_columns(_facts(moment), width)
    table = _table(moment["streams"], width)
    room = max(0, height - len(lines) - 2)
    return [*lines, "", *table[:room], cut("q leaves", width)][:height]


def _facts(moment: Mapping[str, Any]) -> list[str]:
    quota = f" of {moment['memory_quota'] / 2**20:,.0f}" if moment["memory_quota"] else ""
    cluster = moment.get("cluster")
    facts = [
        f"{cluster['nodes_alive']} of {cluster['nodes']} nodes alive",
        f"{cluster['partitions_in_sync']:,} partitions in sync",
        f"{cluster['partitions_unavailable']:,} unavailable",
        f"{cluster['moves']:,} to move",
    ] if cluster else []  # fmt: skip
    return [
        *facts,
        f"{moment['items']:,} items",
        f"{moment['requests_per_second']:,.0f} requests/s",
        f"{moment['changes_per_second']:,.0f} changes/s",
        f"{moment['commits_per_second']:,.0f} commits/s",
        f"{moment['stream_items_per_second']:,.0f} streamed/s",
        f"{moment['stream_bytes_per_second'] / 2**20:,.1f} MiB/s",
        f"{moment['memory'] / 2**20:,.0f}{quota} MiB",
        f"{moment['connections']:,} connections",
        f"{len(moment['streams']):,} followers",
        f"{moment['lag']:,} behind",
    ]


def _in_columns(cells: Sequence[str], width: int) -> list[str]:
    each = max(map(len, cells)) + len(GAP)
    across = max(1, (width + len(GAP)) // each)
    rows = [cells[at : at + across] for at in range(0, len(cells), across)]
    return ["".join(cell.ljust(each) for cell in row).rstrip() for row in rows]


def _table(streams: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """A row for each connection. What matters least is left out first; names give way before numbers."""
    columns = {
        "name": [text_of(str(stream["name"])) or "-" for stream in streams],
        "behind": [f"{stream['remaining']:,}" for stream in streams],
        "state": [str(stream["state"]) for stream in streams],
        "items": [f"{stream['items']:,}" for stream in streams],
        "MiB": [f"{stream['bytes'] / 2**20:,.1f}" for stream in streams],
        "dialect": [str(stream["dialect"]) for stream in streams],
        "peer": [str(stream["peer"]) for stream in streams],
    }
    widths = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
    shown = list(columns)

    def spare(least: int) -> int:
        """Columns of the terminal that are left over when names and states take at most `least`."""
        texts = {name: min(least, widths[name]) for name in ("name", "state")}
        return width + len(GAP) - sum({**widths, **texts}[name] + len(GAP) for name in shown)

    while len(shown) > 3 and spare(NARROW) < 0:
        shown.pop()
    for name in ("state", "name"):
        over = -spare(width)
        widths[name] -= max(0, min(over, widths[name] - (NARROW if len(shown) > 3 else 4)))

    def row(cells: Mapping[str, str]) -> str:
        return GAP.join(
            cells[name].rjust(widths[name]) if name in ("behind", "items", "MiB")
            else cut(cells[name], widths[name]).ljust(widths[name])
            for name in shown
        ).rstrip()  # fmt: skip

    rows = [{name: columns[name][at] for name in columns} for at in range(len(streams))]
    return [row({name: name for name in columns}), *map(row, rows)]


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"

"""A live screen of a node: rates, streams, lag and memory. Ctrl-C leaves it.

Where nobody looks (or with --json) it prints one line an interval instead; --count ends it by itself.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from upper.cli.output import ExitCode, Output
from upper.cli.reaching import add_url, number, reach, some_seconds

if TYPE_CHECKING:
    from upper.client.bucket import Bucket

EXAMPLES = """
upper top upr://127.0.0.1:11210/default
upper top upr://127.0.0.1:11210/default --every 5 --count 3 --json
"""
RATES = ("requests", "changes", "commits", "stream_items", "stream_bytes")


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument(
        "--every", type=some_seconds, default=1.0, metavar="SECONDS", help="interval (%(default)s)"
    )
    parser.add_argument("--count", type=number(1, 2**31), metavar="N", help="stop after so many")


def run(args: Namespace, out: Output) -> ExitCode:
    with reach(args, "upper top") as bucket:
        if out.as_json or not out.on_screen:
            for moment in _moments(bucket, args):
                out.show(moment, text=_line(moment))
            return ExitCode.OK
        from rich.console import Console
        from rich.live import Live

        console = Console()
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for moment in _moments(bucket, args):
                live.update(_screen(moment, *console.size), refresh=True)
    return ExitCode.OK


def _moments(bucket: Bucket, args: Namespace) -> Any:
    """What there is to see, once an interval."""
    last: Mapping[str, str] | None = None
    then, shown = time.monotonic(), 0
    while args.count is None or shown < args.count:
        if last is not None:
            time.sleep(max(0.0, then + args.every - time.monotonic()))
        now = time.monotonic()
        general = _sum(bucket.stats())
        if last is not None:
            yield _moment(bucket, last, general, now - then)
            shown += 1
        last, then = general, now


def _moment(
    bucket: Bucket, last: Mapping[str, str], general: Mapping[str, str], seconds: float
) -> dict[str, object]:
    memory, streams = _sum(bucket.stats("memory")), _streams(bucket)
    rates = {
        f"{name}_per_second": round((_number(general, name) - _number(last, name)) / max(seconds, 1e-9), 1)
        for name in RATES
    }
    return {
        "nodes": len(bucket.routes.nodes),
        "items": _number(general, "curr_items"),
        "connections": _number(general, "curr_connections"),
        **rates,
        "memory": _number(memory, "mem_process"),
        "memory_quota": _number(memory, "mem_quota"),
        "lag": sum(int(stream["remaining"]) for stream in streams),
        "streams": streams,
    }


def _streams(bucket: Bucket) -> list[dict[str, Any]]:
    """The connections that follow, those that are furthest behind first."""
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
    return sorted(found, key=lambda stream: -int(stream["remaining"]))


def _sum(answers: Mapping[Any, Mapping[str, str]]) -> dict[str, str]:
    """Numbers of several nodes together; of what is no number, the first."""
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


def _screen(moment: Mapping[str, Any], width: int, height: int) -> Any:
    """Rates above, those who follow below; what matters less is left out where there is less room."""
    from rich.box import SIMPLE_HEAD
    from rich.columns import Columns
    from rich.console import Group
    from rich.table import Table

    quota = f" of {moment['memory_quota'] / 2**20:,.0f}" if moment["memory_quota"] else ""
    facts = [
        f"[b]{moment['items']:,}[/b] items",
        f"[b]{moment['requests_per_second']:,.0f}[/b] requests/s",
        f"[b]{moment['changes_per_second']:,.0f}[/b] changes/s",
        f"[b]{moment['commits_per_second']:,.0f}[/b] commits/s",
        f"[b]{moment['stream_items_per_second']:,.0f}[/b] streamed/s",
        f"[b]{moment['stream_bytes_per_second'] / 2**20:,.1f}[/b] MiB/s",
        f"[b]{moment['memory'] / 2**20:,.0f}[/b]{quota} MiB",
        f"[b]{moment['connections']}[/b] connections",
        f"[b]{len(moment['streams'])}[/b] followers",
        f"[b]{moment['lag']:,}[/b] behind",
    ]
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "name": lambda stream: stream["name"] or "-",
        "behind": lambda stream: f"{stream['remaining']:,}",
        "state": lambda stream: stream["state"],
        "items": lambda stream: f"{stream['items']:,}",
        "MiB": lambda stream: f"{stream['bytes'] / 2**20:,.1f}",
        "dialect": lambda stream: stream["dialect"],
        "peer": lambda stream: stream["peer"],
    }
    shown = list(columns)[: 3 if width < 60 else 5 if width < 75 else 7]
    table = Table(box=SIMPLE_HEAD, expand=True, pad_edge=False)
    for name in shown:
        table.add_column(
            name, justify="right" if name in ("behind", "items", "MiB") else "left", no_wrap=True
        )
    room = max(1, height - 3 - -(-len(facts) * 20 // width))
    for stream in moment["streams"][:room]:
        table.add_row(*(columns[name](stream) for name in shown))
    return Group(Columns(facts, padding=(0, 3)), table)

"""The operations of docs/architecture.md, performed by a real node: the calls happen in the listed order.

The node runs in a thread of this process, so that a profiler sees the calls of both sides. It does not see
those into the compiled kernel and into Spark; their lines are left out.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import upper
from upper import kernel
from upper.cli.main import main
from upper.server.listen import Endpoints
from upper.server.node import Node
from upper.server.settings import ServerSettings
from upper.storage import BucketStore

ROOT = Path(__file__).resolve().parents[2]
UNSEEN = ("kernel.", "spark.")


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    loop, started = asyncio.new_event_loop(), threading.Event()
    settings = ServerSettings(port=0)
    bucket = BucketStore.open(tmp_path / "data", partitions=1)  # each step of a partition happens once
    node = Node(bucket, settings, loop, Endpoints.open(settings))

    def serve() -> None:
        loop.run_until_complete(node.start())
        started.set()
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    threading.setprofile(_record)  # the thread of the node has it from its start
    try:
        thread.start()
        assert started.wait(60)
        yield f"upr://127.0.0.1:{node.port}/default"
    finally:
        threading.setprofile(None)
        asyncio.run_coroutine_threadsafe(node.stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


_calls: list[str] | None = None


def _record(frame: FrameType, event: str, _: Any) -> None:
    if event == "call" and _calls is not None:
        _, inside, path = frame.f_code.co_filename.rpartition("/src/upper/")
        if inside:
            _calls.append(f"{path[:-3].replace('/', '.')}.{frame.f_code.co_qualname}")


def calls_of(operation: Callable[[], object]) -> list[str]:
    global _calls
    calls: list[str] = []
    _calls = calls
    sys.setprofile(_record)
    try:
        operation()
    finally:
        sys.setprofile(None)
        _calls = None
    return calls


def listed(title: str) -> list[str]:
    page = (ROOT / "docs" / "architecture.md").read_text()
    _, _, walk = page.partition(f"### {title}:")
    names = re.findall(r"^\d+\. `([\w.]+)`", walk.partition("\n##")[0], re.MULTILINE)
    return [name for name in names if not name.startswith(UNSEEN)]


def assert_in_order(names: list[str], calls: list[str]) -> None:
    assert names
    place = 0
    for name in names:
        found = (i for i in range(place, len(calls)) if f"{calls[i]}.".startswith(f"{name}."))
        after = next(found, None)
        assert after is not None, f"{name} is not called, or before the line above it"
        place = after


@pytest.mark.skipif(kernel.NAME == "plain", reason="the page describes the compiled kernel")
def test_the_calls_of_a_durable_set(url: str) -> None:
    with upper.connect(url) as bucket:
        bucket.set("key", "opens the connections")
        assert_in_order(listed("A durable SET"), calls_of(lambda: bucket.set("key", "value")))


def test_the_calls_of_a_backfill(url: str) -> None:
    with upper.connect(url) as bucket:
        bucket.set_many({f"key:{number}": "v" * 1000 for number in range(20_000)})  # more than half a window
        assert_in_order(listed("A backfill"), calls_of(lambda: list(bucket.changes(until="now"))))


def test_the_calls_of_a_rollback(url: str, tmp_path: Path) -> None:
    checkpoint = upper.Checkpoint(str(tmp_path / "checkpoint.json"))
    with upper.connect(url) as bucket:
        bucket.set("key", "value")
        list(bucket.changes(since=checkpoint, until="now"))
        bucket.promote(bucket.partition_of("key"), to=0)

        def follow() -> None:
            list(bucket.changes(since=checkpoint, until="now", on_rollback=lambda _: None))

        assert_in_order(listed("A rollback of a consumer"), calls_of(follow))


def test_the_calls_of_a_sync(url: str, tmp_path: Path) -> None:
    with upper.connect(url) as bucket:
        bucket.set("key", "value")
    threading.setprofile(_record)
    lake = str(tmp_path / "lake")
    names = listed("A sync")
    names.remove("apps.lake.position.LakePosition.difference")  # the first commit has the whole position
    assert_in_order(names, calls_of(lambda: main(["sync", url, lake, "--local", "--once"])))

"""The programs in examples/, run as their readers would, against real nodes that are stopped and branched."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from examples.audit import AuditLog
from examples.audit import main as audit
from examples.cache import Cache
from examples.cache_asyncio import AsyncCache
from examples.index import Index
from examples.index import main as index
from examples.replica import main as replica

import upper
from tests.nodes import Node
from upper.client.bucket import Bucket

ROOT = Path(__file__).parents[2]


def eventually(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that another thread or process is about to make true."""
    tick = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if true():
            return
        tick.wait(0.01)
    raise AssertionError("it did not happen in time")


def city(name: str, n: int) -> str:
    return json.dumps({"city": name, "n": n})


def key_in(bucket: Bucket, partition: int) -> str:
    return next(f"x{n}" for n in range(1000) if bucket.partition_of(f"x{n}") == partition)


# ── Cache ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_cache_never_serves_what_has_changed(node: Node) -> None:
    with upper.connect(node.url) as bucket:
        bucket.set("user:1", "Ann")
        with Cache(node.url) as cache:
            assert [cache.get("user:1") for _ in range(3)] == [b"Ann"] * 3
            assert (cache.hits, cache.misses) == (2, 1)
            bucket.set("user:1", "Bob")
            eventually(lambda: cache.dropped == 1)
            assert cache.get("user:1") == b"Bob"
            bucket.promote(bucket.partition_of("user:1"))
            eventually(lambda: cache.dropped == 2)
            assert cache.get("user:1") == b"Bob"
            node.kill()
            node.restart()
            bucket.set("user:1", "Cleo")
            eventually(lambda: cache.get("user:1") == b"Cleo")


def test_a_cache_of_an_asyncio_program_is_invalidated_by_the_bucket(node: Node) -> None:
    async def use() -> None:
        with upper.connect(node.url) as bucket:
            bucket.set("user:1", "Ann")
            async with AsyncCache(node.url) as cache:

                async def dropped(count: int) -> None:
                    await asyncio.to_thread(eventually, lambda: cache.dropped >= count)

                assert [await cache.get("user:1") for _ in range(3)] == [b"Ann"] * 3
                assert (cache.hits, cache.misses) == (2, 1)
                await asyncio.to_thread(bucket.set, "user:1", "Bob")
                await dropped(1)
                assert await cache.get("user:1") == b"Bob"
                await asyncio.to_thread(bucket.promote, bucket.partition_of("user:1"))
                await dropped(2)
                assert await cache.get("user:1") == b"Bob"
                await asyncio.to_thread(node.kill)
                await asyncio.to_thread(node.restart)
                await asyncio.to_thread(bucket.set, "user:1", "Cleo")
                await dropped(3)
                assert await cache.get("user:1") == b"Cleo"

    asyncio.run(use())


# ── Index ─────────────────────────────────────────────────────────────────────────────────────────


def found(path: Path, name: str) -> set[bytes]:
    with closing(sqlite3.connect(path)) as db:
        return {key for (key,) in db.execute("select key from documents where field = ?", (name,))}


def test_an_index_rolls_back_to_what_the_bucket_is(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    with upper.connect(node.url) as bucket:
        key = key_in(bucket, 3)
        bucket.set(key, city("Oslo", 1))
        bucket.set_many((f"k{n}", city("Rome", n)) for n in range(100))
        index(node.url, str(path), "city", "now")
        assert found(path, "Oslo") == {key.encode()}
        kept = bucket.seqnos()[bucket.partition_of(key)]
        bucket.set(key, city("Bern", 2))
        bucket.delete("k1")
        index(node.url, str(path), "city", "now")
        assert found(path, "Oslo") == set()
        assert len(found(path, "Rome")) == 99
        assert bucket.promote(3, to=kept).seqno == kept, "the drill lost what was written last"
        index(node.url, str(path), "city", "now")
        assert found(path, "Oslo") == {key.encode()}
        assert found(path, "Bern") == set()
        bucket.flush()
        bucket.set(key, city("Bonn", 3))
        index(node.url, str(path), "city", "now")
        assert (found(path, "Rome"), found(path, "Bonn")) == (set(), {key.encode()})


def test_rows_past_the_saved_position_are_taken_back_on_start(tmp_path: Path) -> None:
    path = str(tmp_path / "index.db")
    first = Index(path, "city")
    change = upper.Mutation(partition=upper.Partition(1), seqno=upper.Seqno(5), branch=upper.BranchId(9),
                            key=b"k", value=city("Oslo", 1).encode())  # fmt: skip
    first.apply(change)
    first.save(upper.Positions({}))  # of other partitions; this snapshot was not complete
    first.db.close()
    again = Index(path, "city")
    again.load()
    assert again.db.execute("select count(*) from documents").fetchone() == (0,)


# ── Replica ───────────────────────────────────────────────────────────────────────────────────────


def test_a_replica_is_the_same_bucket_in_another_node(node: Node, tmp_path: Path) -> None:
    with Node(tmp_path / "other", partitions=16) as other:
        place = str(tmp_path / "place.json")
        with upper.connect(node.url) as source, upper.connect(other.url) as target:

            def same() -> bool:
                keys = [f"k{n}" for n in range(1000)]
                return source.get_many(keys) == target.get_many(keys)

            source.set_many(((f"k{n}", str(n)) for n in range(1000)), flags=7)
            source.delete_many(f"k{n}" for n in range(100))
            replica(node.url, other.url, place, "now")
            assert same()
            kept = source.seqnos()
            source.set_many((f"k{n}", "lost") for n in range(200))
            replica(node.url, other.url, place, "now")
            assert same()
            for partition, seqno in kept.items():
                source.promote(partition, to=seqno)
            source.set("k7", "new")
            replica(node.url, other.url, place, "now")
            assert same()
            assert source.get("k7").value == b"new"
            source.flush()
            source.set("k1", "only")
            replica(node.url, other.url, place, "now")
            assert same()


# ── Audit log ─────────────────────────────────────────────────────────────────────────────────────


def lines(path: Path) -> list[dict[str, object]]:
    return [
        json.loads(line) for line in path.read_bytes().splitlines() if not line.startswith(b'{"positions"')
    ]


def test_an_audit_log_misses_nothing_and_repeats_nothing_across_kills(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    words = [sys.executable, "examples/audit.py", node.url, str(path)]
    with upper.connect(node.url, timeout=30) as bucket:
        written = 0
        for round_ in range(6):
            with subprocess.Popen(words, cwd=ROOT) as program:
                # Each key is written once, so that no snapshot leaves one out.
                for _ in range(5):
                    bucket.set_many((f"k{n}", "v") for n in range(written, written + 50))
                    written += 50
                before = path.stat().st_size if path.exists() else 0
                eventually(lambda before=before: path.exists() and path.stat().st_size > before)  # type: ignore[misc]
                if round_ % 2:
                    node.kill()
                    node.restart()
                program.kill()
        audit(node.url, str(path), "now")
        audited = [(line["partition"], line["seqno"]) for line in lines(path)]
        assert len(audited) == len(set(audited)) == written
        assert sum(bucket.seqnos().values()) == written


def test_an_audit_log_records_what_is_undone(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with upper.connect(node.url) as bucket:
        key = key_in(bucket, 1)
        bucket.set(key, "1")
        audit(node.url, str(path), "now")
        bucket.promote(1, to=0)
        bucket.set(key, "2")
        audit(node.url, str(path), "now")
    assert [line["operation"] for line in lines(path)] == ["mutation", "rollback", "mutation"]
    assert lines(path)[1]["lost"] == [0, 1]


def test_an_audit_log_cuts_off_what_no_position_covers(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    AuditLog(str(path)).save(upper.Positions({}))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"operation": "mutation"}\n{"positions": torn')
    assert AuditLog(str(path)).load() == upper.Positions({})
    assert path.read_bytes() == whole

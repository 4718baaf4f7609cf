"""Following a real node: where it begins, where it ends, what it shows, and what survives."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import upper
from tests.client.conftest import consistent
from tests.nodes import Node
from upper.client.bucket import Bucket
from upper.client.decode import StreamFramer
from upper.client.feed import Feed
from upper.client.follow import FollowSettings
from upper.client.link import Link
from upper.client.partition_consumer import PartitionConsumer, event_of
from upper.client.position_codec import ResumePoints
from upper.errors import (
    BadCheckpoint,
    InvalidArguments,
    LocalProtocolError,
    NotMyPartition,
    RollbackRequired,
)
from upper.history.following import Following
from upper.kernel.arrow import schema
from upper.model import messages
from upper.model.values import Cas, FailoverLog, Partition, Position, Seqno, Version
from upper.wire.codes import Opcode
from upper.wire.dcp import DCP
from upper.wire.packet import REQUEST, pack
from upper.wire.session import DIALECTS
from upper.wire.table import Dialect
from upper.wire.upr import UPR


@pytest.fixture(params=["upr", "couchbase"])
def bucket(shared_node: Node, request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """A bucket on the shared node, emptied for this test, in both dialects that have everything."""
    with upper.connect(shared_node.url.replace("upr:", f"{request.param}:")) as bucket:
        bucket.flush()
        yield bucket


def rows(feed: Feed[pa.RecordBatch]) -> list[dict[str, Any]]:
    batches = list(feed)
    assert all(batch.schema == schema() for batch in batches)
    return [row for batch in batches for row in batch.to_pylist()]


def test_a_feed_until_now_delivers_all_changes_and_ends(bucket: Bucket) -> None:
    bucket.set_many((f"k{n}", f"v{n}") for n in range(500))
    bucket.delete_many([f"k{n}" for n in range(100)])
    with bucket.changes(until="now") as feed:
        seen = Counter(event.operation for event in feed)
    assert seen == {"mutation": 400, "deletion": 100, "snapshot_end": 16}
    assert consistent(bucket, feed)


def test_columns_show_what_events_show(bucket: Bucket) -> None:
    bucket.set_many(((f"k{n}", f"v{n}") for n in range(300)), flags=5, expiry=1000)
    bucket.delete_many([f"k{n}" for n in range(50)])
    events = [e for e in bucket.changes(until="now") if e.operation != "snapshot_end"]
    feed = bucket.changes_arrow(until="now")
    found = rows(feed)
    key = lambda row: (row["partition"], row["seqno"])  # noqa: E731
    expected = [
        {
            "partition": e.partition,
            "seqno": e.seqno,
            "branch": e.branch,
            "operation": e.operation,
            "key": e.key,  # type: ignore[union-attr]
            "value": getattr(e, "value", None),
            "revision": e.revision,  # type: ignore[union-attr]
            "cas": e.cas,  # type: ignore[union-attr]
            "flags": getattr(e, "flags", 0),
            "expiration": getattr(e, "expiration", 0),
            "lock_time": 0,
            "data_type": getattr(e, "data_type", 0),
            "xattrs": None,
        }
        for e in events
    ]
    for row in found:
        assert row.pop("changed_at") is not None
    assert sorted(found, key=key) == sorted(expected, key=key)
    assert consistent(bucket, feed)


def test_from_now_shows_only_what_comes(bucket: Bucket) -> None:
    bucket.set("before", "x")
    with bucket.changes(since="now") as feed:
        bucket.set("after", "y")
        event = next(feed)
    assert isinstance(event, upper.Mutation)
    assert event.key == b"after"


def test_from_now_until_now_is_nothing(bucket: Bucket) -> None:
    bucket.set("a", "x")
    assert list(bucket.changes(since="now", until="now")) == []


@pytest.mark.parametrize("scheme", ["upr", "upr0", "dcp"])
def test_a_position_counts_a_snapshot_once_its_end_is_delivered(node: Node, scheme: str) -> None:
    """A consumer that applies changes at the end of their snapshot may stop before that event."""
    with upper.connect(node.url.replace("upr", scheme, 1)) as bucket:
        partition = bucket.partition_of("a")
        with bucket.changes(since="now", partitions=[partition]) as feed:
            bucket.set("a", "1")
            assert isinstance(next(feed), upper.Mutation)
            assert feed.positions[partition].seqno == 0
            assert isinstance(next(feed), upper.SnapshotEnd)
            assert feed.positions[partition].seqno == 1
            if scheme == "dcp":
                return  # it has no message for a flush
            bucket.flush()
            assert isinstance(next(feed), upper.Flush)
            assert feed.positions[partition].seqno == 1
            assert isinstance(next(feed), upper.SnapshotEnd)
            assert feed.positions[partition].seqno == 2


def test_positions_are_taken_up_where_they_were_left(bucket: Bucket) -> None:
    bucket.set_many((f"k{n}", "1") for n in range(200))
    first = bucket.changes_arrow(until="now")
    assert len(rows(first)) == 200
    saved = json.loads(json.dumps(first.positions.to_json()))
    bucket.set_many((f"k{n}", "2") for n in range(50))
    second = bucket.changes_arrow(since=upper.Positions.from_json(saved), until="now")
    assert len(rows(second)) == 50
    assert consistent(bucket, second)
    plain: dict[Partition, Position] = dict(first.positions)
    assert len(rows(bucket.changes_arrow(since=plain, until="now"))) == 50


def test_a_checkpoint_is_loaded_and_saved(bucket: Bucket, tmp_path: Path) -> None:
    checkpoint = upper.Checkpoint(tmp_path / "here.json")
    bucket.set_many((f"k{n}", "1") for n in range(100))
    for feed in (bucket.changes, bucket.changes_arrow):
        list(feed(since=checkpoint, until="now"))
        assert [e for e in feed(since=checkpoint, until="now")] == []  # noqa: C416
        bucket.set("k1", "2")
    assert sum(event.operation == "mutation" for event in bucket.changes(since=checkpoint, until="now")) == 1


def test_what_was_not_acknowledged_comes_again(bucket: Bucket, tmp_path: Path) -> None:
    checkpoint = upper.Checkpoint(tmp_path / "here.json")
    bucket.set("a", "1")
    with bucket.changes(since=checkpoint, partitions=[bucket.partition_of("a")]) as feed:
        assert next(feed).operation == "mutation"
        assert next(feed).operation == "snapshot_end"
        # Left here: the last event counts as processed when the next one is requested.
    assert checkpoint.load() is None
    with bucket.changes(since=checkpoint, partitions=[bucket.partition_of("a")]) as feed:
        assert [next(feed).operation for _ in range(2)] == ["mutation", "snapshot_end"]
        feed.commit()
    saved = checkpoint.load()
    assert saved is not None
    assert saved[bucket.partition_of("a")].seqno == bucket.seqnos()[bucket.partition_of("a")]


def test_in_manual_mode_only_the_application_acknowledges(bucket: Bucket, tmp_path: Path) -> None:
    checkpoint = upper.Checkpoint(tmp_path / "here.json")
    bucket.set_many((f"k{n}", "1") for n in range(100))
    assert len(list(bucket.changes(since=checkpoint, until="now", acknowledge="manual"))) > 100
    assert checkpoint.load() is None
    with bucket.changes(since=checkpoint, until="now", acknowledge="manual") as feed:
        for event in feed:
            if event.partition == 3 and event.operation == "snapshot_end":
                feed.acknowledge()
                break
    saved = checkpoint.load()
    assert saved is not None
    assert saved[Partition(3)].seqno == bucket.seqnos()[Partition(3)]


@pytest.mark.parametrize("bulk", [False, True])
def test_a_snapshot_larger_than_the_window_does_not_block_a_consumer_that_acknowledges_it_whole(
    node: Node, tmp_path: Path, bulk: bool
) -> None:
    checkpoint = upper.Checkpoint(tmp_path / "here.json")
    with upper.connect(node.url) as bucket:
        bucket.set_many((f"k{n}", bytes(2000)) for n in range(1000))
        settings = FollowSettings(window=64 * 1024)
        wanted: dict[str, Any] = {"since": checkpoint, "settings": settings, "acknowledge": "manual"}
        follow = bucket.changes_arrow if bulk else bucket.changes
        feed: Feed[Any] = follow(until="now", on_rollback="continue", **wanted)
        stuck = threading.Timer(30, feed.close)
        stuck.start()
        seen = sum(item.num_rows if bulk else item.operation == "mutation" for item in feed)
        stuck.cancel()
        assert seen == 1000
        assert checkpoint.load() is None, "nothing was acknowledged"


def test_a_checkpoint_of_something_else_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    other = upper.Checkpoint(tmp_path / "other.json")
    other.save(upper.Positions({}, bucket="carts"))
    with pytest.raises(BadCheckpoint, match="'carts'"):
        bucket.changes(since=other)
    other.save(upper.Positions({}, bucket="default", of=1024))
    with pytest.raises(BadCheckpoint, match="1024 partitions"):
        bucket.changes(since=other)


def test_a_filtered_feed_has_matching_changes_only_and_still_advances(bucket: Bucket) -> None:
    bucket.set_many((f"a{n}", "long" * 100) for n in range(100))
    bucket.set_many((f"b{n}", "long" * 100) for n in range(100))
    bucket.delete_many(f"a{n}" for n in range(10))
    feed = bucket.changes(until="now", key_prefix="a", keys_only=True, operations=["mutation"])
    seen = [event for event in feed if isinstance(event, upper.Mutation)]
    assert len(seen) == 90
    assert {event.key[:1] for event in seen} == {b"a"}
    assert {event.value for event in seen} == {b""}
    assert consistent(bucket, feed)
    some = rows(bucket.changes_arrow(until="now", partitions=[3, 5]))
    assert {row["partition"] for row in some} == {3, 5}


@pytest.mark.parametrize("bulk", [False, True])
def test_an_end_inside_a_filtered_snapshot_is_no_place_to_come_back_to(node: Node, bulk: bool) -> None:
    """What was overwritten later is not shown; if history then goes back to before that, it must be."""
    with upper.connect(node.url) as bucket:
        ours, other = (
            next(name for n in range(100) if bucket.partition_of(name := f"{prefix}{n}") == 2)
            for prefix in "ab"
        )
        bucket.set(ours, "first")
        bucket.set(other, "x")
        until = bucket.seqnos()
        bucket.set(ours, "second")
        follow = bucket.changes_arrow if bulk else bucket.changes
        wanted: dict[str, Any] = {"partitions": [2], "key_prefix": "a", "on_rollback": "continue"}
        cut = follow(until=until, **wanted)
        assert list(cut) == []
        bucket.promote(2, to=until[Partition(2)])
        assert bucket.get(ours).value == b"first"
        found = list(follow(since=cut.positions, until="now", **wanted))
        shown = found[0].column("value")[0].as_py() if bulk else found[0].value
        assert shown == b"first"


def test_nonsense_is_refused_with_a_sentence(bucket: Bucket) -> None:
    for wanted, sentence in (
        ({"partitions": [16]}, "0 to 15"),
        ({"partitions": []}, "at least one"),
        ({"operations": ["write"]}, "mutation, deletion, expiration"),
        ({"since": "tomorrow"}, "'beginning', 'now'"),
        ({"until": "tomorrow"}, "None, 'now'"),
        ({"until": {Partition(0): Seqno(1)}}, "partition 1"),
    ):
        with pytest.raises(InvalidArguments, match=sentence):
            bucket.changes(**wanted)


def test_a_flush_is_seen_live_and_is_a_row(bucket: Bucket) -> None:
    bucket.set_many((f"k{n}", "1") for n in range(200))
    until = {p: Seqno(s + 1) for p, s in bucket.seqnos().items()}
    events, columns = bucket.changes(until=until), bucket.changes_arrow(until=until)
    seen: dict[str, Counter[str]] = {}

    def follow() -> None:
        seen["events"] = Counter(event.operation for event in events)

    first = next(columns)
    thread = threading.Thread(target=follow)
    thread.start()
    deadline = time.monotonic() + 10
    while (
        sum(position.seqno > 0 for position in events.positions.values()) < 16 and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    got = first.num_rows
    while got < 200:
        got += next(columns).num_rows
    bucket.flush()
    thread.join(20)
    operations = Counter(row["operation"] for row in rows(columns))
    if DIALECTS[bucket.address.dialect].snapshot_bounds:
        # DCP has no message for a flush: the streams end, and the consumer goes back to 0.
        assert seen["events"]["rollback"] == 16
        assert operations == {"rollback": 16}
    else:
        assert seen["events"]["flush"] == 16
        assert operations == {"flush": 16}
        assert consistent(bucket, columns)


@pytest.mark.parametrize("scheme", ["upr", "dcp"])
def test_a_rollback_is_an_event_before_anything_of_the_new_branch(node: Node, scheme: str) -> None:
    with upper.connect(node.url.replace("upr:", f"{scheme}:")) as bucket:
        key = next(f"k{n}" for n in range(100) if bucket.partition_of(f"k{n}") == 2)
        for n in range(5):
            bucket.set(key, str(n))
        done = bucket.changes(until="now")
        list(done)
        positions = done.positions
        bucket.promote(2, to=0)
        bucket.set(key, "new")
        with pytest.raises(RollbackRequired, match="partition 2 must go back to seqno 0"):
            list(bucket.changes(since=positions, until="now"))
        again = list(bucket.changes(since=positions, until="now", on_rollback="continue"))
        rollback, mutation, end = again
        assert isinstance(rollback, upper.Rollback)
        assert (rollback.to, rollback.lost) == (0, (0, 5))
        assert isinstance(mutation, upper.Mutation)
        assert rollback.branch == mutation.branch == bucket.failover_log(2).branch
        assert isinstance(end, upper.SnapshotEnd)
        gone: list[upper.Rollback] = []
        found = rows(bucket.changes_arrow(since=positions, until="now", on_rollback=gone.append))
        assert [row["operation"] for row in found] == ["rollback", "mutation"]
        assert found[0]["seqno"] == 0
        assert found[0]["branch"] == bucket.failover_log(2).branch
        assert gone == [rollback]


@pytest.mark.parametrize("result", [True, False, "0", 6, -1])
def test_what_on_rollback_returns_is_a_seqno_or_none(node: Node, result: object) -> None:
    """False is 0 to Python: a consumer that keeps its state would be sent everything again."""
    with upper.connect(node.url) as bucket:
        key = next(f"k{n}" for n in range(100) if bucket.partition_of(f"k{n}") == 2)
        done = bucket.changes()
        for n in range(5):
            bucket.set(key, str(n))
            while not isinstance(next(done), upper.SnapshotEnd):
                pass
        positions = done.positions
        done.close()
        bucket.promote(2, to=3)
        with pytest.raises(LocalProtocolError, match=f"on_rollback went to {result!r}; it goes to 3"):
            list(bucket.changes(since=positions, until="now", on_rollback=lambda _: result))


def test_a_follower_goes_on_when_the_node_restarts(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    seen: set[bytes] = set()
    half = threading.Event()
    with upper.connect(node.url) as bucket, bucket.changes() as feed:

        def follow() -> None:
            for event in feed:
                if isinstance(event, upper.Mutation):
                    seen.add(event.key)
                    if len(seen) == 100:
                        half.set()
                    if len(seen) == 201:
                        return

        thread = threading.Thread(target=follow)
        thread.start()
        bucket.set_many((f"a{n}", "x") for n in range(100))
        assert half.wait(20)
        node.kill()
        node.restart()
        bucket.set_many((f"b{n}", "x") for n in range(100))
        node.stop()
        node.restart()
        bucket.set("last", "x")
        thread.join(30)
        assert not thread.is_alive()
        assert feed.reconnects >= 1
    logged = [record.getMessage().rpartition("; ")[2] for record in caplog.records]
    gone_and_back = ["trying again until it is back", f"{node.address[0]}:{node.port}: reconnected"]
    assert logged in (gone_and_back, 2 * gone_and_back), "once each time, however often it tries"


@pytest.mark.parametrize("bucket", ["upr"], indirect=True)
def test_the_first_draft_is_followed_too(shared_node: Node, bucket: Bucket) -> None:
    bucket.set_many((f"k{n}", f"v{n}") for n in range(100))
    bucket.delete("k5")
    with upper.connect(shared_node.url.replace("upr:", "upr0:")) as old:
        events = Counter(event.operation for event in old.changes(until="now"))
        feed = old.changes_arrow(until="now")
        assert len(rows(feed)) == 100
        assert consistent(old, feed)
        bucket.set("k6", "new")
        assert len(rows(old.changes_arrow(since=feed.positions, until="now"))) == 1
        with pytest.raises(InvalidArguments, match="upr0"):
            old.changes(keys_only=True)
    assert events == {"mutation": 99, "deletion": 1, "snapshot_end": 16}


def test_under_constant_writing_whole_snapshots_end_at_a_consistent_point(bucket: Bucket) -> None:
    stop = threading.Event()

    def write() -> None:
        n = 0
        while not stop.is_set():
            bucket.set_many((f"k{n % 50}", str(n)) for n in range(n, n + 50))
            n += 50

    bucket.set_many((f"k{n}", "0") for n in range(50))
    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(5):
            until = bucket.seqnos()
            feed = bucket.changes_arrow(until=until, whole_snapshots=True)
            list(feed)
            assert all(feed.positions[p].seqno >= until[p] for p in until)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("bucket", ["upr"], indirect=True)
def test_the_oldest_dialect_is_followed_as_far_as_it_goes(shared_node: Node, bucket: Bucket) -> None:
    bucket.set_many((f"k{n}", f"v{n}") for n in range(2000))
    bucket.delete("k5")
    with upper.connect(shared_node.url.replace("upr:", "tap:")) as old:
        dump = list(old.changes(until="now"))
        assert Counter(event.operation for event in dump) == {"mutation": 1999}
        assert {(event.seqno, event.branch) for event in dump} == {(None, None)}
        assert sum(batch.num_rows for batch in old.changes_arrow(until="now")) == 1999
        with old.changes(since="now", name="tapper") as feed:
            seen: list[str] = []

            def follow() -> None:
                for event in feed:
                    seen.append(event.operation)
                    if len(seen) == 3002:
                        return

            thread = threading.Thread(target=follow)
            thread.start()
            while "tapper" not in str(bucket.stats("streams")):
                time.sleep(0.01)
            bucket.set_many((f"n{n}", "x") for n in range(3000))  # more than goes unacknowledged
            bucket.delete_many(["n1", "n2"])
            thread.join(20)
            assert not thread.is_alive()
        assert Counter(seen)["deletion"] == 2
        with pytest.raises(InvalidArguments, match="tap:// has no positions"):
            old.changes(since=upper.Positions({}))


def set_state(node: Node, partition: int, state: int) -> None:
    """What an administrator does to a partition: 1 makes it active, 4 dead."""
    with node.connect() as connection:
        connection.sendall(pack(REQUEST, Opcode.SET_VBUCKET_STATE, extras=bytes((state,)), vbucket=partition))
        assert Link().receive(connection.recv(1000))[0].status == 0


def test_a_partition_that_is_away_is_waited_for_by_calls_and_by_followers(node: Node) -> None:
    with upper.connect(node.url) as bucket:
        key = next(f"k{n}" for n in range(100) if bucket.partition_of(f"k{n}") == 2)
        bucket.set(key, "1")
        seen: list[str] = []
        away = threading.Event()
        with bucket.changes(partitions=[2]) as feed:

            def follow() -> None:
                for event in feed:
                    seen.append(event.operation)
                    if event.operation == "state_change":
                        away.set()
                    if seen.count("mutation") == 2:
                        return

            thread = threading.Thread(target=follow)
            thread.start()
            while "mutation" not in seen:
                time.sleep(0.01)
            set_state(node, 2, 4)
            assert away.wait(10)
            writer = threading.Thread(target=bucket.set, args=(key, "2"))
            writer.start()
            writer.join(0.3)
            assert writer.is_alive()
            set_state(node, 2, 1)
            writer.join(10)
            thread.join(10)
            assert not thread.is_alive()
        assert bucket.get(key).value == b"2"
        set_state(node, 2, 4)
        impatient = upper.connect(node.url, timeout=0.5)
        with pytest.raises(NotMyPartition, match="partition 2"):
            impatient.get(key)


@pytest.mark.parametrize(("bulk", "scheme"), [(False, "upr"), (True, "upr"), (True, "dcp")])
def test_a_slow_application_costs_the_window_and_no_more(node: Node, bulk: bool, scheme: str) -> None:
    window = 64 * 1024
    with upper.connect(node.url.replace("upr:", f"{scheme}:")) as bucket:
        bucket.set_many((f"k{n}", bytes(2000)) for n in range(5000))
        settings = FollowSettings(window=window)
        wanted: dict[str, Any] = {"until": "now", "settings": settings, "name": "slow"}
        feed: Feed[Any] = bucket.changes_arrow(gather=1, **wanted) if bulk else bucket.changes(**wanted)
        next(feed)
        most = 0
        for _ in range(20):
            (lines,) = bucket.stats("streams").values()
            number = next(name.partition(":")[0] for name, value in lines.items() if value == "slow")
            most = max(most, int(lines[f"{number}:unacknowledged"]))
            time.sleep(0.01)
        assert 0 < most <= 2 * window, "the node sends no more than fits, and the portion that filled it"
        rest = sum(item.num_rows if bulk else item.operation == "mutation" for item in feed)
        assert feed.bytes_received > 5000 * 2000
        assert rest >= 4900
        assert consistent(bucket, feed)


@pytest.mark.parametrize("dialect", [UPR, DCP], ids=["upr", "dcp"])
def test_events_equal_what_the_tables_of_the_wire_read(dialect: Dialect) -> None:
    """The lines that read changes field by field, against the declared layouts."""
    log = FailoverLog((Version(upper.BranchId(9), Seqno(0)),))
    bounds = dialect.snapshot_bounds
    consumer = PartitionConsumer(Partition(5), ResumePoints(log, (Seqno(1),)), bounds=bounds)
    consumer.open()
    consumer.on_accepted(log.versions)
    of: dict[str, Any] = {"partition": Partition(5), "opaque": 5}
    logged: list[Any] = [
        messages.SnapshotMarker(
            start=Seqno(1) if bounds else None, end=Seqno(2**48) if bounds else None, **of
        ),
        messages.MutationMessage(
            key=b"k", value=b"v", seqno=Seqno(2), revision=3, cas=Cas(4), flags=5, expiration=6, lock_time=7,
            data_type=1, **of,
        ),
        messages.DeletionMessage(key=b"d", seqno=Seqno(8), revision=9, cas=Cas(10), **of),
        messages.ExpirationMessage(
            key=b"e", seqno=Seqno(2**48 - 1), revision=2**64 - 1, cas=Cas(2**63), **of
        ),
    ]  # fmt: skip
    if bounds:
        logged += [
            replace(logged[1], seqno=Seqno(2**48), extended=b"meta", nru=1),
            messages.SnapshotMarker(start=Seqno(2**48), end=Seqno(2**48 + 2), **of),
            messages.DeletionMessage(key=b"d", seqno=Seqno(2**48 + 1), deleted_at=99, value=b"left", **of),
            messages.ExpirationMessage(key=b"d", seqno=Seqno(2**48 + 2), deleted_at=99, **of),
        ]
    data = b"".join(dialect.encode(message) for message in logged)
    for size in (1, 7, 1000):
        frames, got = StreamFramer(), []
        consumer.stream.seqno = Seqno(1)
        consumer.stream.phase, consumer.stream._end = Following.BETWEEN, None
        consumer.stream.trail.ends[1:] = []
        for at in range(0, len(data), size):
            for item in frames.typed(data[at : at + size], {Partition(5): consumer}, dialect):
                if isinstance(item, tuple):
                    consumer.on(item[0])  # type: ignore[arg-type]
                else:
                    got.append(item)
        changes = [item for item in got if not isinstance(item, upper.SnapshotEnd)]
        assert changes == [
            event_of(m, consumer) for m in logged if not isinstance(m, messages.SnapshotMarker)
        ]
        ends = [item.seqno for item in got if isinstance(item, upper.SnapshotEnd)]
        assert ends == ([2**48, 2**48 + 2] if bounds else [])
        assert frames.take_streamed() == len(data)


def test_a_handler_that_fails_changes_nothing_and_is_asked_again(node: Node, tmp_path: Path) -> None:
    checkpoint = upper.Checkpoint(tmp_path / "here.json")
    with upper.connect(node.url) as bucket:
        bucket.set_many((f"k{n}", "1") for n in range(50))
        list(bucket.changes(since=checkpoint, until="now"))
        before = checkpoint.load()
        bucket.promote(1, to=0)

        def fail(rollback: upper.Rollback) -> None:
            raise LookupError(f"cannot go back to {rollback.to}")

        for _ in range(2):
            feed = bucket.changes(since=checkpoint, until="now", on_rollback=fail)
            with pytest.raises(LookupError, match="cannot go back to 0"):
                list(feed)
            assert list(feed) == [], "it is closed"
            assert checkpoint.load() == before
        events = list(bucket.changes(since=checkpoint, until="now", on_rollback="continue"))
        assert [event.operation for event in events] == ["rollback"]


def test_a_checkpoint_that_is_only_a_path_is_refused_with_the_remedy(bucket: Bucket) -> None:
    with pytest.raises(InvalidArguments, match=r"not 'here.json'; for a file, give upper.Checkpoint\(FILE\)"):
        bucket.changes(checkpoint="here.json")  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e7])
def test_a_timeout_that_no_call_can_wait_is_refused(shared_node: Node, timeout: float) -> None:
    with pytest.raises(InvalidArguments, match="give a number of seconds above 0, and at most 1,000,000"):
        upper.connect(shared_node.url, timeout=timeout)

"""The consumer with a server of the age of Couchbase 3.x: nothing newer is assumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import upper
from tests.apps.test_lake_node import Here
from tests.client.old_server import CONTROL, OPEN, OldServer
from tests.nodes import Node
from upper.apps.lake.lake import Lake
from upper.apps.lake.schema import LakeLayout
from upper.apps.lake.sync import Sync
from upper.apps.lake.verify import verify
from upper.pipeline.source import BucketSource
from upper.server.auth import Role, User, Users, save_users
from upper.wire.codes import Opcode


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    home = tmp_path_factory.mktemp("old")
    # In 3.x the user of a bucket has its name.
    save_users(home / "users.json", Users({"default": User.new("default", "secret", Role.everything())}))
    with Node(home / "data", "--users", str(home / "users.json"), partitions=16) as running:
        yield running


@pytest.fixture(params=[False, True], ids=["ignores flags", "refuses flags"])
def old(node: Node, request: pytest.FixtureRequest) -> Iterator[OldServer]:
    with OldServer(node.port, strict_flags=request.param) as server:
        yield server


def url_of(port: int, scheme: str = "couchbase") -> str:
    return f"{scheme}://default:secret@127.0.0.1:{port}/default"


@pytest.fixture
def bucket(node: Node) -> Iterator[upper.Bucket]:
    with upper.connect(url_of(node.port, "upr")) as connected:
        connected.flush()
        yield connected


def test_changes_are_followed_resumed_and_rolled_back(old: OldServer, bucket: upper.Bucket) -> None:
    bucket.set_many({f"k{n}": f"v{n}" for n in range(500)})
    bucket.delete("k7")
    bucket.set("gone", "v", expiry=1)
    while bucket.exists("gone"):
        pass
    with upper.connect(url_of(old.port)) as connected:
        with connected.changes(until="now") as feed:
            events = [event for event in feed if event.operation in ("mutation", "deletion", "expiration")]
        rows = [row for batch in connected.changes_arrow(until="now") for row in batch.to_pylist()]
        found = {event.key: event.operation for event in events}  # type: ignore[union-attr]
        assert len(events) == len(rows) == 501
        assert {row["key"]: row["operation"] for row in rows} == found
        assert found[b"k7"] == found[b"gone"] == "deletion", "it has no message for expirations"
        assert [event.value for event in events if event.key == b"k8"] == [b"v8"]  # type: ignore[union-attr]

        partition = connected.partition_of("k1")
        bucket.promote(partition, to=bucket.seqnos()[partition] - 2)
        bucket.set("k1", "on the new branch")
        with connected.changes(since=feed.positions, until="now", on_rollback="continue") as again:
            later = [event for event in again if event.operation != "snapshot_end"]
        assert later[0].operation == "rollback"
        assert {event.partition for event in later} == {partition}
        kept = {event.key for event in later if isinstance(event, upper.Mutation)}
        assert kept == {key for key in list(bucket.keys()) if bucket.partition_of(key) == partition}
        assert connected.get("k1").value == b"on the new branch"
        assert connected.set("k2", "written").cas
    assert (Opcode.SELECT_BUCKET, b"") not in old.refused, "what HELLO did not grant is not requested"
    assert (CONTROL, b"enable_expiry_opcode") in old.refused
    newer = (b"enable_expiry_opcode", b"send_stream_end_on_client_close_stream", b"name")
    assert old.refused <= {(OPEN, b""), *((CONTROL, name) for name in newer)}


def test_a_live_feed_goes_on_after_its_connection_was_cut(old: OldServer, bucket: upper.Bucket) -> None:
    with upper.connect(url_of(old.port)) as connected, connected.changes() as feed:
        for number in range(3):
            bucket.set(f"k{number}", "v")
            assert next(event for event in feed if isinstance(event, upper.Mutation)).key == b"k%d" % number
            old.cut()


def test_a_lake_of_an_old_server_is_equal_to_its_bucket(
    old: OldServer, bucket: upper.Bucket, tmp_path: Path
) -> None:
    bucket.set_many({f"k{n}": f"v{n}" for n in range(300)})
    bucket.delete_many([f"k{n}" for n in range(50)])
    feed = BucketSource(url_of(old.port), name="sync:lake")
    try:
        lake = Lake.create(tmp_path / "lake", LakeLayout("default", 16, 4))
        sync = Sync(lake, feed, Here())
        sync.round()
        sync.refresh()
        verdict = verify(lake, feed, Here())
    finally:
        feed.close()
    assert verdict.differences == []
    assert sum(file.rows for file in lake.latest.files()) == 250

"""Reading one's own writes from a lake: never an answer from before them, and no waiting for what is lost."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import upper
from tests.apps.test_lake_model import Events, World, happen, happenings
from tests.apps.test_lake_node import Following
from tests.nodes import Node
from upper.apps.lake.query import query
from upper.apps.lake.tokens import Seen, WriteLost, WriteToken, _in_lost, tokens_of
from upper.cli.main import main
from upper.errors import InvalidArguments, TimedOut
from upper.model.values import Partition, Seqno


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("tokens") / "node", partitions=16) as running:
        yield running


@pytest.fixture
def bucket(node: Node) -> Iterator[Any]:
    with upper.connect(node.url) as connection:
        yield connection


@pytest.fixture
def following(tmp_path: Path, node: Node) -> Iterator[Following]:
    made = Following(tmp_path / "lake", node)
    yield made
    made.feed.close()


@pytest.mark.timeout(300)
@settings(max_examples=12)
@given(st.lists(st.tuples(happenings, st.booleans()), min_size=1, max_size=8))
def test_a_token_is_there_pending_or_lost_as_in_the_bucket(story: list[tuple[Events, bool]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory))
        tokens: dict[WriteToken, int] = {}  # and the CAS of the write
        for events, synced in story:
            for event in events:
                happen(world.bucket, [event])
                held = world.bucket.partitions[event[1]]
                if held.ops and event[0] != "promote":
                    token = WriteToken(Partition(held.id), held.high, held.log.branch)
                    tokens[token] = held.ops[-1].cas
            if not synced:
                continue
            world.settle()
            state, true = world.bucket.bucket_state(), world.true()
            position = world.lake.changes.lake_position
            for token, cas in tokens.items():
                seen = token.seen(position.known(token.partition))
                gone = (int(token.partition), cas) not in true
                assert token.lost_by(state) == gone
                if not gone:
                    assert seen is Seen.THERE
                elif (int(token.partition), cas) in world.ever:
                    # The lake had it: the bucket is not needed.
                    assert seen is Seen.LOST or _in_lost(world.root, [token])
                else:
                    assert seen is not Seen.THERE  # only the bucket can decide


def test_a_query_waits_for_the_write_and_sees_it(following: Following, bucket: Any) -> None:
    following.settle()
    stored = [bucket.set(f"w{number}", b"mine") for number in range(20)]
    answers: list[Any] = []
    sql = "select count(*) as n from current where text(value) = 'mine'"
    waiting = threading.Thread(
        target=lambda: answers.extend(following.lake.query(sql, after=stored, timeout=60.0))
    )
    waiting.start()
    with pytest.raises(TimedOut, match=r"has not reached the write \d+:\d+@\d+ in 0 s"):
        list(query(following.lake.root, sql, after=stored, timeout=0.0))
    assert not answers
    following.sync.round()
    waiting.join(60)
    assert answers == [{"n": 20}]


def test_a_write_that_a_failover_took_back_is_reported(following: Following, bucket: Any) -> None:
    bucket.set("k", b"one")
    stored = bucket.set("k", b"two")
    following.settle()
    assert list(query(following.lake.root, "select value from current", after=[stored], timeout=0.0))
    bucket.promote(stored.partition, to=stored.seqno - 1)
    unseen = bucket.set("k", b"three")
    following.settle()
    with pytest.raises(WriteLost, match=rf"took back the write {stored.partition}:{stored.seqno}@"):
        list(query(following.lake.root, "select 1", after=[stored], timeout=60.0))
    # A branch that the lake has not followed: the bucket reports that it is gone.
    bucket.promote(unseen.partition, to=unseen.seqno - 1)
    newer = bucket.set("k", b"four")
    bucket.promote(newer.partition, to=unseen.seqno - 1)
    with pytest.raises(WriteLost):
        list(
            query(
                following.lake.root, "select 1", after=[newer], timeout=60.0,
                bucket_state=following.feed.bucket_state,
            )
        )  # fmt: skip


def test_a_write_lost_in_a_failover_to_the_position_of_the_lake_is_reported(
    following: Following, bucket: Any
) -> None:
    before = bucket.set("same place", b"one")
    following.settle()
    lost = bucket.set("same place", b"two")
    bucket.promote(lost.partition, to=before.seqno)
    following.settle()  # nothing to take back, and nothing to read
    for state, error in ((None, TimedOut), (following.feed.bucket_state, WriteLost)):
        with pytest.raises(error):
            list(query(following.lake.root, "select 1", after=[lost], timeout=0.0, bucket_state=state))
    bucket.set("same place", b"three")
    following.settle()
    with pytest.raises(WriteLost):
        list(query(following.lake.root, "select 1", after=[lost], timeout=60.0))


def test_current_is_the_bucket_at_the_position_of_changes(following: Following, bucket: Any) -> None:
    bucket.flush()
    bucket.set_many({f"k{number}": b"one" for number in range(30)})
    following.settle()
    bucket.set("k1", b"two")
    bucket.delete("k2")
    following.sync.round()  # `latest` itself is not refreshed
    rows = {row["key"]: row["value"] for row in query(following.lake.root, "select key, value from current")}
    assert rows == {key: item.value for key, item in bucket.scan()}


def test_tokens_combine_and_the_last_of_a_branch_counts() -> None:
    assert [str(token) for token in tokens_of(["3:5@9,3:7@9", "3:6@9", "1:2@4", "3:1@8"])] == [
        "1:2@4", "3:1@8", "3:7@9",
    ]  # fmt: skip
    for wrong in ("3:5", "", "a:1@2", "1:2@3;4"):
        with pytest.raises(InvalidArguments, match="is not a token"):
            tokens_of([wrong])


def test_a_write_without_a_token_is_refused(bucket: Any) -> None:
    (stored,) = bucket.set_many({"k": b"v"})
    with pytest.raises(InvalidArguments, match="has no token"):
        tokens_of([stored])


def test_the_verbs_pass_a_token_on(
    following: Following, node: Node, bucket: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["set", node.url, "verb", "written", "--token"]) == 0
    token = capsys.readouterr().out.strip()
    partition, _, rest = token.partition(":")
    assert int(partition) == bucket.partition_of("verb")
    assert Seqno(int(rest.partition("@")[0])) == bucket.seqnos()[Partition(int(partition))]
    lake = str(following.lake.root)
    following.settle()
    sql = "select text(value) as value from current where text(key) = 'verb'"
    assert main(["query", lake, sql, "--after", token, "--url", node.url, "--json"]) == 0
    assert capsys.readouterr().out == '{"value": "written"}\n'
    later = f"{partition}:{2**40}@{rest.partition('@')[2]}"
    assert main(["query", lake, sql, "--after", f"{token},{later}", "--timeout", "0"]) == 3
    assert "check that `upper sync` runs" in capsys.readouterr().err

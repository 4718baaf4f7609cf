"""A lake that follows a real node, with the workers in this process; tests/spark has the same on Spark."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

import upper
from tests.nodes import Node
from upper.apps.lake.files import read
from upper.apps.lake.home import Lake, held
from upper.apps.lake.query import query
from upper.apps.lake.report import report
from upper.apps.lake.schema import CHANGES, LATEST, LOST, VERSION, Layout
from upper.apps.lake.sync import Sync
from upper.apps.lake.verify import verify
from upper.apps.lake.work import Task
from upper.cli.main import main
from upper.errors import BadCheckpoint, DirectoryInUse, InvalidArguments, WrongVersion
from upper.spark.feed import BucketFeed

T = TypeVar("T")
LAYOUT = Layout("default", 16, 4)


class Here:
    width = 2

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        return [task() for task in tasks]


class Following:
    def __init__(self, root: Path, node: Node, *, new_history: bool = False) -> None:
        self.lake = Lake.create(root, LAYOUT)
        self.feed = BucketFeed(node.url)
        self.sync = Sync(self.lake, self.feed, Here(), new_history=new_history)

    def settle(self) -> int:
        """Rounds until nothing is behind; how many committed."""
        commits = int(self.sync.round().number > 0)
        while self.sync.unsettled:
            commits += self.sync.round().number > 0
        self.sync.refresh()
        return commits

    def differences(self) -> list[Any]:
        return [one.what for one in verify(self.lake, self.feed, Here()).differences]

    def rows(self, table: str) -> int:
        home = {CHANGES: self.lake.changes, LATEST: self.lake.latest, LOST: self.lake.lost}[table]
        return len(read(self.lake.root, table, home.files()))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path / "node", partitions=16) as running:
        yield running


@pytest.fixture
def following(tmp_path: Path, node: Node) -> Iterator[Following]:
    made = Following(tmp_path / "lake", node)
    yield made
    made.feed.close()


@pytest.fixture
def bucket(node: Node) -> Iterator[Any]:
    with upper.connect(node.url) as connection:
        yield connection


def test_a_flush_while_away_leaves_an_empty_lake_that_is_not_behind(
    following: Following, bucket: Any
) -> None:
    bucket.set_many({f"k{i}": b"v" for i in range(300)})
    following.settle()
    bucket.flush()
    following.settle()
    assert following.differences() == []
    assert following.rows(LATEST) == following.rows(CHANGES) == following.rows(LOST) == 0
    quiet = following.sync.round()
    assert (quiet.number, quiet.behind) == (0, 0), "nothing happens, and yet there is something to do"
    bucket.set("k", b"v")
    following.settle()
    assert following.differences() == []
    assert following.rows(LATEST) == 1


def test_what_a_failover_takes_back_is_in_lost_with_the_reason(following: Following, bucket: Any) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(400)})
    following.settle()
    bucket.set_many({f"k{i}": b"two" for i in range(400)})
    following.settle()
    high = bucket.seqnos()[3]
    point = bucket.promote(3, to=high - 4).seqno
    bucket.set_many({f"n{i}": b"new" for i in range(64)})
    assert following.settle() == 1
    assert following.differences() == []
    lost = list(query(following.lake, "select partition, seqno, taken_back_to, why from lost order by seqno"))
    assert [row["seqno"] for row in lost] == list(range(point + 1, high + 1))
    assert {(row["partition"], row["taken_back_to"]) for row in lost} == {(3, point)}
    assert {row["why"] for row in lost} == {f"histories part at {point}"}
    told = report(following.lake, following.feed.outlook())
    assert told.behind == 0
    assert [(one.partition, one.changes) for one in told.lost] == [(3, high - point)]


def test_a_branch_of_many_partitions_is_shown_as_one_event(
    following: Following, bucket: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(400)})
    following.settle()
    highs = bucket.seqnos()
    for partition in range(16):
        bucket.promote(partition, to=highs[partition] - 1 - partition % 3)
    following.settle()
    assert following.differences() == []
    assert main(["lake", str(following.lake.root)]) == 0
    shown = capsys.readouterr().out
    at = report(following.lake).losses[0].at
    assert "16 rollbacks of partitions" in shown
    assert shown.splitlines()[-2:] == [
        "at                         cause           partitions  changes",
        f"{at}  histories part          16       31",
    ]
    assert main(["lake", str(following.lake.root), "--rollbacks"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(shown.splitlines()) + 15
    assert main(["lake", str(following.lake.root), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["lost"]) == 16
    assert [(loss["partitions"], loss["changes"]) for loss in told["losses"]] == [(16, 31)]


def test_files_are_kept_at_least_as_long_as_was_said(following: Following, bucket: Any) -> None:
    bucket.set("k", b"one")
    following.settle()
    bucket.set("k", b"two")
    following.settle()
    before = {path.name for path in following.lake.root.glob("*/*/*.parquet")}
    assert main(["lake", str(following.lake.root), "vacuum", "--keep", "20m"]) == 0
    assert {path.name for path in following.lake.root.glob("*/*/*.parquet")} == before


def test_verify_finds_a_lake_that_is_not_true(following: Following, bucket: Any, tmp_path: Path) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(100)})
    following.settle()
    assert following.differences() == []
    lake = following.lake
    victim = lake.latest.files()[0]
    lake.commit_latest(add=[], remove=[victim], stand=lake.latest.stand)
    assert set(following.differences()) == {
        "`latest` is not what the bucket has",
        "`latest` is not what `changes` makes",
    }


def test_a_lake_behind_its_bucket_is_compared_where_it_stands(following: Following, bucket: Any) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(100)})
    following.settle()
    bucket.set_many({f"k{i}": b"two" for i in range(0, 100, 2)})
    bucket.delete_many([f"k{i}" for i in range(1, 100, 10)])
    verdict = verify(following.lake, following.feed, Here())
    assert verdict.differences == []
    assert verdict.moved == 60


def test_a_lake_is_not_turned_over_to_another_bucket(following: Following, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="follows the bucket 'default' with 16 partitions"):
        Lake.create(following.lake.root, Layout("other", 16, 4))
    with pytest.raises(BadCheckpoint, match="there is no lake"):
        Lake(tmp_path / "elsewhere")


def test_a_bucket_of_the_same_name_that_has_another_history_is_refused_unless_one_insists(
    following: Following, node: Node, bucket: Any, tmp_path: Path
) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(300)})
    following.settle()
    stood = following.lake.changes.stand
    with Node(tmp_path / "other", partitions=16) as other:
        for keys in (0, 20):  # a node without anything is no better than one with something else
            with upper.connect(other.url) as strangers:
                strangers.set_many({f"s{i}": b"strange" for i in range(keys)})
            mistaken = Following(following.lake.root, other)
            with pytest.raises(BadCheckpoint, match=r"no history in common.*all 300 changes"):
                mistaken.sync.round()
            assert mistaken.lake.changes.stand == stood
            mistaken.feed.close()
        insisting = Following(following.lake.root, other, new_history=True)
        insisting.settle()
        assert insisting.differences() == []
        assert (insisting.rows(LOST), insisting.rows(CHANGES), insisting.rows(LATEST)) == (300, 20, 20)
        insisting.feed.close()
        going_on = Following(following.lake.root, other)
        assert going_on.settle() == 0, "one need not insist twice"
        going_on.feed.close()


def test_one_partition_that_begins_anew_is_a_rollback_like_any_other(
    following: Following, node: Node, bucket: Any
) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(300)})
    following.settle()
    high = bucket.seqnos()[5]
    assert bucket.promote(5, to=0).seqno == 0
    following.settle()
    assert following.differences() == []
    assert following.rows(LOST) == high
    again = Following(following.lake.root, node)
    assert again.settle() == 0
    bucket.set_many({f"k{i}": b"two" for i in range(300)})
    again.settle()
    assert again.differences() == []
    again.feed.close()


def test_a_lake_of_another_layout_is_refused(following: Following) -> None:
    following.lake.changes.delta.alter.set_table_properties(
        {"upper.schema": str(VERSION + 1)}, raise_if_not_exists=False
    )
    with pytest.raises(WrongVersion, match=f"has layout {VERSION + 1}"):
        Lake(following.lake.root)


def test_a_lake_is_held_by_one_at_a_time(following: Following) -> None:
    root = following.lake.root
    with held(root), pytest.raises(DirectoryInUse, match=str(os.getpid())), held(root):
        pass
    with held(root):
        pass


def test_a_lake_is_made_where_nothing_is_in_the_way(following: Following, node: Node, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for place in ("file", "file/below"):
        with pytest.raises(InvalidArguments, match="a lake is a directory"), held(tmp_path / place):
            pass
    # Whoever sweeps that table would sweep the lake away.
    with pytest.raises(InvalidArguments, match="is a Delta table"), held(following.lake.root / CHANGES):
        pass


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--groups", "0"], "'0' is not a number from 1 up"),
        (["--groups", "17"], "16 partitions form 1 to 16 groups, not 17"),
        (["--conf", "spark.foo"], "'spark.foo' is not NAME=VALUE"),
        (["--py-files", "nowhere.whl"], "there is no file nowhere.whl"),
        (["--master", "nonsense"], "Spark has no master 'nonsense'"),
        (["--every", "soon"], "'soon' is not a span of time"),
    ],
)
def test_a_sync_that_cannot_be_meant_is_refused_in_a_sentence(
    options: list[str], told: str, node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["sync", node.url, str(tmp_path / "new"), *options])
    except SystemExit as ended:  # argparse
        code = int(ended.code or 0)
    assert code == 2
    assert told in capsys.readouterr().err


def test_an_address_is_not_taken_for_a_directory(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sync", node.url, "s3://bucket/lake", "--once"])
    assert "a lake is a directory that all workers see" in capsys.readouterr().err


def test_of_two_drivers_without_a_common_lock_one_loses(
    following: Following, node: Node, bucket: Any
) -> None:
    other = Following(following.lake.root, node)
    bucket.set_many({f"k{i}": b"one" for i in range(100)})
    following.settle()
    with pytest.raises(DirectoryInUse):
        other.sync.round()
    other.feed.close()
    following.lake.changes.refresh()
    assert following.differences() == []
    assert following.rows(CHANGES) == 100


def test_queries_show_bytes_and_refuse_nonsense(following: Following, bucket: Any) -> None:
    bucket.set("plain", b"text")
    bucket.set(b"\xff\xfe", b"\x00")
    following.settle()
    rows = list(query(following.lake, "select key, text(key) as shown from latest order by seqno, key"))
    assert {(row["key"], row["shown"]) for row in rows} == {(b"plain", "plain"), (b"\xff\xfe", None)}
    assert list(query(following.lake, "select * from lost")) == []
    with pytest.raises(InvalidArguments, match="DuckDB"):
        list(query(following.lake, "select nonsense from nowhere"))


def test_any_delta_reader_opens_the_tables(following: Following, bucket: Any) -> None:
    import pyarrow as pa
    from deltalake import DeltaTable

    bucket.set_many({f"k{i}": b"one" for i in range(200)})
    following.settle()
    bucket.delete_many([f"k{i}" for i in range(50)])
    following.settle()
    for table, rows in ((CHANGES, 250), (LATEST, 150), (LOST, 0)):
        seen = DeltaTable(following.lake.root / table).to_pyarrow_table()
        assert seen.num_rows == rows
        assert seen.schema.field("key").type == seen.schema.field("value").type == pa.binary()
        assert seen.schema.names[:3] == ["partition_group", "partition", "seqno"]
    one = DeltaTable(following.lake.root / CHANGES).to_pyarrow_table(filters=[("partition", "=", 7)])
    assert set(one["partition"].to_pylist()) == {7}

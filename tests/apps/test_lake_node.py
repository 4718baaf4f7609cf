"""A lake that follows a real node, with the workers in this process; tests/spark has the same on Spark."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs as fs
import pytest
from deltalake import DeltaTable

import upper
from tests.nodes import Node
from tests.server.peers import Peer
from upper.apps.lake.files import read, write
from upper.apps.lake.follow import SyncSettings, SyncTotals, _forever, _once
from upper.apps.lake.lake import Lake, held
from upper.apps.lake.maintainer import Maintainer
from upper.apps.lake.outputs import OutputFollower
from upper.apps.lake.query import query
from upper.apps.lake.report import report
from upper.apps.lake.schema import CHANGES, LATEST, LOST, VERSION, LakeLayout
from upper.apps.lake.sync import Sync, SyncRound
from upper.apps.lake.verify import verify
from upper.cli.main import main
from upper.errors import BadCheckpoint, DirectoryInUse, InvalidArguments, WrongVersion
from upper.model.values import Cas, Partition, partition_of
from upper.pipeline.source import BucketSource
from upper.pipeline.stopping import StopDeadline
from upper.pipeline.target import Task

T = TypeVar("T")
LAYOUT = LakeLayout("default", 16, 4)


class Here:
    width = 2

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        return [task() for task in tasks]


class Following:
    def __init__(self, root: Path, node: Node, *, new_history: bool = False, scheme: str = "upr") -> None:
        self.root = root
        self.lake = Lake.create(root, LAYOUT)
        self.feed = BucketSource(node.url.replace("upr:", f"{scheme}:"), name="sync:lake")
        self.sync = Sync(self.lake, self.feed, Here(), new_history=new_history)

    def settle(self) -> int:
        """Rounds until nothing is behind; how many committed."""
        commits = int(self.sync.round().number > 0)
        while self.sync.incomplete:
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
def following(tmp_path: Path, node: Node, request: pytest.FixtureRequest) -> Iterator[Following]:
    made = Following(tmp_path / "lake", node, scheme=getattr(request, "param", "upr"))
    yield made
    made.feed.close()


over_both = pytest.mark.parametrize("following", ["upr", "couchbase"], indirect=True)


@pytest.fixture
def bucket(node: Node) -> Iterator[Any]:
    with upper.connect(node.url) as connection:
        yield connection


@over_both
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


@over_both
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
    lost = list(query(following.root, "select partition, seqno, taken_back_to, why from lost order by seqno"))
    assert [row["seqno"] for row in lost] == list(range(point + 1, high + 1))
    assert {(row["partition"], row["taken_back_to"]) for row in lost} == {(3, point)}
    assert {row["why"] for row in lost} == {f"histories diverge at {point}"}
    reported = report(following.lake, following.feed.bucket_state())
    assert reported.behind == 0
    assert [(one.partition, one.changes) for one in reported.lost] == [(3, high - point)]


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
    assert main(["lake", str(following.root)]) == 0
    shown = capsys.readouterr().out
    at = report(following.lake).losses[0].at
    assert "16 rollbacks of partitions" in shown
    assert shown.splitlines()[-2:] == [
        "at                         cause              partitions  changes",
        f"{at}  histories diverge          16       31",
    ]
    assert main(["lake", str(following.root), "--rollbacks"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(shown.splitlines()) + 15
    assert main(["lake", str(following.root), "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert len(reported["lost"]) == 16
    assert [(loss["partitions"], loss["changes"]) for loss in reported["losses"]] == [(16, 31)]


def test_files_are_kept_at_least_as_long_as_required(following: Following, bucket: Any) -> None:
    bucket.set("k", b"one")
    following.settle()
    bucket.set("k", b"two")
    following.settle()
    before = {path.name for path in following.root.glob("*/*/*.parquet")}
    assert main(["lake", str(following.root), "vacuum", "--keep", "20m"]) == 0
    assert {path.name for path in following.root.glob("*/*/*.parquet")} == before


@over_both
def test_verify_finds_a_lake_that_is_not_true(following: Following, bucket: Any, tmp_path: Path) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(100)})
    following.settle()
    assert following.differences() == []
    lake = following.lake
    victim = lake.latest.files()[0]
    lake.commit_latest(add=[], remove=[victim], lake_position=lake.latest.lake_position)
    assert set(following.differences()) == {
        "`latest` is not what the bucket has",
        "`latest` is not what `changes` makes",
    }


def test_verify_reports_a_key_outside_its_partition(following: Following, node: Node) -> None:
    """Written as a client does that names a partition, and names the wrong one."""
    wrong = Partition(1 if partition_of(b"k", node.partitions) != 1 else 2)
    with Peer(node) as peer:
        assert peer.set(b"k", b"v", partition=wrong).status == 0
    following.settle()
    (found,) = verify(following.lake, following.feed, Here()).differences
    assert (found.partition, found.keys) == (wrong, (b"k",))
    assert "outside their partition" in found.what


def test_a_lake_behind_its_bucket_is_compared_where_it_stands(following: Following, bucket: Any) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(100)})
    following.settle()
    bucket.set_many({f"k{i}": b"two" for i in range(0, 100, 2)})
    bucket.delete_many([f"k{i}" for i in range(1, 100, 10)])
    verdict = verify(following.lake, following.feed, Here())
    assert verdict.differences == []
    assert verdict.moved == 60


def test_a_lake_does_not_follow_another_bucket(following: Following, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="follows the bucket 'default' with 16 partitions"):
        Lake.create(following.root, LakeLayout("other", 16, 4))
    with pytest.raises(BadCheckpoint, match="there is no lake"):
        Lake(tmp_path / "elsewhere")


def test_a_bucket_of_the_same_name_with_another_history_is_refused_without_the_option(
    following: Following, node: Node, bucket: Any, tmp_path: Path
) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(300)})
    following.settle()
    stood = following.lake.changes.lake_position
    with Node(tmp_path / "other", partitions=16) as other:
        for keys in (0, 20):  # a node without anything is no better than one with something else
            with upper.connect(other.url) as foreign:
                foreign.set_many({f"s{i}": b"strange" for i in range(keys)})
            mistaken = Following(following.root, other)
            with pytest.raises(BadCheckpoint, match=r"no history in common.*all 300 changes"):
                mistaken.sync.round()
            assert mistaken.lake.changes.lake_position == stood
            mistaken.feed.close()
        insisting = Following(following.root, other, new_history=True)
        insisting.settle()
        assert insisting.differences() == []
        assert (insisting.rows(LOST), insisting.rows(CHANGES), insisting.rows(LATEST)) == (300, 20, 20)
        insisting.feed.close()
        going_on = Following(following.root, other)
        assert going_on.settle() == 0, "one need not insist twice"
        going_on.feed.close()


def test_a_single_partition_without_common_history_is_an_ordinary_rollback(
    following: Following, node: Node, bucket: Any
) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(300)})
    following.settle()
    high = bucket.seqnos()[5]
    assert bucket.promote(5, to=0).seqno == 0
    following.settle()
    assert following.differences() == []
    assert following.rows(LOST) == high
    again = Following(following.root, node)
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
        Lake(following.root)


def test_a_lake_is_held_by_one_at_a_time(following: Following) -> None:
    root = following.root
    with held(root), pytest.raises(DirectoryInUse, match=str(os.getpid())), held(root):
        pass
    with held(root):
        pass


def test_a_lake_is_made_where_nothing_is_in_the_way(following: Following, node: Node, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for place in ("file", "file/below"):
        with pytest.raises(InvalidArguments, match="a lake is a directory"), held(tmp_path / place):
            pass
    # A VACUUM of that table would delete the lake.
    with pytest.raises(InvalidArguments, match="is a Delta table"), held(following.lake.changes.where):
        pass


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (["--groups", "0"], "'0' is not a number from 1 up"),
        (["--groups", "17"], "16 partitions form 1 to 16 groups, not 17"),
        (["--conf", "spark.foo"], "--conf: expected NAME=VALUE"),
        (["--py-files", "nowhere.whl"], "there is no file nowhere.whl"),
        (["--master", "nonsense"], "Spark has no master 'nonsense'"),
        (["--every", "soon"], "'soon' is not a duration"),
    ],
)
def test_a_sync_with_contradictory_arguments_is_refused_in_a_sentence(
    options: list[str], reported: str, node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["sync", node.url, str(tmp_path / "new"), *options])
    except SystemExit as ended:  # argparse
        code = int(ended.code or 0)
    assert code == 2
    assert reported in capsys.readouterr().err


def test_of_two_drivers_without_a_common_lock_one_loses(
    following: Following, node: Node, bucket: Any
) -> None:
    other = Following(following.root, node)
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
    rows = list(query(following.root, "select key, text(key) as shown from latest order by seqno, key"))
    assert {(row["key"], row["shown"]) for row in rows} == {(b"plain", "plain"), (b"\xff\xfe", None)}
    assert list(query(following.root, "select * from lost")) == []
    with pytest.raises(InvalidArguments, match="DuckDB"):
        list(query(following.root, "select nonsense from nowhere"))


def rows_of(table: Path, **how: Any) -> pa.Table:
    """A table through Arrow's own file system: with deltalake's, Python may abort when it ends."""
    filesystem = fs.SubTreeFileSystem(str(table), fs.LocalFileSystem())
    return DeltaTable(table).to_pyarrow_table(filesystem=filesystem, **how)


def test_any_delta_reader_opens_the_tables(following: Following, bucket: Any) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(200)})
    following.settle()
    bucket.delete_many([f"k{i}" for i in range(50)])
    following.settle()
    for table, rows in ((CHANGES, 250), (LATEST, 150), (LOST, 0)):
        seen = rows_of(following.root / table)
        assert seen.num_rows == rows
        assert seen.schema.field("key").type == seen.schema.field("value").type == pa.binary()
        assert seen.schema.names[:3] == ["partition_group", "partition", "seqno"]
    one = rows_of(Path(following.lake.changes.where), filters=[("partition", "=", 7)])
    assert set(one["partition"].to_pylist()) == {7}


def test_a_directory_of_other_files_does_not_become_a_lake(node: Node, tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidArguments, match="holds other files, such as"),
        held(tmp_path / "node"),
    ):
        pass
    assert not (tmp_path / "node" / ".lock").exists()
    (tmp_path / "begun" / "changes").mkdir(parents=True)
    with held(tmp_path / "begun"):
        pass


@over_both
def test_data_types_and_kinds_of_deletion_survive(following: Following, bucket: Any) -> None:
    bucket.copy_many(
        [
            upper.Copy(key=b"json", value=b"{}", revision=3, cas=Cas(1 << 20), data_type=1),
            upper.Copy(key=b"plain", value=b"{}", revision=3, cas=Cas(1 << 20)),
        ]
    )
    bucket.set_many({"deleted": b"v", "locked": b"v"})
    bucket.set("expired", b"v", expiry=1)
    bucket.delete("deleted")
    bucket.get_and_lock("locked", 30)
    while bucket.exists("expired"):
        pass
    following.settle()
    assert following.differences() == []
    rows = query(following.root, "select text(key) as key, data_type, lock_time from latest order by key")
    found = {row["key"]: (row["data_type"], row["lock_time"] > 0) for row in rows}
    assert found == {"json": (1, False), "plain": (0, False), "locked": (0, True)}
    sql = "select text(key) as key, operation from changes where operation <> 'mutation' order by key"
    assert [(row["key"], row["operation"]) for row in query(following.root, sql)] == [
        ("deleted", "deletion"),
        ("expired", "expiration"),
    ]


def test_verify_compares_the_data_type(following: Following, bucket: Any) -> None:
    bucket.copy_many([upper.Copy(key=b"json", value=b"{}", revision=3, cas=Cas(1 << 20), data_type=1)])
    following.settle()
    lake = following.lake
    (held,) = lake.latest.files()
    rows = read(lake.root, LATEST, [held])
    at = rows.schema.get_field_index("data_type")
    wrong = rows.set_column(at, rows.schema.field(at), pa.array([0], pa.int32()))
    lake.commit_latest(
        add=write(lake.root, LATEST, wrong, group=held.group),
        remove=[held],
        lake_position=lake.latest.lake_position,
    )
    assert set(following.differences()) == {
        "`latest` is not what the bucket has",
        "`latest` is not what `changes` makes",
    }


@over_both
def test_the_lag_of_a_sync_is_the_lag_that_the_node_reports(
    following: Following, bucket: Any, node: Node
) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(400)})
    following.settle()
    bucket.set_many({f"k{i}": b"two" for i in range(50)})
    with Peer(node) as peer:
        reported = peer.stats("consumers")
    (number,) = [row.partition(":")[0] for row, value in reported.items() if value == "sync:lake"]
    behind = report(following.lake, following.feed.bucket_state()).behind
    assert int(reported[f"{number}:lag"]) == behind == 50
    assert following.sync.round().behind == 50


@over_both
def test_the_node_counts_the_rollbacks_of_a_lake_that_compares_histories_itself(
    following: Following, bucket: Any, node: Node
) -> None:
    def counted() -> int:
        with Peer(node) as peer:
            reported = peer.stats("consumers")
        (number,) = [row.partition(":")[0] for row, value in reported.items() if value == "sync:lake"]
        return int(reported[f"{number}:rollbacks"])

    bucket.set_many({f"k{i}": b"one" for i in range(400)})
    following.settle()
    bucket.set_many({f"k{i}": b"two" for i in range(50)})
    following.settle()
    assert counted() == 0
    high = bucket.seqnos()[Partition(3)]
    bucket.promote(3, to=high - 2)
    bucket.promote(5)  # a branch that takes nothing back
    following.settle()
    assert counted() == 1
    bucket.set_many({f"k{i}": b"three" for i in range(50)})
    following.settle()
    assert counted() == 1


def test_the_summary_of_a_sync_that_is_done_is_not_behind(following: Following, bucket: Any) -> None:
    bucket.set_many({f"k{n}": b"v" for n in range(50)})
    progress = SyncTotals()
    _once(
        following.sync,
        Maintainer(following.lake, Here(), SyncSettings().maintenance()),
        OutputFollower(following.lake, Here(), None),
        progress,
        lambda *_: None,
    )
    assert (progress.rows, progress.behind, progress.lag) == (50, 0, 0.0)


def test_a_history_that_never_settles_is_reported(
    following: Following, bucket: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Sync, "incomplete", True)
    _once(
        following.sync,
        Maintainer(following.lake, Here(), SyncSettings().maintenance()),
        OutputFollower(following.lake, Here(), None),
        SyncTotals(),
        lambda *_: None,
    )
    assert "run it again" in caplog.text


def test_a_live_sync_reports_that_its_node_is_away_and_back(
    following: Following, node: Node, bucket: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.set("k", b"v")
    following.feed.patience = 0.1
    node.kill()
    stopping = threading.Event()

    def publish(progress: SyncTotals, done: SyncRound | None) -> None:
        if done is not None:
            stopping.set()
        elif progress.trouble and not node.running:
            node.restart()

    maintainer = Maintainer(following.lake, Here(), SyncSettings().maintenance())
    outputs = OutputFollower(following.lake, Here(), None)
    settings, deadline = SyncSettings(every=0.05), StopDeadline(stopping, 4.0)
    _forever(following.sync, maintainer, outputs, SyncTotals(), settings, publish, deadline)
    assert "; trying again" in caplog.text
    assert "the round succeeds again" in caplog.text
    assert following.rows(CHANGES) == 1

"""Erasing a key: nothing of it is left in any file of the lake, and the lake stays correct."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import upper
from tests.apps.test_lake_node import Following, Here
from tests.nodes import Node
from upper.apps.lake import erase as erasing
from upper.apps.lake.erase import erase
from upper.apps.lake.lake import Lake
from upper.apps.lake.query import query
from upper.apps.lake.tables import LakeTable
from upper.cli.main import main
from upper.errors import InvalidArguments

SECRET = b"person-4711"


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


def history(following: Following, bucket: Any) -> None:
    """A key with versions in `changes`, in `lost`, and in older files of `latest`."""
    bucket.set_many({f"k{i}": b"one" for i in range(200)})
    for number in range(3):
        bucket.set(SECRET, b"private %d " % number + SECRET)
        following.settle()
    partition = bucket.partition_of(SECRET)
    bucket.promote(partition, to=bucket.seqnos()[partition] - 1)
    following.settle()
    bucket.set(SECRET, b"private again " + SECRET)
    following.settle()


def found(root: Path) -> list[Path]:
    """Files that have the key somewhere. Parquet is compressed, so values repeat the key in them."""
    import pyarrow.parquet as pq

    hits = []
    for path in root.rglob("*"):
        if path.suffix == ".parquet":
            rows = pq.ParquetFile(path).read().to_pylist()
            if any(
                SECRET in (value if isinstance(value, bytes) else b"") for r in rows for value in r.values()
            ):
                hits.append(path)
        if path.is_file() and SECRET in path.read_bytes() and path not in hits:
            hits.append(path)
    return hits


def test_an_erased_key_is_in_no_file_and_the_lake_stays_true(following: Following, bucket: Any) -> None:
    history(following, bucket)
    root = following.root
    with pytest.raises(InvalidArguments, match="delete it there and sync first"):
        erase(following.lake, Here(), SECRET)
    bucket.delete(SECRET)
    following.settle()
    assert len(found(root)) > 3
    done = erase(following.lake, Here(), SECRET)
    assert done.files_rewritten >= 2
    assert done.files_removed > 0
    assert found(root) == []
    assert following.differences() == []
    rows = list(
        query(root, "select distinct operation, key, value, cas from changes where operation = 'erased'")
    )
    assert rows == [{"operation": "erased", "key": None, "value": None, "cas": None}]
    again = erase(following.lake, Here(), SECRET)
    assert again.files_rewritten == 0
    bucket.set_many({f"k{i}": b"two" for i in range(200)})
    partition = bucket.partition_of(SECRET)
    bucket.promote(partition, to=bucket.seqnos()[partition] - 2)
    following.settle()
    assert following.differences() == []


@pytest.mark.parametrize("commits", [0, 1, 2, 3])
def test_an_erasure_that_was_killed_is_completed_by_the_next(
    commits: int, following: Following, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    history(following, bucket)
    bucket.delete(SECRET)
    following.settle()
    commit, left = LakeTable.commit, [commits]

    class Killed(Exception):
        pass

    def dying(table: LakeTable, **what: Any) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        commit(table, **what)

    def no_vacuum(*_: object, **__: object) -> list[str]:
        raise Killed

    monkeypatch.setattr(LakeTable, "commit", dying)
    monkeypatch.setattr(erasing, "vacuum", no_vacuum)
    with pytest.raises(Killed):
        erase(following.lake, Here(), SECRET)
    monkeypatch.undo()
    assert found(following.root)
    erase(Lake(following.root), Here(), SECRET)
    assert found(following.root) == []
    following.lake.reload()
    assert following.differences() == []


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["erase"], "erase takes one key"),
        (["compact", "k"], "erase takes one key"),
        (["erase", "k"], "nothing was erased"),
    ],
)
def test_erase_asks_first(
    arguments: list[str],
    printed: str,
    following: Following,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("no\n"))
    assert main(["lake", str(following.root), *arguments]) == 2
    assert printed in capsys.readouterr().err

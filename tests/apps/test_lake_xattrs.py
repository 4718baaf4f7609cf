"""Extended attributes of Couchbase's documents in a lake: a column of their own beside the document.

The node has them in its store as Couchbase would send them; tests/client/test_xattrs.py has the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.apps.test_lake_node import Here
from tests.client.test_xattrs import ATTRIBUTES, JSON, XATTR, join
from tests.server.inside import Running
from upper.apps.lake.erase import erase
from upper.apps.lake.files import read, write
from upper.apps.lake.lake import Lake
from upper.apps.lake.query import query
from upper.apps.lake.schema import CHANGES, LATEST, LakeLayout
from upper.apps.lake.sync import Sync
from upper.apps.lake.verify import verify
from upper.model.values import partition_of
from upper.pipeline.source import BucketSource


class Followed:
    """A node with documents that have attributes, and a lake that follows it over DCP."""

    def __init__(self, running: Running, root: Path) -> None:
        self.running, self.root = running, root
        self.feed = BucketSource(f"couchbase://127.0.0.1:{running.port}/default", name="sync:lake")
        self.lake = Lake.create(root, LakeLayout("default", 4, 2))
        self.sync = Sync(self.lake, self.feed, Here())

    def put(self, key: bytes, document: bytes, attributes: dict[str, bytes] | None = None) -> None:
        store = self.running.bucket.partitions[partition_of(key, 4)]
        value = join(attributes, document) if attributes else document
        kind = JSON | XATTR if attributes else JSON
        self.running.call(lambda: store.write(key, value, data_type=kind))

    def settle(self) -> None:
        self.running.call(self.running.bucket.commit)
        self.sync.round()
        while self.sync.incomplete:
            self.sync.round()
        self.sync.refresh()

    def differences(self) -> list[str]:
        return [one.what for one in verify(self.lake, self.feed, Here()).differences]

    def shown(self, table: str) -> dict[str, tuple[Any, Any, Any]]:
        sql = f"select text(key) as key, text(value) as value, data_type, xattrs from {table}"
        return {row["key"]: (row["value"], row["data_type"], row["xattrs"]) for row in query(self.root, sql)}


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Followed]:
    with Running(tmp_path / "node") as running:
        made = Followed(running, tmp_path / "lake")
        yield made
        made.feed.close()


def test_a_lake_keeps_documents_and_their_attributes_apart(followed: Followed) -> None:
    followed.put(b"with", b'{"a": 1}', ATTRIBUTES)
    followed.put(b"without", b"{}")
    followed.settle()
    assert followed.differences() == []
    for table in (CHANGES, LATEST):
        found = followed.shown(table)
        document, kind, attributes = found["with"]
        assert (document, kind) == ('{"a": 1}', JSON)
        assert json.loads(attributes) == {name: json.loads(of) for name, of in ATTRIBUTES.items()}
        assert found["without"] == ("{}", JSON, None)
    (row,) = query(followed.root, "select xattrs->>'$._sync.rev' as rev from latest where xattrs is not null")
    assert row == {"rev": "1-ab"}
    followed.put(b"with", b'{"a": 2}')  # the newest change has none
    followed.settle()
    assert followed.shown(LATEST)["with"] == ('{"a": 2}', JSON, None)
    assert followed.differences() == []


def test_verify_compares_attributes(followed: Followed) -> None:
    followed.put(b"with", b"{}", ATTRIBUTES)
    followed.settle()
    lake = followed.lake
    (held,) = lake.latest.files()
    rows = read(lake.root, LATEST, [held])
    at = rows.schema.get_field_index("xattrs")
    wrong = rows.set_column(at, rows.schema.field(at), pa.array(['{"owner":"bob"}']))
    lake.commit_latest(
        add=write(lake.root, LATEST, wrong, group=held.group),
        remove=[held],
        lake_position=lake.latest.lake_position,
    )
    assert set(followed.differences()) == {
        "`latest` is not what the bucket has",
        "`latest` is not what `changes` makes",
    }


def test_an_erased_key_leaves_no_attributes(followed: Followed) -> None:
    followed.put(b"with", b"{}", {"owner": b'"ann"'})
    followed.put(b"other", b"{}", {"owner": b'"bob"'})
    followed.settle()
    erase(followed.lake, Here(), b"with", live=True)
    rows = query(followed.root, "select operation, xattrs from changes order by operation")
    assert [(row["operation"], row["xattrs"]) for row in rows] == [
        ("erased", None),
        ("mutation", '{"owner":"bob"}'),
    ]

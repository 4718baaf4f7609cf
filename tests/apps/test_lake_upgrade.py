"""A lake that was written before a column existed, or before commits carried differences, goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.fs as fs
import pytest
from deltalake import DeltaTable

from tests.apps.bucket_model import ModelBucket
from tests.apps.test_lake_latest import Here
from upper.apps.lake.lake import Lake
from upper.apps.lake.query import query
from upper.apps.lake.schema import CHANGES, LATEST, LakeLayout, file_schema, table_schema
from upper.apps.lake.sync import Sync
from upper.apps.lake.verify import verify
from upper.client import bulk
from upper.model.values import partition_of

# Columns that the layout of older versions does not have, and what every change of the model has there.
NEWER = {"data_type": 0, "xattrs": '{"rev":1}'}


@contextmanager
def older_layout(newer: str) -> Iterator[None]:
    whole = bulk.change_schema()
    older = whole.remove(whole.get_field_index(newer))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk, "change_schema", lambda: older)
        _forget_schemas()
        yield
    _forget_schemas()


def _forget_schemas() -> None:
    file_schema.cache_clear()
    table_schema.cache_clear()


def follow(root: Path, bucket: ModelBucket, keys: range) -> Lake:
    for number in keys:
        key = b"%d" % number
        bucket.do(partition_of(key, 4), "mutation", key, b"value")
    lake = Lake.create(root, LakeLayout("default", 4, 2))
    sync = Sync(lake, bucket, Here())
    sync.round()
    sync.refresh()
    return lake


@pytest.mark.parametrize("newer", NEWER)
def test_a_lake_without_a_column_gets_it_and_goes_on(tmp_path: Path, newer: str) -> None:
    root, bucket = tmp_path / "lake", ModelBucket(4)
    with older_layout(newer):
        lake = follow(root, bucket, range(40))
        assert (
            newer
            not in DeltaTable(root / LATEST)
            .to_pyarrow_table(filesystem=fs.SubTreeFileSystem(str(root / LATEST), fs.LocalFileSystem()))
            .column_names
        )
    lake = follow(root, bucket, range(30, 60))
    assert verify(lake, bucket, Here()).differences == []
    for table in (CHANGES, LATEST):
        seen = DeltaTable(root / table).to_pyarrow_table(
            filesystem=fs.SubTreeFileSystem(str(root / table), fs.LocalFileSystem())
        )
        assert set(seen[newer].to_pylist()) >= {None, NEWER[newer]}
    rows = list(query(root, f"select {newer} is null as old, count(*) as n from latest group by all"))
    assert sorted(row["n"] for row in rows) == [30, 30]
    assert {row["old"] for row in rows} == {False, True}
    for partition in range(4):
        bucket.promote(partition, 1)
    lake = follow(root, bucket, range(60, 70))
    assert verify(lake, bucket, Here()).differences == []

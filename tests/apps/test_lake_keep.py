"""Lakes that keep `changes` only, or `latest` only: half as large, and as correct."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.apps.bucket_model import ModelBucket
from tests.apps.test_lake_node import Here
from upper.apps.lake.lake import Lake
from upper.apps.lake.maintenance import compact, forget, remove_retired, trim
from upper.apps.lake.query import query
from upper.apps.lake.schema import Keep, LakeLayout
from upper.apps.lake.sync import Sync
from upper.apps.lake.verify import verify
from upper.cli.main import main
from upper.errors import InvalidArguments

PARTITIONS = 4
KEYS = [b"a", b"b", b"c"]
happenings = st.one_of(
    st.tuples(st.just("mutation"), st.integers(0, PARTITIONS - 1), st.sampled_from(KEYS)),
    st.tuples(st.just("deletion"), st.integers(0, PARTITIONS - 1), st.sampled_from(KEYS)),
    st.tuples(st.just("promote"), st.integers(0, PARTITIONS - 1), st.integers(0, 3)),
)
turns = st.lists(
    st.tuples(st.lists(happenings, max_size=6), st.sampled_from(["round", "refresh", "merge"])), max_size=8
)


class Kept:
    def __init__(self, root: Path, keep: Keep) -> None:
        self.bucket, self.root = ModelBucket(PARTITIONS), root
        self.lake = Lake.create(root, LakeLayout("default", PARTITIONS, 2, keep))
        self.sync = Sync(self.lake, self.bucket, Here())

    def happen(self, what: str, partition: int, more: Any) -> None:
        if what == "promote":
            self.bucket.promote(partition, max(0, self.bucket.partitions[partition].high - more))
        else:
            self.bucket.do(partition, what, more, b"v%d" % len(self.bucket.partitions[partition].ops))

    def settle(self) -> None:
        self.sync.round()
        while self.sync.incomplete:
            self.sync.round()

    def check(self) -> None:
        self.settle()
        seen = {
            (row["partition"], row["key"]): row["value"]
            for row in query(self.root, "select partition, key, value from latest")
        }
        assert seen == {
            (partition.id, key): op.value
            for partition in self.bucket.partitions
            for key, op in partition.items().items()
        }
        self.sync.refresh()
        assert self.differences() == []

    def differences(self) -> list[str]:
        found = [one.what for one in verify(self.lake, self.bucket, Here()).differences]
        return [what for what in found if "outside their partition" not in what]  # the story picks any

    def rows(self, table: str) -> int:
        home = next(each for each in self.lake.tables if each.name == table)
        return sum(file.rows for file in home.files())


@pytest.mark.parametrize("keep", ["changes", "latest"])
@pytest.mark.timeout(200)
@settings(max_examples=8, deadline=None)
@given(story=turns)
def test_a_lake_without_one_table_ends_equal_to_the_bucket(
    keep: Keep, story: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    kept = Kept(tmp_path_factory.mktemp("keep") / "lake", keep)
    for events, work in story:
        for event in events:
            kept.happen(*event)
        kept.settle()
        if work != "round":
            kept.sync.refresh()
            forget(kept.lake, Here())
        if work == "merge":
            compact(kept.lake, Here())
    kept.check()
    forget(kept.lake, Here())
    assert kept.differences() == []
    if keep == "changes":
        assert kept.rows("latest") == 0
    else:
        assert kept.rows("changes") == 0, "`latest` has everything"


def test_what_was_forgotten_leaves_the_disk(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "lake", "latest")
    for number in range(40):
        kept.happen("mutation", number % PARTITIONS, b"%d" % number)
    kept.settle()
    kept.sync.refresh()
    assert forget(kept.lake, Here()) == 40
    assert forget(kept.lake, Here()) == 0
    assert remove_retired(kept.lake, keep=0.0) > 0
    assert not list((tmp_path / "lake" / "changes").rglob("*.parquet"))
    kept.check()


def test_changes_alone_cannot_be_trimmed_and_verify_sees_damage(tmp_path: Path) -> None:
    from datetime import UTC, datetime

    kept = Kept(tmp_path / "lake", "changes")
    kept.happen("mutation", 1, b"a")
    kept.check()
    with pytest.raises(InvalidArguments, match="items would be lost"):
        trim(kept.lake, Here(), older_than=datetime.now(UTC))
    # A change that the bucket has and the lake lacks: the position includes it.
    held = kept.bucket.partitions[1]
    held.ops[-1] = held.ops[-1]._replace(value=b"another value")
    assert kept.differences() == ["`latest` is not what the bucket has"]


def test_what_a_lake_keeps_is_decided_when_it_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.nodes import Node

    lake = str(tmp_path / "lake")
    with Node(tmp_path / "node", partitions=4) as node:
        assert main(["set", node.url, "k", "v"]) == 0
        sync = ["sync", node.url, lake, "--local", "--once", "--json"]
        assert main([*sync, "--keep", "changes"]) == 0
        assert main([*sync, "--keep", "latest"]) == 2
        assert "keeps changes, not latest, since it was made" in capsys.readouterr().err
        assert main([*sync, "--trim", "1d"]) == 2
        assert main(sync) == 0
        capsys.readouterr()
        assert main(["query", lake, "select count(*) as n from latest", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"n": 1}
        assert main(["verify", node.url, lake, "--local"]) == 0
        assert "1 live keys and 1 changes" in capsys.readouterr().out

"""Indexes of a lake: what they find is what the bucket has, through rollbacks and crashes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.apps.test_lake_model import (
    KEYS,
    PARTITIONS,
    TURNS,
    Events,
    Killed,
    World,
    filled,
    happenings,
    killed_around_commit,
    once,
    take,
)
from upper.apps.index import output as index_output
from upper.apps.index.definitions import load, read
from upper.apps.index.documents import rewritten
from upper.apps.index.manage import create, drop, rebuild, refresh, reports
from upper.apps.index.output import IndexGroup, IndexOutput
from upper.apps.index.search import search
from upper.apps.lake.derived import bring_forward
from upper.apps.lake.erase import erase
from upper.apps.lake.outputs import OutputFollower
from upper.apps.lake.store import ObjectStore
from upper.apps.lake.tables import FilesReplaced
from upper.apps.lake.tokens import WriteLost, WriteToken
from upper.cli.main import main
from upper.errors import BadCheckpoint, InvalidArguments, TimedOut
from upper.model.values import partition_of

tantivy: Any = pytest.importorskip("tantivy")
NOW = datetime(2026, 1, 31, tzinfo=UTC)


def value(number: int) -> bytes:
    return json.dumps(
        {"title": f"word{number} all", "price": number, "at": {"city": f"c{number % 3}"}}
    ).encode()


def happen(world: World, events: Events) -> None:
    """As in the tests of the lake, with values that are documents, and some that are not."""
    bucket = world.bucket
    for number, (what, partition, key, back) in enumerate(events):
        if what == "promote":
            bucket.promote(partition, max(0, bucket.partitions[partition].high - back))
        elif what == "flush":
            bucket.do(partition, "flush")
        else:
            data = (b"no json" if number % 5 == 4 else value(number)) if what == "mutation" else None
            bucket.do(partition, what, key, data)


def made(world: World, name: str = "all", **options: Any) -> None:
    create(world.root, name, text=["title"], fields=["price", "at.city"], now=NOW, **options)


def found(root: Path, query: str, **options: Any) -> list[tuple[bytes, int]]:
    hits = search(root, "all", query, limit=1000, **options)
    assert hits.total == len(hits.hits)
    return sorted((hit.key, hit.fields["price"]) for hit in hits.hits)


def live(world: World) -> list[tuple[bytes, int]]:
    items = ((key, op.value) for p in world.bucket.partitions for key, op in p.items().items())
    return sorted((key, json.loads(data or b"")["price"]) for key, data in items if data != b"no json")


@contextmanager
def killed_around_group(number: int) -> Iterator[None]:
    """A worker, and the driver with it, dies before the commit of a group, or right after it."""
    run, left = IndexGroup.__call__, [number]

    def dying(task: IndexGroup) -> int:
        if left[0] == 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(index_output, "position_document", die)
                run(task)
        group = run(task)
        if left[0] == 1:
            raise Killed
        left[0] -= 2
        return group

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IndexGroup, "__call__", dying)
        with suppress(Killed):
            yield


def die(_: object) -> None:
    raise Killed


@pytest.mark.timeout(300)
@settings(max_examples=10)
@given(
    st.lists(
        st.tuples(
            happenings,
            happenings,
            st.sampled_from([*TURNS, "follow", "follow", "follow", "rebuild"]),
            st.one_of(st.none(), st.integers(0, 8)),  # the commit around which the driver is killed
        ),
        min_size=1,
        max_size=5,
    )
)
def test_an_index_ends_equal_to_the_bucket(story: list[tuple[Events, Events, str, int | None]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory))
        made(world)
        follower = OutputFollower(world.lake, world.runner, None)
        for before, during, turn, killed in story:
            happen(world, before)
            world.bucket.between = once(world.bucket, [e for e in during if e[0] != "mutation"])
            at = -1 if killed is None else killed
            with killed_around_commit(at), killed_around_group(at):
                if turn in ("follow", "rebuild"):
                    world.round()
                    if turn == "rebuild":
                        rebuild(world.root, "all")
                    bring_forward(world.lake, IndexOutput(world.lake, read(world.root, "all")), world.runner)
                else:
                    take(world, turn)
            if killed is not None:
                world.open()
                world.remember()
                if turn == "erase":
                    world.erase(KEYS[0])
                follower = OutputFollower(world.lake, world.runner, None)
        world.settle()
        assert follower.step()
        if world.lake.changes.lake_position.batch:
            assert found(Path(directory), "*") == live(world)
            assert reports(world.lake)[0].documents == len(live(world))
            assert [report.behind for report in reports(world.lake)] == [0]


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    for number in range(60):
        key = b"k%d" % number
        world.bucket.do(partition_of(key, PARTITIONS), "mutation", key, value(number))
    world.settle()
    made(world)
    refresh(world.lake, world.runner, "all")
    return world


def test_words_fields_ranges_and_phrases_are_found(world: World, tmp_path: Path) -> None:
    def keys(query: str) -> set[bytes]:
        return {key for key, _ in found(tmp_path, query)}

    assert keys("word7") == keys("title:word7") == {b"k7"}
    assert keys('"word7 all"') == {b"k7"}
    assert keys("word7 word8") == set()
    assert keys("word7 OR word8") == {b"k7", b"k8"}
    assert len(keys("all")) == 60
    assert keys("price:[10 TO 12]") == {b"k10", b"k11", b"k12"}
    assert keys("all price:>57") == {b"k58", b"k59"}
    assert keys("at.city:c1 AND price:<5") == {b"k1", b"k4"}
    hits = search(tmp_path, "all", "all", limit=3)
    assert (hits.total, len(hits.hits)) == (60, 3)
    assert search(tmp_path, "all", "word7").hits[0].fields == {"price": 7, "at": {"city": "c1"}}
    with pytest.raises(
        InvalidArguments, match=r"tantivy rejects the query: .*nowhere.*the index has title, price"
    ):
        found(tmp_path, "nowhere:x")
    with pytest.raises(InvalidArguments, match="tantivy rejects the query: Syntax Error"):
        found(tmp_path, "((")


def test_names_of_fields_in_quotes_are_words() -> None:
    assert rewritten('price:3 "price:3" my.price:1 price : 4', ["price"]) == (
        '_fields.price:3 "price:3" my.price:1 _fields.price : 4'
    )


def test_a_rollback_brings_the_older_version_of_a_key_back(world: World, tmp_path: Path) -> None:
    key = b"k7"
    partition = partition_of(key, PARTITIONS)
    held = world.bucket.partitions[partition]
    high = held.high
    world.bucket.do(partition, "mutation", key, value(1007))
    world.bucket.do(partition, "mutation", b"lost", value(1008))
    branch = held.log.branch
    world.settle()
    refresh(world.lake, world.runner, "all")
    assert found(tmp_path, "word1007") == [(key, 1007)]
    world.bucket.promote(partition, high)
    world.settle()
    refresh(world.lake, world.runner, "all")
    assert found(tmp_path, "word7") == [(key, 7)]
    assert found(tmp_path, "word1007 OR word1008") == []
    with pytest.raises(WriteLost):
        found(tmp_path, "word7", after=[WriteToken(partition, high + 1, branch)])  # type: ignore[arg-type]


def test_a_search_after_a_write_waits_for_the_index(world: World, tmp_path: Path) -> None:
    partition = partition_of(b"new", PARTITIONS)
    world.bucket.do(partition, "mutation", b"new", value(77))
    world.settle()
    held = world.bucket.partitions[partition]
    token = WriteToken(partition, held.high, held.log.branch)
    with pytest.raises(TimedOut, match="the index 'all' has not reached the write"):
        found(tmp_path, "word77", after=[token], timeout=0.1)
    refresh(world.lake, world.runner, "all")
    assert found(tmp_path, "word77", after=[token]) == [(b"new", 77)]


def test_an_index_is_searched_while_another_build_of_it_is_made(world: World, tmp_path: Path) -> None:
    before = read(world.root, "all")
    rebuild(world.root, "all")
    assert [report.state for report in reports(world.lake)] == ["building"]
    assert len(found(tmp_path, "all")) == 60
    refresh(world.lake, world.runner, "all")
    after = read(world.root, "all")
    assert after.served == after.wanted != before.wanted
    assert len(found(tmp_path, "all")) == 60
    assert not before.directory(world.root, before.served).exists()
    assert [report.state for report in reports(world.lake)] == ["ready"]


def test_a_task_of_an_earlier_driver_changes_nothing(world: World, tmp_path: Path) -> None:
    output = IndexOutput(world.lake, read(world.root, "all"))
    stale = IndexOutput(world.lake, read(world.root, "all"))
    tasks: list[IndexGroup] = []
    key = b"k1"
    world.bucket.do(partition_of(key, PARTITIONS), "mutation", key, value(501))
    world.settle()

    class Kept:
        width = 4

        def run(self, given: Any) -> Any:
            tasks.extend(task.task for task in given)
            raise Killed

    with suppress(Killed):
        bring_forward(world.lake, stale, Kept())
    world.bucket.do(partition_of(key, PARTITIONS), "mutation", key, value(502))
    world.settle()
    bring_forward(world.lake, output, world.runner)
    for task in tasks:
        with pytest.raises(FilesReplaced, match="was changed meanwhile"):
            task()
    assert found(tmp_path, "word502") == [(key, 502)]


def test_an_erased_key_is_in_no_file_of_the_index(world: World, tmp_path: Path) -> None:
    """tantivy keeps deleted documents until it merges their segment, so the group is built again."""
    key = b"k9"
    partition = partition_of(key, PARTITIONS)
    group = world.lake.layout.group_of(partition)
    before = segments(tmp_path, group)
    world.bucket.do(partition, "deletion", key)
    world.settle()
    erase(world.lake, world.runner, key)
    assert before
    assert not before & segments(tmp_path, group)
    assert len(found(tmp_path, "all")) == 59


def segments(root: Path, group: int) -> set[str]:
    return {path.name for path in (root / "indexes").glob(f"*/{group}/*.store")}


def test_a_sync_builds_and_removes_indexes(world: World, tmp_path: Path) -> None:
    follower = OutputFollower(world.lake, world.runner, None)
    follower.step()
    create(world.root, "other", text=["title"], fields=[], now=NOW)
    with pytest.raises(BadCheckpoint, match="the index 'other' is not built yet"):
        search(tmp_path, "other", "all")
    OutputFollower(world.lake, world.runner, None).step()
    assert search(tmp_path, "other", "all").total == 60
    drop(world.root, "other")
    assert [index.name for index in load(world.root)] == ["all"]
    assert len(list((tmp_path / "indexes").iterdir())) == 1
    (tmp_path / ".indexes/all.json").unlink()  # as if dropped while a sync holds the lake
    OutputFollower(world.lake, world.runner, None).step()
    assert list((tmp_path / "indexes").iterdir()) == []


def test_an_index_may_be_beside_the_lake(tmp_path: Path) -> None:
    world = filled(tmp_path / "lake")
    made(world, place=tmp_path / "elsewhere")
    world.bucket.do(0, "mutation", b"k", value(1))
    world.settle()
    refresh(world.lake, world.runner, "all")
    assert found(tmp_path / "lake", "word1") == [(b"k", 1)]
    assert (tmp_path / "elsewhere").is_dir()
    assert not (tmp_path / "lake" / "indexes").exists()
    drop(world.root, "all")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_an_object_store_holds_no_index() -> None:
    with pytest.raises(InvalidArguments, match=r"tantivy cannot keep an index in s3://b/lake; .* --path DIR"):
        create(ObjectStore("s3://b/lake"), "all", text=["title"], fields=[], now=NOW)


def test_without_tantivy_the_extra_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tantivy", None)
    with pytest.raises(InvalidArguments, match=r"pip install 'upper-kv\[search\]'"):
        search(tmp_path, "all", "x")
    assert not OutputFollower(world.lake, world.runner, None).step()
    assert "index all: indexes need tantivy" in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "fields", "printed"),
    [
        ("Big", ["title"], [], "is not a name of an index"),
        ("x", [], [], "at least one path"),
        ("x", ["_id"], [], "is not a path in"),
        ("x", ["a"], ["a"], "is named twice"),
        ("all", ["a"], [], "there is an index 'all' already"),
    ],
)
def test_a_bad_definition_is_refused(
    world: World, name: str, text: list[str], fields: list[str], printed: str
) -> None:
    with pytest.raises(InvalidArguments, match=printed):
        create(world.root, name, text=text, fields=fields, now=NOW)


def test_the_verbs_create_show_search_and_drop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(tmp_path)
    for number in range(20):
        key = b"k%d" % number
        world.bucket.do(partition_of(key, PARTITIONS), "mutation", key, value(number))
    world.settle()
    lake = str(tmp_path)
    assert main(["index", "create", lake, "a", "--text", "title", "--fields", "price", "--local"]) == 0
    assert "index a: 20 documents" in capsys.readouterr().out
    assert main(["search", lake, "a", "price:>17"]) == 0
    assert "k18" in capsys.readouterr().out
    assert main(["search", lake, "a", "all", "--limit", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["total"], len(shown["hits"])) == (20, 2)
    assert main(["index", "status", lake, "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["behind"] == 0
    assert main(["index", "rebuild", lake, "a", "--local"]) == 0
    assert main(["index", "list", lake]) == 0
    assert main(["index", "drop", lake, "a"]) == 0
    assert main(["search", lake, "a", "x"]) == 2
    assert "there is no index 'a'" in capsys.readouterr().err

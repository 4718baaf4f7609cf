"""Restoring real buckets from a lake, with the workers in this process; tests/spark has the same on Spark."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import upper
from tests.apps.test_lake_node import Following, Here
from tests.nodes import Node
from upper.apps.backup.commits import find
from upper.apps.backup.restore import Mode, NotEmpty, Restored, RestoreOptions, restore
from upper.apps.backup.target import BucketTarget
from upper.errors import KeyNotFound
from upper.model.values import Cas
from upper.pipeline.target import Task

T = TypeVar("T")
Everything = dict[bytes, tuple[bytes, upper.Metadata]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("source") / "node", partitions=16) as node:
        yield node


@pytest.fixture(scope="module", params=[4, 64], ids=["4 partitions", "64 partitions"])
def target(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("target") / "node", partitions=request.param) as node:
        yield node


@pytest.fixture
def here(source: Node) -> Iterator[Any]:
    with upper.connect(source.url) as bucket:
        bucket.flush()
        yield bucket


@pytest.fixture
def there(target: Node) -> Iterator[Any]:
    with upper.connect(target.url) as bucket:
        bucket.flush()
        yield bucket


@pytest.fixture
def following(tmp_path: Path, source: Node) -> Iterator[Following]:
    made = Following(tmp_path / "lake", source)
    yield made
    made.feed.close()


def everything(bucket: Any) -> Everything:
    return {key: (item.value, bucket.metadata(key)) for key, item in bucket.scan()}


def run(
    following: Following,
    target: Node,
    mode: Mode = "empty",
    *,
    runner: Any = None,
    number: int | None = None,
    **options: Any,
) -> Restored:
    bucket = BucketTarget(target.url)
    try:
        commit = find(following.lake, number=number)
        return restore(following.lake, runner or Here(), bucket, commit, RestoreOptions(mode, **options))
    finally:
        bucket.close()


def test_items_come_back_with_all_their_metadata(
    following: Following, here: Any, there: Any, target: Node
) -> None:
    for number in range(200):
        here.set(f"k{number}", b"v" * number, flags=number * 20_000_000 % 2**32, expiry=number % 3 * 10_000)
    here.set_many({f"k{number}": b"again" for number in range(50)})
    here.copy_many([upper.Copy(key=b"json", value=b"{}", revision=2**40, cas=Cas(7), data_type=1)])
    here.delete("k100")
    locked = here.get_and_lock("k101", 30)
    following.settle()
    here.unlock("k101", locked.cas)
    # Tombstones with higher revisions do not keep what is restored out.
    there.copy_many([upper.Copy(key=b"k1", value=None, revision=2**50, cas=Cas(9))])
    done = run(following, target)
    ours, theirs = everything(here), everything(there)
    _, unlocked = theirs.pop(b"k101")
    assert (unlocked.cas, unlocked.revision) == (locked.cas, ours.pop(b"k101")[1].revision - 1)
    assert theirs == ours
    assert (done.items, done.written, done.present, done.deleted) == (200, 200, 0, 0)
    there.set("k101", b"a restored item is not locked")


def test_an_older_commit_is_restored_by_its_number(
    following: Following, here: Any, there: Any, target: Node
) -> None:
    here.set_many({f"k{number}": b"one" for number in range(100)})
    following.settle()
    first = everything(here)
    here.set_many({f"k{number}": b"two" for number in range(0, 100, 2)})
    here.delete_many([f"k{number}" for number in range(10)])
    following.settle()
    run(following, target, number=find(following.lake).number - 1)
    assert everything(there) == first
    assert run(following, target, "overwrite").written == 45
    assert everything(there) == everything(here)


def test_only_keys_with_the_prefix_are_restored(
    following: Following, here: Any, there: Any, target: Node
) -> None:
    here.set_many({f"{kind}:{number}": kind for kind in ("user", "order") for number in range(20)})
    following.settle()
    there.set("order:mine", b"stays")
    there.set("user:mine", b"goes")
    done = run(following, target, "overwrite", prefix=b"user:")
    assert (done.items, done.written, done.deleted) == (20, 20, 1)
    assert set(there.keys()) == {b"order:mine", *(b"user:%d" % number for number in range(20))}


def test_a_bucket_with_other_items_is_refused_and_left_as_it_is(
    following: Following, here: Any, there: Any, target: Node
) -> None:
    here.set_many({f"k{number}": b"v" for number in range(20)})
    following.settle()
    for key in ("k3", "another"):
        there.flush()
        there.set(key, b"mine")
        with pytest.raises(NotEmpty, match=r"it has 1 items that are not of commit"):
            run(following, target)
        assert list(there.scan()) == [(key.encode(), there.get(key))]
    there.flush()
    assert run(following, target, dry_run=True).written == 20
    assert list(there.keys()) == []


def test_merging_keeps_the_newer_version_of_each_item(
    following: Following, here: Any, there: Any, target: Node
) -> None:
    here.set_many({f"k{number}": b"old" for number in range(20)})
    following.settle()
    run(following, target)
    there.set("k3", b"newer")
    there.set("mine", b"stays")
    there.delete("k4")
    there.copy_many([upper.Copy(key=b"k5", value=b"older", revision=1, cas=Cas(1))], force=True)
    done = run(following, target, "merge")
    assert there.get("k3").value == b"newer"
    assert there.get("mine").value == b"stays"
    assert there.get("k5").value == b"old"
    with pytest.raises(KeyNotFound):
        there.get("k4")  # its deletion is newer
    assert (done.written, done.newer, done.present) == (1, 2, 17)


def test_what_has_expired_since_is_left_out(
    following: Following, here: Any, there: Any, target: Node
) -> None:
    here.set_many({f"k{number}": b"v" for number in range(20)}, expiry=100)
    here.set("stays", b"v")
    following.settle()
    bucket = BucketTarget(target.url)
    later = time.time() + 200
    done = restore(
        following.lake, Here(), bucket, find(following.lake), RestoreOptions(), clock=lambda: later
    )
    bucket.close()
    assert (done.items, done.written, done.expired) == (21, 1, 20)
    assert list(there.keys()) == [b"stays"]


class Dying:
    """Does some of the tasks, and ends."""

    width = 2

    def __init__(self, tasks: int) -> None:
        self._tasks = tasks

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        for task in tasks[: self._tasks]:
            task()
        raise KeyboardInterrupt


def test_a_restore_that_was_stopped_writes_only_what_is_missing(
    following: Following, here: Any, there: Any, target: Node
) -> None:
    here.set_many({f"k{number}": b"v" for number in range(400)})
    following.settle()
    with pytest.raises(KeyboardInterrupt):
        run(following, target, runner=Dying(2))
    before = len(list(there.keys()))
    assert 0 < before < 400
    done = run(following, target)
    assert (done.present, done.written) == (before, 400 - before)
    assert everything(there) == everything(here)


def test_rows_of_arrow_are_copied_like_events(here: Any, there: Any, source: Node) -> None:
    here.set_many({f"k{number}": b"v" for number in range(50)}, flags=2**32 - 1, expiry=10_000)
    here.delete("k1")
    here.get_and_lock("k2", 30)
    rows = pa.Table.from_batches(here.changes_arrow(until="now"))
    assert there.copy_arrow(rows) == [True] * 50
    free = rows.filter(pc.not_equal(rows["key"], b"k2"))
    assert there.copy_arrow(free) == [False] * 49, "the same change has no effect"
    assert everything(there) == everything(here)  # the CAS of a locked item is hidden on both sides
    assert there.metadata("k1") == here.metadata("k1")
    with pytest.raises(upper.UpperError, match="locked"):
        there.set("k2", b"v")


def test_a_copy_of_a_row_without_cas_is_refused(there: Any) -> None:
    rows = pa.table({"key": [b"a", b"b"], "value": [b"", b""], "revision": [1, 1], "cas": [5, 0]})
    with pytest.raises(upper.UpperError, match="needs the revision and the CAS"):
        there.copy_arrow(rows)

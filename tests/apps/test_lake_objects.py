"""A lake in an object store: the same guarantees as in a directory, on a real S3 server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from hypothesis import HealthCheck, given, settings

import upper
from tests.apps.test_lake_model import (
    PARTITIONS,
    SET,
    Here,
    Killed,
    Story,
    World,
    happen,
    live_through,
    turns,
)
from tests.apps.test_lake_node import LAYOUT
from tests.apps.test_lake_node import Here as HereToo
from tests.nodes import Node
from tests.objects import BUCKET, KEY, SECRET, object_store
from upper.apps.lake.lake import Lake, held
from upper.apps.lake.maintenance import compact, remove_retired
from upper.apps.lake.position import LakePosition
from upper.apps.lake.query import query
from upper.apps.lake.schema import CHANGES, LATEST, LakeLayout
from upper.apps.lake.store import LakeStore, LocalStore, ObjectStore, open_store
from upper.apps.lake.sync import Sync
from upper.apps.lake.tables import LakeTable
from upper.apps.lake.verify import verify
from upper.cli.main import main
from upper.errors import DirectoryInUse, InvalidArguments
from upper.pipeline.source import BucketSource

NUMBERS = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with object_store(tmp_path_factory.mktemp("s3")) as environment:
        yield environment


@pytest.fixture
def url(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a lake that does not exist yet; the environment has the credentials."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/lake-{next(NUMBERS)}"


@pytest.mark.slow
@pytest.mark.timeout(300)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns)
def test_a_lake_in_an_object_store_ends_equal_to_the_bucket_whatever_happened(url: str, story: Story) -> None:
    live_through(World(f"{url}-{next(NUMBERS)}"), story)


def test_every_kind_of_work_is_done_in_an_object_store(url: str) -> None:
    work = ("round", "refresh", "due", "lost files", "merge", "trim", "foreign", "erase")
    live_through(World(url), [([SET] * 6, [("promote", 0, b"", 2)], [SET], turn, None) for turn in work])


@pytest.mark.parametrize("killed", range(6))
def test_a_driver_that_is_killed_around_any_commit_is_followed_by_the_next(url: str, killed: int) -> None:
    live_through(
        World(url),
        [
            ([SET] * 4, [], [], "refresh", None),
            ([("promote", 0, b"", 2), SET, ("mutation", 1, b"b", 0)], [], [], "refresh", killed),
        ],
    )


@contextmanager
def killed_before_operation(number: int, store: type[LakeStore] = ObjectStore) -> Iterator[list[int]]:
    """The driver dies before its operation of this number on the store: a put, a removal or a commit."""
    done = [0]
    with pytest.MonkeyPatch.context() as patch:

        def counted(real: Any) -> Any:
            def operation(*args: Any, **more: Any) -> Any:
                done[0] += 1
                if done[0] > number:
                    raise Killed  # also what would follow: a dead process cleans up nothing
                return real(*args, **more)

            return operation

        for kind, name in ((store, "write"), (store, "write_again"), (store, "remove"), (DeltaTable, COMMIT)):
            patch.setattr(kind, name, counted(getattr(kind, name)))
        yield done


COMMIT = "create_write_transaction"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_driver_that_is_killed_between_any_two_steps_is_followed_by_the_next(url: str) -> None:
    """A round with a rollback, its refresh and a merge, cut at every operation on the store in turn."""
    for number in range(100):
        world = World(f"{url}-{number}")
        happen(world.bucket, [SET] * 3)
        world.round()
        happen(world.bucket, [("promote", 0, b"", 1), SET, ("mutation", 1, b"b", 0)])
        with killed_before_operation(number) as done, suppress(Killed):
            world.round()
            world.sync.refresh()
            compact(world.lake, world.runner, crowded=1)
            remove_retired(world.lake, keep=0.0)
        world.open()
        world.settle()
        world.check()
        if done[0] <= number:
            break  # it was not killed any more
    assert number > 8, "there are not so few operations"


def test_a_bucket_is_restored_from_an_object_store(
    server: dict[str, str], url: str, node: Node, tmp_path: Path
) -> None:
    filled(url, node)
    with Node(tmp_path / "other", partitions=8) as other:
        command = [sys.executable, "-m", "upper", "restore", url, other.url, "--local", "--json"]
        env = {**os.environ, **server}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["written"] == 299
        with upper.connect(other.url) as bucket:
            assert bucket.get("k9").value == b"value 9"
    assert SECRET not in done.stdout + done.stderr


def test_a_query_of_one_partition_requests_no_file_of_others(url: str) -> None:
    world = World(url)
    happen(world.bucket, [("mutation", p, b"k%d" % p, 0) for p in range(PARTITIONS)])
    world.settle()
    world.sync.refresh()
    wanted = [file for file in world.lake.latest.files() if file.may_hold(0)]
    others = [file for file in world.lake.latest.files() if not file.may_hold(0)]
    assert wanted
    assert others
    for file in others:
        world.lake.root.remove(f"{LATEST}/{file.path}")
    rows = list(query(url, "select key from latest where partition = 0 and key = 'k0'"))
    assert rows == [{"key": b"k0"}]
    with pytest.raises((OSError, InvalidArguments)):
        list(query(url, "select key from latest where key = 'k0'"))


def test_a_file_is_imported_into_an_object_store_and_its_index_is_in_a_directory(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, index = tmp_path / "items.jsonl", tmp_path / "index"
    file.write_text(
        "".join(json.dumps({"key": f"k{n}", "value": {"title": f"word{n}"}}) + "\n" for n in range(20))
    )
    assert main(["import", str(file), url]) == 0
    assert main(["index", "create", url, "titles", "--text", "title", "--path", str(index), "--local"]) == 0
    with file.open("a") as more:
        more.write(json.dumps({"key": "k3", "value": {"title": "changed"}}) + "\n")
    assert main(["import", str(file), url]) == 0
    assert "1 of 21 rows written in 1 commit, 20 by an earlier import" in capsys.readouterr().out
    for word, keys in (("word4", ["k4"]), ("word3", []), ("changed", ["k3"])):
        assert main(["search", url, "titles", word, "--json"]) == 0
        assert [hit["key"] for hit in json.loads(capsys.readouterr().out)["hits"]] == keys
    assert main(["index", "status", url, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["documents"], shown["behind"], shown["state"]) == (20, 0, "ready")


def test_of_two_writers_of_a_version_the_store_accepts_one(url: str) -> None:
    race_for_versions(url)


def race_for_versions(url: str) -> None:
    LakeTable.create(url, CHANGES, LakeLayout("default", 4, 2))
    for step in range(1, 11):
        tables = [LakeTable(url, CHANGES) for _ in range(4)]
        start = Barrier(len(tables))

        def commit(number: int, step: int = step, tables: Any = tables, start: Barrier = start) -> int | None:
            position = LakePosition(batch=100 * step + number)
            start.wait()
            try:
                tables[number].commit(add=(), remove=(), lake_position=position, step=step)
            except DirectoryInUse:
                return None
            return position.batch

        with ThreadPoolExecutor(len(tables)) as pool:
            (won,) = filter(None, pool.map(commit, range(len(tables))))
        now = LakeTable(url, CHANGES)
        assert (now.version, now.lake_position.batch) == (step, won)


def test_a_commit_whose_answer_is_lost_counts_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that tries a conditional put again is refused because of its own first attempt."""
    world = World(url)
    happen(world.bucket, [SET] * 5)
    commit = DeltaTable.create_write_transaction

    def made_and_refused(table: DeltaTable, *what: Any, **more: Any) -> None:
        commit(table, *what, **more)
        monkeypatch.setattr(DeltaTable, "create_write_transaction", commit)
        raise CommitFailedError("the version exists")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", made_and_refused)
    world.round()
    happen(world.bucket, [SET] * 5)
    world.settle()
    world.check()


def test_of_two_drivers_one_loses_and_no_row_is_there_twice(url: str) -> None:
    world = World(url)
    happen(world.bucket, [SET] * 5)
    other = Sync(Lake(url), world.bucket, Here(world.bucket))
    with held(url):  # an object store has no locks
        world.round()
    with pytest.raises(DirectoryInUse, match="another sync"):
        other.round()
    world.settle()
    world.check()


def test_a_lake_does_not_begin_where_other_objects_are(url: str) -> None:
    store = open_store(url)
    store.write("letter.txt", b"dear reader")
    with pytest.raises(InvalidArguments, match="holds other files, such as 'letter"), held(store):
        pass
    assert store.read("letter.txt") == b"dear reader"
    with pytest.raises(FileNotFoundError):
        store.read("other.txt")
    with pytest.raises(FileNotFoundError):
        store.size("other.txt")
    store.remove("letter.txt")
    store.remove("letter.txt")
    assert store.names() == []


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path / "node", partitions=16) as running:
        yield running


def filled(url: str, node: Node) -> Lake:
    source = BucketSource(node.url)
    try:
        with upper.connect(node.url) as bucket:
            bucket.set_many({f"k{number}": f"value {number}" for number in range(300)})
            lake = Lake.create(url, LAYOUT)
            sync = Sync(lake, source, HereToo())
            sync.round()
            sync.refresh()
            bucket.delete("k7")
            sync.round()
        assert verify(lake, source, HereToo()).differences == []
    finally:
        source.close()
    return lake


def test_a_query_reads_the_store_and_merges_what_latest_lacks(url: str, node: Node) -> None:
    filled(url, node)
    assert [*query(url, "select operation, count(*) as n from changes group by 1 order by 1")] == [
        {"operation": "deletion", "n": 1},
        {"operation": "mutation", "n": 300},
    ]
    assert [*query(url, "select count(*) as n, count(distinct partition_group) as g from latest")] == [
        {"n": 299, "g": 4}
    ]
    one = "select text(value) as v from latest where partition = partition_of('k9') and key = 'k9'"
    assert [*query(url, one)] == [{"v": "value 9"}]
    assert [*query(url, "select * from lost")] == []
    with pytest.raises(InvalidArguments):
        list(query(url, "select * from read_csv('/etc/hostname')"))


def test_verbs_take_a_url_and_options_that_override_the_environment(
    server: dict[str, str], url: str, node: Node
) -> None:
    filled(url, node)
    env = {**os.environ, **server, "AWS_SECRET_ACCESS_KEY": "a-wrong-secret"}

    def run(*words: str, option: str = f"AWS_SECRET_ACCESS_KEY={SECRET}") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "upper", *words, "--storage-option", option, "--json"]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)

    shown = run("lake", url)
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["tables"][0]["rows"] == 301
    answer = run("query", url, "select count(*) as n from latest")
    assert json.loads(answer.stdout) == {"n": 299}
    exported = run("export", url, "-", "--format", "jsonl")
    assert len(exported.stdout.splitlines()) == 299, exported.stderr
    listed = run("backup", "list", url)
    assert len(listed.stdout.splitlines()) == 2, listed.stderr
    refused = run("query", url, "select 1", option="AWS_SECRET_ACCESS_KEY=another-wrong-secret")
    assert refused.returncode == 5
    assert f"{url} cannot be used (SignatureDoesNotMatch" in refused.stderr
    assert "Traceback" not in refused.stderr
    for printed in (shown, answer, exported, listed, refused):
        for secret in (SECRET, "a-wrong-secret", "another-wrong-secret"):
            assert secret not in printed.stdout + printed.stderr


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_sync_and_verify_work_on_spark_with_the_environment(
    server: dict[str, str], url: str, node: Node
) -> None:
    with upper.connect(node.url) as bucket:
        bucket.set_many({f"k{number}": "x" * 100 for number in range(2000)})
    env = {**os.environ, **server}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "upper", *words, "--master", "local[2]", "--json"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=140, check=False)
        assert done.returncode == 0, done.stderr
        assert SECRET not in done.stdout + done.stderr
        return done.stdout

    run("sync", node.url, url, "--once")
    verdict = json.loads(run("verify", node.url, url))
    assert (verdict["keys"], verdict["differences"]) == (2000, [])


def test_urls_are_checked_and_secrets_are_in_no_text(tmp_path: Path) -> None:
    for bad, printed in {
        "ftp://host/lake": "ftp:// is not supported",
        "s3://bucket": "a bucket and a path",
        "s3:///lake": "a bucket and a path",
        "abfss://account.dfs.core.windows.net/lake": "abfss://CONTAINER@ACCOUNT",
        f"s3://{KEY}:{SECRET}@bucket/lake": "credentials in the environment",
        f"s3://bucket/lake?secret={SECRET}": "credentials in the environment",
    }.items():
        with pytest.raises(InvalidArguments, match=printed) as error:
            open_store(bad)
        assert SECRET not in str(error.value)
    store = open_store("s3://bucket/some/lake/", {"AWS_SECRET_ACCESS_KEY": SECRET})
    assert isinstance(store, ObjectStore)
    assert (str(store), store.name) == ("s3://bucket/some/lake", "lake")
    assert store.path("changes/x") == "bucket/some/lake/changes/x"
    assert SECRET not in repr(store) + str(store)
    azure: Any = open_store("abfss://box@account.dfs.core.windows.net/lake")
    assert azure.path("x") == "box/lake/x"
    for local in (tmp_path, str(tmp_path), tmp_path.as_uri()):
        assert open_store(local) == LocalStore(tmp_path)

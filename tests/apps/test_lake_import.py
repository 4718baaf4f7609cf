"""An import into a lake is its history: every good row once, in order, whatever is killed on the way."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import upper
from tests.apps.test_lake_model import killed_around_commit
from tests.nodes import Node
from upper.apps.backup.audit import audit
from upper.apps.backup.commits import commits
from upper.apps.lake import files
from upper.apps.lake.lake import Lake
from upper.apps.lake.query import query
from upper.apps.lake.replay import by_partition
from upper.apps.lake.schema import CHANGES, LATEST, LakeLayout
from upper.apps.transfer.formats import RawRow
from upper.apps.transfer.imports import BadRow, Imported, ImportOptions
from upper.apps.transfer.lake_import import LakeImport, finish, open_imported
from upper.cli.main import main
from upper.model.values import partition_of
from upper.pipeline.local import LocalRunner

PARTITIONS = 4
keys = st.sampled_from(["a", "b", "c", "d", "e"])
good = st.tuples(keys, st.text(max_size=3))
rows_of_a_file = st.lists(st.one_of(good, st.none()), max_size=12)  # None: a bad row
kills = st.lists(st.integers(0, 9), max_size=3)


def raw(rows: list[tuple[str, str] | None]) -> Iterator[RawRow]:
    for number, row in enumerate(rows, 1):
        if row is None:
            yield RawRow(number, None, "?", "it is not JSON")
        else:
            yield RawRow(number, {"key": row[0], "value": row[1]}, "")


def run(root: Path, rows: list[tuple[str, str] | None], commit_rows: int) -> tuple[Imported, list[BadRow]]:
    lake, bad = open_imported(root, PARTITIONS), list[BadRow]()
    work = LakeImport(lake, ImportOptions(), commit_rows=commit_rows)
    done = work.run(lambda: raw(rows), reject=bad.append)
    finish(lake, LocalRunner(width=1))
    return done, bad


@settings(max_examples=30)
@given(st.lists(st.tuples(rows_of_a_file, kills, st.integers(1, 5)), min_size=1, max_size=3))
def test_every_row_is_in_the_lake_once_though_imports_are_killed_anywhere(
    tmp_path_factory: pytest.TempPathFactory, imports: list[tuple[Any, list[int], int]]
) -> None:
    root = tmp_path_factory.mktemp("imports") / "lake"
    expected: dict[int, list[tuple[bytes, bytes]]] = {}
    before: list[Any] = []
    for rows, deaths, commit_rows in imports:
        for death in deaths:
            with killed_around_commit(death):
                run(root, rows, commit_rows)
        done, bad = run(root, rows, commit_rows)
        # What an earlier file and this one have in common at their beginning is this file again.
        fresh = rows[len(before) :] if rows[: len(before)] == before and _has_good(before) else rows
        if _has_good(rows):
            before = rows[: max(n for n, row in enumerate(rows, 1) if row is not None)]
        for key, value in filter(None, fresh):
            held = expected.setdefault(partition_of(key.encode(), PARTITIONS), [])
            held.append((key.encode(), value.encode()))
        assert [row.line for row in bad] == [n for n, row in enumerate(rows, 1) if row is None]
        assert done.written + done.present == sum(row is not None for row in rows)
        check(root, expected)


def _has_good(rows: list[Any]) -> bool:
    return any(row is not None for row in rows)


def check(root: Path, expected: dict[int, list[tuple[bytes, bytes]]]) -> None:
    lake = Lake(root)
    changes = files.read(root, CHANGES, lake.changes.files())
    found = dict(by_partition(changes))
    assert {int(p): list(zip(*(part[name].to_pylist() for name in ("key", "value")), strict=True))
            for p, part in found.items()} == expected  # fmt: skip
    position = lake.changes.lake_position
    for partition, part in found.items():
        assert part["seqno"].to_pylist() == list(range(1, len(part) + 1))
        assert position.position(partition).seqno == len(part)
        revisions: dict[bytes, int] = {}
        for key, revision in zip(part["key"].to_pylist(), part["revision"].to_pylist(), strict=True):
            assert revision > revisions.get(key, 0)
            revisions[key] = revision
        # A place where a rollback or a consumer may stop is the end of a commit.
        assert part["batch"].to_pylist() == sorted(part["batch"].to_pylist())
    assert pc.count_distinct(changes["cas"]).as_py() == len(changes)
    live = {key: value for rows in expected.values() for key, value in rows}
    latest = files.read(root, LATEST, lake.latest.files())
    assert dict(zip(latest["key"].to_pylist(), latest["value"].to_pylist(), strict=True)) == live


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_file_that_has_grown_adds_what_is_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [{"key": f"k{n}", "value": n} for n in range(100)]
    lake, file = str(tmp_path / "lake"), write_rows(tmp_path / "items.jsonl", rows)
    assert main(["import", str(file), lake]) == 0
    assert capsys.readouterr().out == "100 of 100 rows written in 1 commit\n"
    assert main(["import", str(file), lake]) == 0
    assert capsys.readouterr().out == "0 of 100 rows written, 100 by an earlier import\n"
    write_rows(file, [*rows, {"key": "k1", "value": "new"}, {"value": "no key"}])
    assert main(["import", str(file), lake]) == 1
    printed = capsys.readouterr()
    assert printed.out == (
        f"1 of 102 rows written in 1 commit, 100 by an earlier import; 1 bad row is in {file}.bad\n"
    )
    assert printed.err == f"upper: {file}, line 102: it has no field 'key'\n"
    answer = next(query(lake, "select count(*) n, max(value) top from current"))
    assert answer == {"n": 100, "top": "new"} or answer == {"n": 100, "top": b"new"}
    # Another file, or other options, are another import.
    assert main(["import", str(file), lake, "--prefix", "p:"]) == 1
    assert capsys.readouterr().out.startswith("101 of 102 rows written in 1 commit;")


def test_standard_input_is_imported_and_goes_on_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = b"key,value\na,1\nb,2\n"
    for printed in ("2 of 2 rows written in 1 commit\n", "0 of 2 rows written, 2 by an earlier import\n"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert main(["import", "-", str(tmp_path / "lake"), "--format", "csv"]) == 0
        assert capsys.readouterr().out == printed


def test_metadata_is_kept_and_later_revisions_are_higher(tmp_path: Path) -> None:
    row = {"key": "k", "value": "v", "cas": 2**63 + 5, "revision": 9, "data_type": 1, "flags": 2**32 - 1}
    lake, bad = str(tmp_path / "lake"), {**row, "key": "other", "data_type": 4}
    file = write_rows(tmp_path / "items.jsonl", [{**row, "expiration": 2**32 - 1}, bad])
    assert main(["import", str(file), lake, "--metadata"]) == 1
    exported = tmp_path / "out.jsonl"
    assert main(["export", lake, str(exported)]) == 0
    assert json.loads(exported.read_text()) == {**row, "expiration": 2**32 - 1}
    write_rows(file, [{"key": "k", "value": "later"}])
    assert main(["import", str(file), lake]) == 0
    assert main(["export", lake, str(exported)]) == 0
    found = json.loads(exported.read_text())
    assert (found["value"], found["revision"] > 9) == ("later", True)


def test_rows_that_no_node_takes_are_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_rows(
        tmp_path / "items.jsonl", [{"key": "k" * 251, "value": 1}, {"key": "k" * 250, "value": 1}]
    )
    assert main(["import", str(file), str(tmp_path / "lake")]) == 1
    assert "line 1: the key has 251 bytes; a key has 1 to 250" in capsys.readouterr().err


def test_a_lake_of_an_import_is_read_like_any_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake, file = str(tmp_path / "lake"), tmp_path / "items.jsonl"
    write_rows(file, [{"key": f"k{n}", "value": {"n": n, "title": f"title {n}"}} for n in range(50)])
    assert main(["import", str(file), lake]) == 0
    sql = "select doc(value)->>'n' as n from current"
    assert main(["view", "create", lake, "big", sql, "--materialize", "--local"]) == 0
    assert main(["index", "create", lake, "titles", "--text", "title", "--local"]) == 0
    write_rows(file, [{"key": "k1", "value": {"n": 99, "title": "changed"}}])
    assert main(["import", str(file), lake]) == 0
    capsys.readouterr()
    assert main(["query", lake, "select count(*) c, max(n::int) m from big", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"c": 50, "m": 99}
    assert main(["search", lake, "titles", "changed", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hits"][0]["key"] == "k1"
    opened = Lake(lake)
    assert [commit.number for commit in commits(opened)] == [2, 1]
    assert not audit(opened, LocalRunner()).damaged
    assert main(["lake", lake]) == 0
    assert capsys.readouterr().out.startswith(
        "made by `upper import`, 1024 partitions in 16 groups\nposition: 51 changes of its own history\n"
    )
    assert main(["query", lake, "select 1", "--after", "1:1@7"]) == 2
    assert "was made by `upper import` and follows no bucket" in capsys.readouterr().err


def test_a_prune_reports_which_commits_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lake, file = str(tmp_path / "lake"), tmp_path / "items.jsonl"
    for value in ("one", "two"):
        assert main(["import", str(write_rows(file, [{"key": "k", "value": value}])), lake]) == 0
    capsys.readouterr()
    assert main(["backup", "prune", lake, "--keep-commits", "1", "--local", "--yes"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("1 rows removed from 1 files, 0 old files deleted; commit 2 of ")
    assert "is the oldest that stays; earlier ones can be restored until the files" in printed

    def exported(commit: int) -> int:
        return main(["export", lake, str(tmp_path / "out.jsonl"), "--commit", str(commit)])

    assert exported(1) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["value"] == "one"
    named = {f"changes/{each.path}" for each in Lake(lake).changes.files()}
    for path in Path(lake, "changes").rglob("*.parquet"):
        if str(path.relative_to(lake)) not in named and "_delta_log" not in path.parts:
            path.unlink()  # as a vacuum does two hours later
    capsys.readouterr()
    assert exported(1) == 2
    assert "commit 1 of the lake" in capsys.readouterr().err
    assert exported(2) == 0


def test_a_bucket_is_restored_from_a_lake_of_an_import(tmp_path: Path) -> None:
    lake, file = str(tmp_path / "lake"), tmp_path / "items.csv"
    file.write_text("key,value\na,1\nb,2\n")
    assert main(["import", str(file), lake, "--partitions", "8"]) == 0
    file.write_text("key,value\na,3\n")
    assert main(["import", str(file), lake]) == 0
    with Node(tmp_path / "node", partitions=16) as node, upper.connect(node.url) as bucket:
        assert main(["restore", lake, node.url, "--commit", "1", "--local"]) == 0
        assert {key: item.value for key, item in bucket.scan()} == {b"a": b"1", b"b": b"2"}
        assert main(["restore", lake, node.url, "--merge", "--local"]) == 0
        assert {key: item.value for key, item in bucket.scan()} == {b"a": b"3", b"b": b"2"}


def test_a_lake_follows_a_bucket_or_is_imported_and_never_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "items.jsonl", [{"key": "a", "value": 1}])
    Lake.create(tmp_path / "synced", LakeLayout("default", 4, 2))
    assert main(["import", str(file), str(tmp_path / "synced")]) == 2
    printed = capsys.readouterr().err
    assert "follows the bucket 'default'; import into that, and `upper sync` brings the rows here" in printed
    imported = str(tmp_path / "imported")
    assert main(["import", str(file), imported, "--partitions", "4"]) == 0
    assert main(["import", str(file), imported, "--partitions", "8"]) == 2
    assert "has 4 partitions since it was made" in capsys.readouterr().err
    with Node(tmp_path / "node", partitions=4) as node:
        assert main(["sync", node.url, imported, "--once", "--local"]) != 0
        assert "was made by `upper import` and follows no bucket" in capsys.readouterr().err
        assert main(["sync", node.url, imported, "--once", "--local", "--new-history"]) != 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert main(["import", str(file), str(tmp_path / "other")]) == 2
    assert "holds other files" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "missing.csv"), str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()


def test_a_lake_is_accepted_in_place_of_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPPER_URL", "upr://127.0.0.1:1/default")
    file = write_rows(tmp_path / "items.jsonl", [{"key": "a", "value": 1}])
    assert main(["import", str(file), str(tmp_path / "lake"), "--key", "key"]) == 0
    assert main(["export", str(tmp_path / "lake"), str(tmp_path / "out.csv"), "--format", "csv"]) == 0

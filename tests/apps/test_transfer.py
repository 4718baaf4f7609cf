"""Items that go through a file come back as they were, and bad rows are found without losing others."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import upper
from tests.apps.test_lake_node import Following
from tests.nodes import Node
from upper.apps.transfer import items
from upper.apps.transfer.formats import SUFFIXES, RawRow, format_of, read, writer
from upper.apps.transfer.imports import BadRow, Imported, ImportOptions, import_rows
from upper.cli.main import main
from upper.errors import InvalidArguments
from upper.model.values import Cas

YEAR = 365 * 86400


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("transfer") / "node", partitions=16) as running:
        yield running


@pytest.fixture(scope="module")
def connection(node: Node) -> Iterator[Any]:
    with upper.connect(node.url) as bucket:
        yield bucket


@pytest.fixture
def bucket(connection: Any) -> Any:
    connection.flush()
    return connection


def exported(node: Node, kind: str, prefix: bytes = b"") -> bytes:
    sink = io.BytesIO()
    sink.close = lambda: None  # type: ignore[method-assign]
    to = writer(kind, sink)
    for table in items.of_bucket(node.url, prefix):
        to.write(table)
    to.close()
    return sink.getvalue()


def imported(
    bucket: Any, kind: str, data: bytes, options: ImportOptions | None = None
) -> tuple[Imported, list[BadRow]]:
    bad: list[BadRow] = []
    rows = read(kind, io.BytesIO(data))
    return import_rows(bucket, rows, options or ImportOptions(), reject=bad.append), bad


def everything(bucket: Any) -> dict[bytes, Any]:
    return {key: (item.value, bucket.metadata(key)) for key, item in bucket.scan()}


some_bytes = st.one_of(st.text(max_size=20).map(str.encode), st.binary(max_size=20))
copies = st.builds(
    upper.Copy,
    key=some_bytes.filter(bool),
    value=some_bytes,
    revision=st.integers(1, 2**62 - 1),
    cas=st.integers(1, 2**50).map(Cas),
    flags=st.integers(0, 2**32 - 1),
    expiration=st.sampled_from([0, int(time.time()) + YEAR, 2**31 + 5]),
    data_type=st.sampled_from([0, 1]),
)


@pytest.mark.parametrize("kind", sorted(set(SUFFIXES.values())))
@settings(max_examples=25)
@given(st.lists(copies, max_size=8, unique_by=lambda copy: copy.key))
def test_what_is_exported_is_imported_as_it_was(
    connection: Any, node: Node, kind: str, held: list[upper.Copy]
) -> None:
    connection.flush()
    connection.copy_many(held, force=True)
    before = everything(connection)
    assert len(before) == len(held)
    data = exported(node, kind)
    connection.flush()
    done, bad = imported(connection, kind, data, ImportOptions(metadata=True))
    assert (done.rows, done.written, bad) == (len(held), len(held), [])
    assert everything(connection) == before
    connection.flush()
    imported(connection, kind, data)
    again = everything(connection)
    assert {key: (value, meta.flags) for key, (value, meta) in again.items()} == {
        key: (value, meta.flags) for key, (value, meta) in before.items()
    }
    for key, (_, meta) in again.items():
        assert abs(meta.expiration - before[key][1].expiration) <= 30


def test_only_the_newest_version_of_live_keys_is_exported(node: Node, bucket: Any) -> None:
    bucket.set_many({f"k{number}": b"one" for number in range(100)})
    bucket.set_many({f"k{number}": b"two" for number in range(0, 100, 2)})
    bucket.delete_many([f"k{number}" for number in range(0, 100, 5)])
    bucket.set("other", b"x")
    rows = [json.loads(line) for line in exported(node, "jsonl", b"k").splitlines()]
    assert {row["key"]: row["value"] for row in rows} == {
        f"k{number}": "one" if number % 2 else "two" for number in range(100) if number % 5
    }
    assert len(rows) == 80


BAD_LINES = b"""\
{"key": "a", "value": "1"}
{"key": "b", "value":
{"value": "no key"}
[1, 2]

{"key": "c", "value": {"an": "object"}, "flags": "7"}
{"key": "d", "value": "1", "flags": -1}
{"key": "e", "value": "1", "expiration": "soon"}
{"key": "", "value": "1"}
{"key": {"hex": "fg"}, "value": "1"}
{"key": "%s", "value": "1"}
{"key": "g", "value": "1", "expiration": 5}
{"key": {"hex": "ff"}, "value": 17}""" % (b"k" * 300)


def test_bad_rows_are_named_by_line_and_nothing_else_is_lost(bucket: Any) -> None:
    done, bad = imported(bucket, "jsonl", BAD_LINES)
    assert [(row.line, row.error.split(";")[0][:45]) for row in bad] == [
        (2, "it is not JSON: Expecting value at character "),
        (3, "it has no field 'key'"),
        (4, "it is not an object with the fields of one it"),
        (7, "the field 'flags' is -1"),
        (8, "the field 'expiration' is 'soon', not a whole"),
        (9, "the key has 0 bytes"),
        (10, "the field 'key' is not hexadecimal or not UTF"),
        (11, bad[-1].error.split(";")[0][:45]),
    ]
    assert bad[0].row == '{"key": "b", "value":'
    assert "key" in bad[-1].error
    assert (done.rows, done.written, done.bad, done.expired) == (12, 3, 8, 1)
    assert {key: (item.value, item.flags) for key, item in bucket.scan()} == {
        b"a": (b"1", 0), b"c": (b'{"an":"object"}', 7), b"\xff": (b"17", 0),
    }  # fmt: skip


def test_rows_of_csv_are_checked_too(bucket: Any) -> None:
    data = b'id,value\n1,"two\nlines"\n2\n3,three\n4,\xff\n5,"quoted, with comma"\n'
    done, bad = imported(bucket, "csv", data, ImportOptions(key="id", prefix=b"n:"))
    assert [(row.line, row.error.split(";")[0]) for row in bad] == [
        (4, "it has 1 fields, and the header has 2"),
        (6, "it is not UTF-8"),
    ]
    assert bad[0].row == "2"
    assert {key: item.value for key, item in bucket.scan()} == {
        b"n:1": b"two\nlines", b"n:3": b"three", b"n:5": b"quoted, with comma",
    }  # fmt: skip
    assert (done.rows, done.written) == (5, 3)


def test_parquet_of_other_programs_is_imported(bucket: Any) -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"name": ["a", None, "c"], "price": [1, 2, 3]}), sink)
    done, bad = imported(bucket, "parquet", sink.getvalue(), ImportOptions(key="name", value="."))
    assert [(row.line, row.error, row.row) for row in bad] == [
        (2, "it has no field 'name'", '{"name": null, "price": 2}')
    ]
    assert bucket.get("a").value == b'{"name":"a","price":1}'
    assert done.written == 2
    with pytest.raises(InvalidArguments, match="not a Parquet file"):
        imported(bucket, "parquet", b"something else")


def test_the_last_row_of_a_key_counts(bucket: Any) -> None:
    rows = [RawRow(n, {"key": "k", "value": str(n), "flags": n % 3}, "") for n in range(100)]
    import_rows(bucket, rows, ImportOptions(), reject=lambda row: None)
    assert bucket.get("k").value == b"99"


def test_a_commit_of_a_lake_is_exported(tmp_path: Path, node: Node, bucket: Any) -> None:
    following = Following(tmp_path / "lake", node)
    bucket.set_many({f"k{number}": b"one" for number in range(50)})
    following.settle()
    bucket.set("k1", b"two")
    following.settle()
    following.feed.close()
    for options, value in (([], "two"), (["--commit", "1"], "one")):
        file = tmp_path / "items.jsonl"
        assert main(["export", str(tmp_path / "lake"), str(file), *options]) == 0
        rows = {row["key"]: row["value"] for row in map(json.loads, file.read_text().splitlines())}
        assert (len(rows), rows["k1"]) == (50, value)


def test_the_verbs_write_and_read_files(
    tmp_path: Path, node: Node, bucket: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.set_many({f"k{number}": b"v" for number in range(30)})
    file = str(tmp_path / "items.csv")
    assert main(["export", node.url, file]) == 0
    assert capsys.readouterr().out == f"30 items written to {file}\n"
    bucket.flush()
    assert main(["import", file, node.url]) == 0
    assert capsys.readouterr().out == "30 of 30 rows written\n"
    assert len(list(bucket.keys())) == 30
    with open(file, "a") as more:
        more.write("x\n")
    assert main(["import", file, node.url]) == 1
    printed = capsys.readouterr()
    assert printed.out == f"30 of 31 rows written; 1 bad row is in {file}.bad\n"
    assert printed.err == f"upper: {file}, line 32: it has 1 fields, and the header has 8\n"
    assert json.loads(Path(f"{file}.bad").read_text()) == {
        "line": 32, "error": "it has 1 fields, and the header has 8", "row": "x",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["export", "URL", "items.xml"], "the format of 'items.xml' is not known"),
        (["export", "URL", "items.csv", "--commit", "1"], "--commit and --at are for a lake"),
        (["export", "URL", "/missing/x.csv"], "/missing/x.csv cannot be written (No such file or directory)"),
        (["export", "URL", "/", "--format", "csv"], "/ cannot be written"),
        (["import", "URL", "items.csv"], "the file comes first: upper import FILE URL, or FILE LAKE"),
        (["import", "missing.csv", "URL"], "missing.csv: No such file"),
    ],
)
def test_wrong_arguments_are_explained(
    node: Node, words: list[str], printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([node.url if word == "URL" else word for word in words]) == 2
    assert printed in capsys.readouterr().err


def test_an_export_that_fails_leaves_the_file_as_it_was(tmp_path: Path, node: Node) -> None:
    file = tmp_path / "items.jsonl"
    file.write_text("before")
    with pytest.raises(upper.UpperError):
        main_raising(node, file)
    assert file.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["items.jsonl"]


def main_raising(node: Node, file: Path) -> None:
    from argparse import Namespace

    from upper.cli.export import run
    from upper.cli.output import Output

    args = Namespace(
        url=f"upr://127.0.0.1:{node.port}/missing", file=str(file), format=None, prefix="", commit=None,
        at=None, user=None, password_file=None,
    )  # fmt: skip
    run(args, Output())


def test_the_format_follows_from_the_suffix() -> None:
    assert format_of("a.JSONL", None) == "jsonl"
    assert format_of("-", "csv") == "csv"

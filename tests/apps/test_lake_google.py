"""A lake in Google Cloud Storage, on fake-gcs-server: the same guarantees as in a directory and on S3."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

import upper
from tests.apps.test_lake_model import SET, World, live_through
from tests.apps.test_lake_objects import race_for_versions
from tests.nodes import Node
from tests.objects import BUCKET, google_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first build fetches and compiles the server
NUMBERS = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with google_store(tmp_path_factory.mktemp("google")) as environment:
        yield environment


@pytest.fixture
def url(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a lake that does not exist yet; the environment names the server."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return f"gs://{BUCKET}/lake-{next(NUMBERS)}"


def test_every_kind_of_work_is_done_in_google_cloud_storage(url: str) -> None:
    work = ("round", "refresh", "due", "lost files", "merge", "trim", "foreign", "erase")
    live_through(World(url), [([SET] * 6, [("promote", 0, b"", 2)], [SET], turn, None) for turn in work])


@pytest.mark.parametrize("killed", [0, 2, 4])
def test_a_driver_that_is_killed_around_a_commit_is_followed_by_the_next(url: str, killed: int) -> None:
    live_through(
        World(url),
        [
            ([SET] * 4, [], [], "refresh", None),
            ([("promote", 0, b"", 2), SET, ("mutation", 1, b"b", 0)], [], [], "refresh", killed),
        ],
    )


def test_of_several_writers_of_a_version_google_accepts_one(url: str) -> None:
    race_for_versions(url)


def test_verbs_take_the_url(server: dict[str, str], url: str, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        command, env = [sys.executable, "-m", "upper", *words], {**os.environ, **server}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=140, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with Node(tmp_path / "node", partitions=8) as node, upper.connect(node.url) as bucket:
        bucket.set_many({f"k{number}": b"x" * 100 for number in range(300)})
        run("sync", node.url, url, "--once", "--local")
        assert "300" in run("query", url, "select count(*) as n from latest")
        assert "the lake is true" in run("verify", node.url, url, "--local")
    assert "changes" in run("lake", url)

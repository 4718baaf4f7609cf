"""A lake in Azure (on Azurite) and in Google Cloud Storage (on fake-gcs-server): as in a directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

import upper
from tests.apps.test_lake_model import SET, World, live_through
from tests.apps.test_lake_objects import race_for_versions
from tests.nodes import Node
from tests.objects import AZURITE_ACCOUNT, AZURITE_KEY, BUCKET, azure_store, azure_token, google_store
from upper.apps.lake.store import azure_hosts

# The first run on a machine fetches the servers, and compiles one of them.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NUMBERS = count()
AZURE, GOOGLE = f"abfss://{BUCKET}@{AZURITE_ACCOUNT}.dfs.core.windows.net", f"gs://{BUCKET}"


class Cloud(NamedTuple):
    url: str
    environment: dict[str, str]  # the server, and the credentials if it needs any


@pytest.fixture(scope="module", params=[AZURE, GOOGLE], ids=["azure", "google"])
def cloud(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    directory = tmp_path_factory.mktemp("store")
    store: AbstractContextManager[dict[str, str]] = (
        azure_store(directory) if request.param == AZURE else google_store(directory)
    )
    with store as environment:
        yield Cloud(request.param, environment)


@pytest.fixture
def url(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a lake that does not exist yet; the environment is that of the server."""
    for name, value in cloud.environment.items():
        monkeypatch.setenv(name, value)
    return f"{cloud.url}/lake-{next(NUMBERS)}"


def test_every_kind_of_work_is_done(url: str) -> None:
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


def test_of_several_writers_of_a_version_the_store_accepts_one(url: str) -> None:
    race_for_versions(url)


def test_verbs_take_the_url_and_print_no_key(cloud: Cloud, url: str, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        command, env = [sys.executable, "-m", "upper", *words], {**os.environ, **cloud.environment}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=140, check=False)
        assert done.returncode == 0, done.stderr
        assert AZURITE_KEY not in done.stdout + done.stderr
        return done.stdout

    with Node(tmp_path / "node", partitions=8) as node, upper.connect(node.url) as bucket:
        bucket.set_many({f"k{number}": b"x" * 100 for number in range(300)})
        run("sync", node.url, url, "--once", "--local")
        assert "300" in run("query", url, "select count(*) as n from latest")
        assert "the lake is true" in run("verify", node.url, url, "--local")
    assert "changes" in run("lake", url)


def test_a_token_of_azure_opens_a_lake_and_is_in_no_message(tmp_path: Path) -> None:
    """Delta's library signs for Azurite with its key, so that only Arrow uses the token here."""
    token, url = azure_token(), f"{AZURE}/of-a-token"
    signature = token.rpartition("sig=")[2]
    with azure_store(tmp_path) as found:
        env = {**os.environ, **found, "AZURE_STORAGE_SAS_TOKEN": token}
        del env["AZURE_STORAGE_ACCOUNT_KEY"]

        def run(*words: str, **other: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "upper", *words]
            return subprocess.run(
                command, env=env | other, capture_output=True, text=True, timeout=140, check=False
            )

        (rows := tmp_path / "rows.jsonl").write_text('{"key": "k", "value": "v"}\n')
        made = run("import", str(rows), url)
        assert made.returncode == 0, made.stderr
        written = f"?{token}"  # as some tools print it
        sql = "select text(value) as v from latest"
        read = run("query", url, sql, "--json", AZURE_STORAGE_SAS_TOKEN=written)
        assert json.loads(read.stdout) == {"v": "v"}
        wrong = token.replace("sp=rwdlac", "sp=rwdla")
        refused = run("import", str(rows), f"{url}-refused", AZURE_STORAGE_SAS_TOKEN=wrong)
        assert refused.returncode == 5
        assert "cannot be used (" in refused.stderr
    away = run("query", url, "select 1")
    assert away.returncode == 5
    for done in (made, read, refused, away):
        assert signature not in done.stdout + done.stderr
        assert signature.removesuffix("%3D") not in done.stdout + done.stderr


def test_the_cloud_of_a_url_and_an_endpoint_are_found() -> None:
    china = azure_hosts("account.dfs.core.chinacloudapi.cn", "")
    assert china["blob_storage_authority"] == ".blob.core.chinacloudapi.cn"
    assert china["dfs_storage_authority"] == ".dfs.core.chinacloudapi.cn"
    assert azure_hosts("account.dfs.core.windows.net", "https://here:8443/account") == {
        "blob_storage_authority": "here:8443",
        "blob_storage_scheme": "https",
        "dfs_storage_authority": "here:8443",
        "dfs_storage_scheme": "https",
    }

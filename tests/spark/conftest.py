"""One Spark session for all tests of the pipeline: starting one takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import upper
from tests.nodes import Node

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.synced_lake import SyncedLake


class SharedSession:
    """The session of this process, started when a test needs it, and again if a test has stopped it."""

    def __init__(self) -> None:
        self._session: SparkSession | None = None

    def get(self) -> SparkSession:
        from upper.spark import register
        from upper.spark.session import running, start

        if self._session is None or not running():
            settings = {"spark.sql.shuffle.partitions": "2"}
            self._session = start(app="tests", master="local[2]", settings=settings, tasks_only=True)
            register(self._session)
        return self._session

    def stop(self) -> None:
        if self._session is not None:
            self._session.stop()


@pytest.fixture(scope="session")
def shared_session() -> Iterator[SharedSession]:
    shared = SharedSession()
    yield shared
    shared.stop()


@pytest.fixture
def spark(shared_session: SharedSession) -> SparkSession:
    return shared_session.get()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path / "node", partitions=16) as running:
        yield running


@pytest.fixture
def synced(tmp_path: Path, node: Node, spark: SparkSession) -> SyncedLake:
    from tests.spark.synced_lake import SyncedLake

    return SyncedLake(tmp_path / "lake", node, spark)


@pytest.fixture
def bucket(node: Node) -> Iterator[Any]:
    with upper.connect(node.url) as connection:
        yield connection

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


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    from upper.spark import register
    from upper.spark.session import start

    session = start(app="tests", master="local[2]", settings={"spark.sql.shuffle.partitions": "2"})
    register(session)
    yield session
    session.stop()


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

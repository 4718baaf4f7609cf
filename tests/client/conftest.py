"""One real node for the tests that only read and write; those that break things start their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import upper
from tests.nodes import Node
from upper.client.bucket import Bucket
from upper.client.feed import Feed


@pytest.fixture(scope="session")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("shared") / "data", partitions=16) as node:
        yield node


@pytest.fixture
def bucket(shared_node: Node) -> Iterator[Bucket]:
    """A bucket on the shared node, emptied for this test."""
    with upper.connect(shared_node.url) as bucket:
        bucket.flush()
        yield bucket


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node of one's own, to be stopped, killed and taken back."""
    node = Node(tmp_path / "data", partitions=4)
    node.start()
    yield node
    if node.running:
        node.stop()


def consistent(bucket: Bucket, feed: Feed[Any]) -> bool:
    """Whether the feed stands where the bucket stands."""
    highs = bucket.seqnos()
    return {p: position.seqno for p, position in feed.positions.items()} == highs

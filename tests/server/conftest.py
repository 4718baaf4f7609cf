"""Nodes for the tests of the server: real processes, in directories of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes import Node
from tests.server.peers import Peer


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A fresh node with 16 partitions."""
    with Node(tmp_path / "data").start() as running:
        yield running


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One node for all tests of a module; each uses keys and partitions of its own."""
    with Node(tmp_path_factory.mktemp("node") / "data").start() as running:
        yield running


@pytest.fixture
def peer(node: Node) -> Iterator[Peer]:
    with Peer(node) as connected:
        yield connected

"""Connections of the blocking driver over TLS: what has arrived is gathered, and the end comes behind it."""

from __future__ import annotations

import os
import socket
import ssl
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server import certificate
from upper.client.sockets import RECORD, NodeConnection
from upper.client.url import NodeAddress

MOST = 2 << 20


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[NodeConnection, ssl.SSLSocket]]:
    """The two ends of a connection over TLS: a reader's, which does not block, and a node's."""
    chain, key = certificate.made(tmp_path)
    ours = ssl.create_default_context(cafile=str(chain))
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(chain, key)
    here, there = socket.socketpair()
    for end in (here, there):
        end.settimeout(20)
    with ThreadPoolExecutor(1) as other:
        accepted = other.submit(theirs.wrap_socket, there, server_side=True)
        reader, node = ours.wrap_socket(here, server_hostname="127.0.0.1"), accepted.result()
    with reader, node:
        reader.setblocking(False)
        yield NodeConnection(NodeAddress("127.0.0.1", 1), reader), node


def gathered(connection: NodeConnection, size: int, most: int) -> bytes:
    """This many bytes, as they arrive."""
    parts = b""
    while len(parts) < size:
        assert connection.arrived(20_000)
        rest = parts[-10:]
        data, closed = connection.gather(most, rest)
        assert len(data) < len(rest) + most + RECORD
        assert not closed
        if data:
            assert data.startswith(rest)
            parts += data[len(rest) :]
    return parts


@pytest.mark.parametrize("most", [1, 100_000, MOST])
def test_over_tls_everything_arrives_and_the_end_comes_behind_it(
    ends: tuple[NodeConnection, ssl.SSLSocket], most: int
) -> None:
    connection, node = ends
    sent = os.urandom(1 << 20)
    with ThreadPoolExecutor(1) as other:
        sending = other.submit(node.sendall, sent)
        assert gathered(connection, len(sent), most) == sent
        sending.result()
    assert connection.gather(most, b"rest") == (b"", False)
    node.close()
    assert connection.arrived(20_000)
    assert connection.gather(most, b"rest") == (b"", True)


def test_over_tls_no_more_memory_is_requested_than_for_what_has_arrived(
    ends: tuple[NodeConnection, ssl.SSLSocket],
) -> None:
    connection, node = ends
    sent = os.urandom(50_000)
    node.sendall(sent)
    tracemalloc.start()
    try:
        assert gathered(connection, len(sent), MOST) == sent
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 500_000

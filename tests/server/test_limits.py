"""What a peer may cost: each limit is reached over a real socket, and the node goes on serving."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import struct
import threading
import weakref
from pathlib import Path

import pytest

from tests.nodes import Node
from tests.server.inside import Running
from tests.server.peers import Peer
from upper.model.messages import Acknowledged, Message, MutationMessage, StreamRequest, TapConnect
from upper.model.values import Partition
from upper.server import http, transport
from upper.server.connection import Connection
from upper.server.metrics import MetricsPage
from upper.server.node import REFUSED
from upper.server.settings import Limits, ServerSettings, StreamSettings
from upper.wire.codes import Opcode, Status
from upper.wire.tap import TAP
from upper.wire.upr0 import UPR0

KIB = 1024


def wants_answer(message: Message) -> bool:
    return bool(getattr(message, "request_ack", False))


@pytest.mark.parametrize(
    ("opcode", "value"),
    [
        (Opcode.OBSERVE, b"\0\1\0\6absent" * 6600),  # more than 64 KiB, and every entry is whole
        (Opcode.HELLO, b"\0\x0b" * 513),
        (Opcode.HELLO, b"\0\x0b\0"),
    ],
)
def test_a_list_that_is_too_long_is_refused_and_the_connection_goes_on(
    shared_node: Node, opcode: int, value: bytes
) -> None:
    with Peer(shared_node) as peer:
        answer = peer.ask(opcode, value=value)
        assert answer.status == Status.INVALID_ARGUMENTS
        assert len(answer.value) > 20
        assert peer.set(b"k", b"v").status == 0


def test_a_list_as_long_as_allowed_is_answered(shared_node: Node) -> None:
    with Peer(shared_node) as peer:
        entry = b"\0\1\0\6absent"
        answer = peer.ask(Opcode.OBSERVE, value=entry * (64 * KIB // len(entry)))
        assert answer.status == 0
        assert len(answer.value) == (len(entry) + 9) * (64 * KIB // len(entry))
        assert peer.ask(Opcode.HELLO, value=b"\0\x0b" * 512).value == b"\0\x0b"


def test_a_node_that_was_suspended_closes_no_live_connection(node: Node) -> None:
    with Peer(node) as peer, Peer(node, None) as other:
        peer.control("set_noop_interval", "1")
        peer.control("enable_noop", "true")
        peer.accepted()
        asked = b""
        while b"\x80\x5c" not in asked:
            asked += peer.socket.recv(4096)
        os.kill(node.pid, signal.SIGSTOP)  # as if the whole machine stood still, for longer than the interval
        threading.Event().wait(1.5)
        os.kill(node.pid, signal.SIGCONT)
        peer.send(Acknowledged(opcode=0x5C, opaque=0))
        other.set(b"k", b"v")
        assert peer.changes(1)[0].key == b"k"
        assert other.stats()["dead_peers"] == "0"


def named(name: bytes) -> TapConnect:
    return TapConnect(name=name, support_ack=True)


def test_of_too_many_tap_clients_that_are_away_those_that_left_first_are_dropped(tmp_path: Path) -> None:
    settings = ServerSettings(port=0, streams=StreamSettings(tap_sessions=2, tap_ack_every=1))
    with Running(tmp_path / "data", settings) as node, node.peer() as writer:
        writer.set(b"old", b"v")
        for name in (b"first", b"second", b"third"):
            with Peer(("127.0.0.1", node.port), TAP) as client:
                client.send(named(name))
                change = client.wait_for(MutationMessage)
                client.send(Acknowledged(opcode=0x41, opaque=change.opaque))
                client.ask(Opcode.NOOP)
            while writer.stats()["curr_streams"] != "0":
                pass  # it has left when the node has noticed
        writer.set(b"new", b"v")
        for name, expected in ((b"third", [b"new"]), (b"second", [b"new"]), (b"first", [b"old", b"new"])):
            with Peer(("127.0.0.1", node.port), TAP) as client:
                client.send(named(name))
                assert [change.key for change in client.changes(len(expected))] == expected


def test_a_tap_client_that_never_acknowledges_is_sent_so_much_and_no_more(tmp_path: Path) -> None:
    settings = ServerSettings(port=0, streams=StreamSettings(tap_ack_every=10, tap_unacknowledged=50))
    with Running(tmp_path / "data", settings) as node, node.peer() as writer:
        for number in range(200):
            writer.set(b"k%d" % number, b"v")
        with Peer(("127.0.0.1", node.port), TAP) as client:
            client.connect_first(b"deaf", partitions=4)
            seen = client.changes(50)
            assert client.ask(Opcode.NOOP).status == 0, "it is still answered"
            assert writer.set(b"others", b"are served").status == 0
            assert client.inbox == []
            asked = [change for change in seen if wants_answer(change)]
            assert len(asked) == 5
            assert isinstance(asked[0], MutationMessage)
            client.send(Acknowledged(opcode=0x41, opaque=asked[0].opaque))
            assert [change.key for change in client.changes(10)] == [b"k%d" % n for n in range(50, 60)]


def test_connections_leave_the_storage_its_files(tmp_path: Path) -> None:
    with (
        Node(tmp_path / "data", open_files=400).start() as node,
        Peer(node, None) as writer,
        contextlib.ExitStack() as crowd,
    ):
        for _ in range(300):
            crowd.enter_context(node.connect())
        while writer.stats()["curr_connections"] != "200":
            pass
        for number in range(40):  # more than one file of the journal takes
            assert writer.set(b"k%d" % number, bytes(1 << 20)).status == 0
        assert "at most 200 connections" in node.log


def test_refused_connections_get_the_reason_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "LINGER", 60)  # seconds for each of them to read it
    settings = ServerSettings(port=0, limits=Limits(connections=1))
    with Running(tmp_path / "data", settings) as node, node.peer() as inside, contextlib.ExitStack() as crowd:
        assert inside.ask(Opcode.NOOP).status == 0
        address = ("127.0.0.1", node.port)
        waiting = [crowd.enter_context(socket.create_connection(address, timeout=10)) for _ in range(200)]
        while inside.stats()["refused_connections"] != "200":
            pass
        assert node.node is not None
        while len(node.node.turned_away) > REFUSED:
            pass
        assert struct.unpack_from(">H", waiting[0].recv(4096), 6)[0] == Status.BUSY
        assert inside.set(b"k", b"v").status == 0


def test_the_metrics_page_serves_a_few_at_a_time_and_none_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "PATIENCE", 1.0)
    settings = ServerSettings(port=0, metrics_port=0)
    with Running(tmp_path / "data", settings) as node, contextlib.ExitStack() as crowd:
        assert node.node is not None
        port = node.node.metrics_port
        assert port is not None
        for _ in range(MetricsPage.most):
            crowd.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        with socket.create_connection(("127.0.0.1", port), timeout=10) as extra:
            assert ended(extra)
        while node.node.pages:
            pass  # no request is sent
        with socket.create_connection(("127.0.0.1", port), timeout=10) as page:
            page.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert page.recv(4096).startswith(b"HTTP/1.1 200")


def ended(connection: socket.socket) -> bool:
    """Waits until the node has closed it; false if it sends something."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_a_closed_connection_is_freed_at_once_and_not_by_the_garbage_collector(tmp_path: Path) -> None:
    """A node collects garbage rarely, and consumers cost much: their objects must not form cycles."""
    with Running(tmp_path / "data") as running:
        assert running.node is not None
        node = running.node
        known: list[weakref.ref[object]] = []

        def note() -> None:
            for connection in node.connections.values():
                known.append(weakref.ref(connection))
                if connection.stream_session is not None:
                    known.append(weakref.ref(connection.stream_session))

        gc.collect()
        gc.disable()
        try:
            tap = Peer(("127.0.0.1", running.port), TAP)
            with running.peer() as writer, running.peer() as follower, tap:
                writer.set(b"k", b"v")
                tap.send(named(b"client"))
                tap.wait_for(MutationMessage)
                for partition in range(4):
                    follower.follow(partition)
                follower.wait_for(MutationMessage)
                running.call(note)
            while node.connections:
                running.call(lambda: None)
            running.call(lambda: None)  # the end of the last one has been handled by now
            assert [gone() for gone in known] == [None] * 5
        finally:
            gc.enable()


def test_consumers_that_do_not_read_share_a_large_value(tmp_path: Path) -> None:
    value = bytes(range(256)) * (32 << 10)
    with Running(tmp_path / "data") as running, running.peer() as writer:
        assert writer.set(b"large", value).status == 0
        address = ("127.0.0.1", running.port)
        peers = [Peer(address), Peer(address, UPR0), Peer(address, TAP)]
        for peer in peers[:2]:
            peer.send(StreamRequest(partition=Partition(0), opaque=1))
        peers[2].send(TapConnect())
        node = running.node
        assert node is not None

        def following() -> list[Connection]:
            return [c for c in tuple(node.connections.values()) if c.unsent > len(value) // 4]

        while len(following()) < 3:
            writer.ask(Opcode.NOOP)
        for connection in following():
            assert connection._transport is not None
            copied = connection._transport.get_write_buffer_size()
            most = running.settings.streams.buffer + transport.WHOLE
            assert copied <= most, "the rest is not copied"
        for peer in peers:
            change = peer.changes(1)[0]
            assert (change.key, change.value) == (b"large", value)
            peer.close()

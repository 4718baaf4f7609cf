"""Live streams that are sent a commit as shared bytes get what a stream alone gets, in each form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernel.packets import packet
from tests.server.inside import Running
from tests.server.peers import Peer
from tests.server.streams import promote
from upper.model.messages import (
    Acknowledged,
    BufferAck,
    DeletionMessage,
    ExpirationMessage,
    FlushMessage,
    Message,
    MutationMessage,
    SeqnoAdvanced,
    StreamFlag,
    TapConnect,
)
from upper.server.settings import ServerSettings, StreamSettings
from upper.server.stream_session import StreamSession
from upper.server.subscription import Subscription
from upper.wire.codes import Opcode
from upper.wire.dcp import DCP
from upper.wire.table import Dialect
from upper.wire.tap import TAP
from upper.wire.upr import UPR

FAR = 1 << 40  # a stream with an end is sent its commits alone
LARGE = bytes(range(256)) * 300  # a log refers to its record
FILTERS: list[dict[str, str]] = [
    {},
    {"filter.key.prefix": "a"},
    {"filter.key.prefix": "none has this"},
    {"filter.key.pattern": "1$"},
    {"filter.operations": "deletion"},
    {"filter.operations": "mutation", "filter.key.prefix": "b"},
]


def sessions(running: Running) -> list[StreamSession]:
    assert running.node is not None
    found = (one.stream_session for one in running.node.connections.values())
    return [session for session in found if session is not None]


def streams(running: Running) -> list[Subscription]:
    """The streams of all connections, in the order of their connections."""
    return running.call(
        lambda: [
            stream
            for session in sessions(running)
            for producer in session.producers
            for stream in producer.streams.values()
        ]
    )


def await_that(peer: Peer, holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        peer.ask(Opcode.NOOP)
    raise AssertionError("it did not come about")


def reaches(seqno: int) -> Callable[[Message], bool]:
    changes = MutationMessage | DeletionMessage | ExpirationMessage | SeqnoAdvanced
    return lambda message: isinstance(message, changes) and (message.seqno or 0) >= seqno


def commits(running: Running, writer: Peer) -> int:
    """Commits of one and of many changes, the same key several times; their last seqno."""

    def stored(key: bytes, value: bytes = b"v", data_type: int = 0) -> bytes:
        return packet(0x01, extras=bytes(8), key=key, value=value, data_type=data_type)

    running.disk.hold()
    writer.socket.sendall(stored(b"a1"))
    assert running.disk.waiting.wait(20)
    many = [
        *(stored(b"a%d" % (number % 7)) for number in range(12)),
        *(stored(b"b1"), stored(b"a1", LARGE), stored(b"b2", b"{}"), packet(0x04, key=b"b1")),
    ]
    writer.socket.sendall(b"".join(many))
    await_that(writer, lambda: running.call(lambda: running.bucket.partitions[0].high) == 2 + len(many))
    running.disk.released.set()
    for key in (b"a8", b"b1", b"last"):
        assert writer.set(key, b"x").status == 0
    assert writer.delete(b"b1").status == 0
    return running.call(lambda: running.bucket.partitions[0].high)


@pytest.mark.parametrize("keys_only", [False, True])
@pytest.mark.parametrize("settings", FILTERS, ids=str)
@pytest.mark.parametrize("dialect", [UPR, DCP], ids=lambda dialect: dialect.name)
def test_a_stream_in_step_is_sent_what_one_alone_is_sent(
    tmp_path: Path, dialect: Dialect, settings: dict[str, str], keys_only: bool
) -> None:
    flags = StreamFlag.KEYS_ONLY if keys_only else StreamFlag.NONE
    with Running(tmp_path / "data") as running, running.peer() as writer:
        address = ("127.0.0.1", running.port)
        with Peer(address, dialect) as alone, Peer(address, dialect) as shared, Peer(address) as other:
            other.accepted()
            for peer, end in ((alone, FAR), (shared, 2**64 - 1)):
                if dialect.named_connections:
                    peer.open(b"end at %d" % end)
                for name, text in settings.items():
                    assert isinstance(peer.control(name, text), Acknowledged)
                peer.accepted(end=end, flags=flags)
            await_that(writer, lambda: [stream.phase.value for stream in streams(running)] == ["live"] * 3)
            assert writer.set(b"a0", b"v").status == 0
            await_that(writer, lambda: all(stream.seqno == 1 for stream in streams(running)))
            assert [stream.in_step for stream in streams(running)] == [False, True, True]
            last = commits(running, writer)
            received = [peer.until(reaches(last)) for peer in (alone, shared)]
            await_that(writer, lambda: all(stream.seqno == last for stream in streams(running)))
            *counted, _ = [(stream.items, stream.bytes) for stream in streams(running)]
            assert received[0] == received[1]
            assert counted[0] == counted[1]


@pytest.mark.parametrize("dialect", [UPR, DCP], ids=lambda dialect: dialect.name)
def test_a_window_bounds_what_streams_in_step_are_sent(tmp_path: Path, dialect: Dialect) -> None:
    """A commit exceeds the window; the rest is read from the store when the consumer acknowledges."""
    with (
        Running(tmp_path / "data") as running,
        running.peer() as writer,
        Peer(("127.0.0.1", running.port), dialect) as peer,
    ):
        if dialect.named_connections:
            peer.open(b"consumer")
        assert isinstance(peer.control("connection_buffer_size", "4000"), Acknowledged)
        peer.accepted()
        await_that(writer, lambda: [stream.in_step for stream in streams(running)] == [True])
        value = bytes(1000)
        one, *others = (packet(0x01, extras=bytes(8), key=b"k%d" % n, value=value) for n in range(20))
        running.disk.hold()
        writer.socket.sendall(one)
        assert running.disk.waiting.wait(20)
        writer.socket.sendall(b"".join(others))  # one commit
        await_that(writer, lambda: running.call(lambda: running.bucket.partitions[0].high) == 20)
        running.disk.released.set()
        await_that(writer, lambda: running.call(lambda: running.bucket.partitions[0].durable) == 20)
        (session,) = sessions(running)
        assert running.call(lambda: session.window.under_way) <= 4000 + 1200
        for number in range(20):
            assert peer.changes(1)[0].key == b"k%d" % number
            peer.send(BufferAck(size=1200))


def test_a_tap_client_in_step_continues_behind_what_it_acknowledged(tmp_path: Path) -> None:
    """Every third message requests an acknowledgement; one in the middle of a commit is given."""
    settings = ServerSettings(port=0, streams=StreamSettings(tap_ack_every=3))
    with Running(tmp_path / "data", settings) as running, running.peer() as writer:
        address = ("127.0.0.1", running.port)
        with Peer(address, TAP) as client:
            client.connect_first(b"client", partitions=4)
            assert writer.set(b"k0", b"v").status == 0
            await_that(writer, lambda: [one.in_step for one in streams(running)] == [True])
            keys = [b"k%d" % number for number in range(1, 9)]
            writer.socket.sendall(
                b"".join(packet(0x01, extras=bytes(8), key=key, value=b"v") for key in keys)
            )
            received = client.changes(9)
            assert [change.key for change in received] == [b"k0", *keys]
            first = received[0].opaque
            assert [change.opaque for change in received] == list(range(first, first + 9))
            asking = [change.key for change in received if change.request_ack]
            assert asking == [b"k2", b"k5", b"k8"]
            assert [stream.items for stream in streams(running)] == [9]
            client.send(Acknowledged(opcode=0x41, opaque=received[5].opaque))
            client.ask(Opcode.NOOP)  # the node has read that
        with Peer(address, TAP) as again:
            again.send(TapConnect(name=b"client", support_ack=True))
            assert [change.key for change in again.changes(3)] == [b"k6", b"k7", b"k8"]
            assert writer.set(b"k9", b"v").status == 0
            assert again.changes(1)[0].key == b"k9"


def test_a_tap_client_that_falls_behind_in_step_reads_the_rest_from_the_store(tmp_path: Path) -> None:
    """A commit of more messages than may be unacknowledged; keys alone are marked as such."""
    limits = StreamSettings(tap_ack_every=2, tap_unacknowledged=4)
    with (
        Running(tmp_path / "data", ServerSettings(port=0, streams=limits)) as running,
        running.peer() as writer,
        Peer(("127.0.0.1", running.port), TAP) as client,
    ):
        client.send(TapConnect(support_ack=True, keys_only=True))
        client.ask(Opcode.NOOP)
        assert writer.set(b"k0", b"v").status == 0
        await_that(writer, lambda: [one.in_step for one in streams(running)] == [True])
        keys = [b"k%d" % number for number in range(1, 12)]
        writer.socket.sendall(b"".join(packet(0x01, extras=bytes(8), key=key, value=b"v") for key in keys))
        await_that(writer, lambda: running.call(lambda: running.bucket.partitions[0].durable) == 12)
        (session,) = (one.tap for one in sessions(running) if one.tap is not None)
        assert running.call(lambda: session.items) <= 1 + limits.tap_unacknowledged
        received: list[bytes] = []
        while len(received) < 12:
            (change,) = client.changes(1)
            assert isinstance(change, MutationMessage)
            assert change.tap is not None
            assert (change.tap.no_value, change.value) == (True, b"")
            received.append(change.key)
            if change.request_ack:
                client.send(Acknowledged(opcode=0x41, opaque=change.opaque))
        assert received == [b"k0", *keys]
        await_that(writer, lambda: [one.in_step for one in streams(running)] == [True])


def test_the_messages_of_several_commits_count_towards_an_acknowledgement(tmp_path: Path) -> None:
    """Each commit has one change; every third message requests an acknowledgement."""
    settings = ServerSettings(port=0, streams=StreamSettings(tap_ack_every=3))
    with (
        Running(tmp_path / "data", settings) as running,
        running.peer() as writer,
        Peer(("127.0.0.1", running.port), TAP) as client,
    ):
        client.send(TapConnect(support_ack=True))
        client.ask(Opcode.NOOP)
        assert writer.set(b"k0", b"v").status == 0
        await_that(writer, lambda: [one.in_step for one in streams(running)] == [True])
        for number in range(1, 10):
            assert writer.set(b"k%d" % number, b"v").status == 0
        asking = [change.key for change in client.changes(10) if change.request_ack]
        assert asking == [b"k2", b"k5", b"k8"]


@pytest.mark.parametrize("acknowledges", [False, True])
def test_a_message_in_step_acknowledges_an_earlier_flush(tmp_path: Path, acknowledges: bool) -> None:
    """A client that acknowledged it is not flushed again when it reconnects; one that did not is."""
    settings = ServerSettings(port=0, streams=StreamSettings(tap_ack_every=3))
    with Running(tmp_path / "data", settings) as running, running.peer() as writer:
        address = ("127.0.0.1", running.port)
        with Peer(address, TAP) as client:
            client.send(TapConnect(name=b"client", support_ack=True))
            assert [client.wait_for(FlushMessage).request_ack for _ in range(4)] == [False, False, True, True]
            assert writer.set(b"k0", b"v").status == 0
            await_that(writer, lambda: [one.in_step for one in streams(running)] == [True])
            for number in range(1, 3):
                assert writer.set(b"k%d" % number, b"v").status == 0
            last = client.changes(3)[-1]
            assert last.request_ack
            if acknowledges:
                client.send(Acknowledged(opcode=0x41, opaque=last.opaque))
            client.ask(Opcode.NOOP)  # the node has read that
        with Peer(address, TAP) as again:
            again.send(TapConnect(name=b"client", support_ack=True))
            assert writer.set(b"new", b"v").status == 0
            seen = again.until(lambda message: getattr(message, "key", b"") == b"new")
            keys = [b"new"] if acknowledges else [b"k0", b"k1", b"k2", b"new"]
            assert [one.key for one in seen if isinstance(one, MutationMessage)] == keys
            assert any(isinstance(one, FlushMessage) for one in seen) is not acknowledges


def test_a_tap_client_that_was_sent_an_undone_change_in_step_is_flushed(tmp_path: Path) -> None:
    """It has acknowledged what precedes the branch, disconnects, and returns after the promotion."""
    settings = ServerSettings(port=0, streams=StreamSettings(tap_ack_every=1))
    with Running(tmp_path / "data", settings, partitions=1) as running, running.peer() as writer:
        address = ("127.0.0.1", running.port)
        with Peer(address, TAP) as client:
            client.connect_first(b"client", partitions=1)
            assert writer.set(b"kept", b"v").status == 0
            await_that(writer, lambda: [one.in_step for one in streams(running)] == [True])
            (kept,) = client.changes(1)
            client.send(Acknowledged(opcode=0x41, opaque=kept.opaque))
            assert writer.set(b"undone", b"v").status == 0
            client.changes(1)
        await_that(writer, lambda: not streams(running))
        promote(writer, 0, to=1)
        with Peer(address, TAP) as again:
            again.send(TapConnect(name=b"client", support_ack=True))
            assert writer.set(b"new", b"v").status == 0
            seen = again.until(lambda message: getattr(message, "key", b"") == b"new")
            assert [getattr(one, "key", b"FLUSH") for one in seen] == [b"FLUSH", b"kept", b"new"]


def test_an_acknowledgement_of_a_message_in_step_does_not_confirm_a_later_flush(tmp_path: Path) -> None:
    """The promotion flushes a client that is connected; it disconnects before it acknowledges that."""
    settings = ServerSettings(port=0, streams=StreamSettings(tap_ack_every=3))
    with Running(tmp_path / "data", settings, partitions=1) as running, running.peer() as writer:
        address = ("127.0.0.1", running.port)
        with Peer(address, TAP) as client:
            client.connect_first(b"client", partitions=1)
            assert writer.set(b"kept", b"v").status == 0
            await_that(writer, lambda: [one.in_step for one in streams(running)] == [True])
            for number in range(5):
                assert writer.set(b"k%d" % number, b"v").status == 0
            asking = [change for change in client.changes(6) if change.request_ack]
            promote(writer, 0, to=1)
            client.wait_for(FlushMessage)
            client.send(Acknowledged(opcode=0x41, opaque=asking[-1].opaque))
            client.ask(Opcode.NOOP)  # the node has read that
        with Peer(address, TAP) as again:
            again.send(TapConnect(name=b"client", support_ack=True))
            seen = again.until(lambda message: getattr(message, "key", b"") == b"kept")
            assert isinstance(seen[0], FlushMessage)

"""No response or stream exposes a change before it is durable: with a disk that waits for the test.

The node runs in this process, on a loop in a thread of its own, over a real socket and a real directory; only
the sync of the journal is held back until the test lets it go.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.inside import Held, Running
from tests.server.peers import Peer
from upper.model.messages import (
    FlushMessage,
    Message,
    MutationMessage,
    Request,
    Response,
    RollbackAnswer,
    SeqnosAnswer,
    SeqnosRequest,
    SnapshotEndMessage,
    StreamStart,
)
from upper.storage import StorageSettings
from upper.wire.codes import Opcode, Status


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with Running(tmp_path / "data") as node:
        yield node


def silent(peer: Peer, *, seconds: float = 0.3) -> list[Message]:
    """What comes within a moment."""
    peer.socket.settimeout(seconds)
    seen: list[Message] = []
    try:
        while True:
            seen += peer.receive()
    except TimeoutError:
        return seen
    finally:
        peer.socket.settimeout(10)


def ask(peer: Peer, opcode: int, key: bytes = b"", *, opaque: int, value: bytes = b"") -> None:
    extras = bytes(8) if opcode in (Opcode.SET, Opcode.SETQ) else b""
    peer.send(Request(opcode=opcode, key=key, value=value, extras=extras, opaque=opaque))


def test_neither_the_writer_nor_a_reader_is_answered_before_the_disk_has_it(running: Running) -> None:
    with running.peer() as writer, running.peer() as reader, running.peer() as other:
        other.set(b"old", b"v")
        running.disk.hold()
        ask(writer, Opcode.SET, b"k", opaque=1, value=b"v")
        assert running.disk.waiting.wait(10)
        ask(reader, Opcode.GET, b"k", opaque=2)
        ask(reader, Opcode.GET, b"old", opaque=3)
        assert silent(writer) == []
        assert silent(reader) == [], "answers keep their order, so what came behind waits too"
        assert other.get(b"old").value == b"v", "a request for durable data is answered at once"
        running.disk.released.set()
        assert writer.wait_for(Response, 1).status == 0
        assert reader.wait_for(Response, 2).value == b"v"
        assert reader.wait_for(Response, 3).value == b"v"


def test_a_noop_confirms_the_quiet_writes_before_it(running: Running) -> None:
    with running.peer() as writer, running.peer() as other:
        running.disk.hold()
        ask(writer, Opcode.SETQ, b"k", opaque=1, value=b"v")
        assert running.disk.waiting.wait(10)
        ask(writer, Opcode.NOOP, opaque=2)  # arrives by itself, when the write has long been read
        ask(other, Opcode.NOOP, opaque=3)
        assert other.wait_for(Response, 3).status == 0
        assert silent(writer) == []
        running.disk.released.set()
        assert writer.wait_for(Response, 2).status == 0


def test_commands_that_the_kernel_leaves_to_the_table_wait_too(running: Running) -> None:
    with running.peer() as writer, running.peer() as reader:
        running.disk.hold()
        extras = bytes(16) + (1000).to_bytes(4, "big")
        writer.send(Request(opcode=Opcode.INCREMENT, key=b"n", extras=extras, opaque=1))
        assert running.disk.waiting.wait(10)
        reader.send(Request(opcode=Opcode.GAT, key=b"n", extras=bytes(4), opaque=2))
        reader.send(Request(opcode=Opcode.GET_META, key=b"n", opaque=3))
        assert silent(writer) == []
        assert silent(reader) == []
        running.disk.released.set()
        assert writer.wait_for(Response, 1).status == 0
        assert reader.wait_for(Response, 2).value == b"0"
        assert reader.wait_for(Response, 3).status == 0


def test_a_deletion_and_a_flush_are_hidden_no_sooner_than_they_are_safe(running: Running) -> None:
    with running.peer() as writer, running.peer() as reader:
        for key in (b"a", b"b"):
            writer.set(key, b"v")
        for opcode, key in ((Opcode.DELETE, b"a"), (Opcode.FLUSH, b"")):
            running.disk.hold()
            ask(writer, opcode, key, opaque=1)
            assert running.disk.waiting.wait(10)
            ask(reader, Opcode.GET, key or b"b", opaque=2)
            assert silent(reader) == []
            running.disk.released.set()
            assert reader.wait_for(Response, 2).status == Status.KEY_NOT_FOUND
            assert writer.wait_for(Response, 1).status == 0


def test_streams_carry_nothing_that_is_not_on_disk(running: Running) -> None:
    with running.peer() as writer, running.peer() as live, running.peer() as late:
        writer.set(b"first", b"v")
        live.accepted(0)
        assert live.changes(1)[0].key == b"first"
        live.wait_for(SnapshotEndMessage)
        running.disk.hold()
        ask(writer, Opcode.SET, b"second", opaque=1, value=b"v")
        assert running.disk.waiting.wait(10)
        late.accepted(0)
        # The store holds both keys, and is consistent only with the second: nothing of it is sent yet.
        assert [type(message) for message in silent(late)] == [StreamStart]
        assert silent(live) == []
        late.send(SeqnosRequest(opaque=7))
        assert dict(late.wait_for(SeqnosAnswer).seqnos)[0] == 1  # type: ignore[index]
        running.disk.released.set()
        assert [change.key for change in late.changes(2)] == [b"first", b"second"]
        assert [change.key for change in live.changes(1)] == [b"second"]


def test_what_is_written_while_a_backfill_waits_comes_behind_it_once(running: Running) -> None:
    with running.peer() as writer, running.peer() as late:
        writer.set(b"a", b"1")
        running.disk.hold()
        ask(writer, Opcode.SET, b"a", opaque=1, value=b"2")
        assert running.disk.waiting.wait(10)
        late.accepted(0)
        assert [type(message) for message in silent(late)] == [StreamStart]
        ask(writer, Opcode.SET, b"b", opaque=2, value=b"3")  # in the batch behind the one that is held
        ask(writer, Opcode.FLUSH, opaque=3)
        ask(writer, Opcode.SET, b"c", opaque=4, value=b"4")
        running.disk.released.set()
        writer.wait_for(Response, 4)
        seen = late.until(lambda message: isinstance(message, MutationMessage) and message.key == b"c")
        reported = [(m.key, m.seqno) if isinstance(m, MutationMessage) else type(m) for m in seen]
        changes = [
            one
            for one in reported
            if one not in (SnapshotEndMessage,) and (isinstance(one, tuple) or one is FlushMessage)
        ]
        assert changes == [(b"a", 2), (b"b", 3), FlushMessage, (b"c", 5)]


def test_a_consumer_that_missed_a_purged_deletion_rolls_back_to_the_beginning(tmp_path: Path) -> None:
    running = Running(tmp_path / "data", storage=StorageSettings(purge_age=60.0))
    with running, running.peer() as peer, running.peer() as live:
        for key in (b"a", b"b"):
            peer.set(key, b"v")
        branch = live.accepted(0).versions[0].branch
        live.changes(2)
        peer.delete(b"a")
        peer.set(b"c", b"v")
        assert [change.seqno for change in live.changes(2)] == [3, 4]
        running.ahead += 100 * 10**9
        running.call(running.bucket.compact)
        assert running.bucket.partitions[0].purged == 3
        answer = peer.follow(0, start=2, branch=branch)
        assert isinstance(answer, RollbackAnswer)
        assert answer.seqno == 0
        peer.accepted(0, start=3, branch=branch)
        peer.set(b"d", b"v")
        assert live.changes(1)[0].key == b"d", "a consumer that received it resumes"


def test_a_lock_lasts_for_as_long_as_was_asked_and_at_most_a_second_more(running: Running) -> None:
    with running.peer() as holder, running.peer() as other:
        holder.set(b"k", b"v")
        second = 10**9
        # Not at the very end of it: the clock of locks goes on between two looks at it.
        end_of_a_second = (running.bucket.clock.seconds() + 2) * second - second // 2
        running.stopped = end_of_a_second
        locked = holder.ask(Opcode.GET_LOCKED, b"k", extras=(5).to_bytes(4, "big"))
        assert locked.status == 0
        running.stopped = end_of_a_second + 5 * second
        assert other.set(b"k", b"w").status == Status.LOCKED
        running.stopped = end_of_a_second + 6 * second
        assert other.set(b"k", b"w").status == 0


def test_a_client_that_has_closed_its_sending_side_receives_the_answer(running: Running) -> None:
    with running.peer() as peer:
        running.disk.hold()
        ask(peer, Opcode.SET, b"k", opaque=1, value=b"v")
        peer.socket.shutdown(socket.SHUT_WR)
        assert running.disk.waiting.wait(10)
        running.disk.released.set()
        assert [(m.opaque, m.status) for m in peer.rest() if isinstance(m, Response)] == [(1, 0)]


@pytest.mark.parametrize(
    ("broken", "refusals"),
    [
        (b"\x42 begins no packet", []),
        (struct.pack(">BBHBBHIIQ", 0x80, 0x01, 1, 8, 0, 0, 0xFFFFFFFF, 9, 0), [(9, Status.VALUE_TOO_LARGE)]),
    ],
)
def test_what_was_asked_before_a_broken_frame_is_answered_when_the_disk_has_it(
    running: Running, broken: bytes, refusals: list[tuple[int, int]]
) -> None:
    with running.peer() as peer, running.peer() as other:
        running.disk.hold()
        ask(peer, Opcode.SET, b"k", opaque=1, value=b"v")
        assert running.disk.waiting.wait(10)
        peer.socket.sendall(broken)
        ask(peer, Opcode.SET, b"later", opaque=3, value=b"v")
        assert silent(peer) == []
        running.disk.released.set()
        answers = [(m.opaque, m.status) for m in peer.rest() if isinstance(m, Response)]
        assert answers == [(1, 0), *refusals]
        assert other.get(b"later").status == Status.KEY_NOT_FOUND


def test_requests_after_a_quit_are_not_processed(running: Running) -> None:
    with running.peer() as peer, running.peer() as other:
        running.disk.hold()
        ask(peer, Opcode.SET, b"k", opaque=1, value=b"v")
        ask(peer, Opcode.QUIT, opaque=2)
        assert running.disk.waiting.wait(10)
        ask(peer, Opcode.SET, b"later", opaque=3, value=b"v")
        assert silent(peer) == []
        running.disk.released.set()
        answers = [(m.opaque, m.status) for m in peer.rest() if isinstance(m, Response)]
        assert answers == [(1, 0), (2, 0)]
        assert other.get(b"later").status == Status.KEY_NOT_FOUND


def test_a_client_that_goes_away_with_answers_held_leaves_nothing_behind(running: Running) -> None:
    with running.peer() as other:
        running.disk.hold()
        gone = running.peer()
        ask(gone, Opcode.SET, b"k", opaque=1, value=b"v")
        assert running.disk.waiting.wait(10)
        gone.socket.shutdown(socket.SHUT_RDWR)
        gone.close()
        running.disk.released.set()
        assert other.get(b"k").value == b"v"


class SlowReads(Held):
    """A disk whose reads wait while they are held."""

    def __init__(self) -> None:
        super().__init__()
        self.reading, self.reads = threading.Event(), threading.Event()
        self.reads.set()

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        self.reading.set()
        assert self.reads.wait(20)
        return super().pread(fd, size, offset)


def test_a_backfill_that_waits_for_the_disk_holds_up_no_other_request(tmp_path: Path) -> None:
    disk = SlowReads()
    storage = StorageSettings(memory_quota=0, compact=False)
    running = Running(tmp_path / "data", storage=storage, disk=disk)
    with running, running.peer() as writer, running.peer() as consumer, running.peer() as other:
        for number in range(50):
            writer.set(b"k%02d" % number, bytes(10_000))
        disk.reading.clear()
        disk.reads.clear()
        consumer.accepted(0)
        assert disk.reading.wait(10)
        assert other.ask(Opcode.NOOP).status == 0
        assert other.set(b"new", b"v", partition=1).status == 0
        disk.reads.set()
        assert [change.key for change in consumer.changes(50)] == [b"k%02d" % number for number in range(50)]

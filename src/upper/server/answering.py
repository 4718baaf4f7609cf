"""The answers of one connection: in order, none before its changes are on disk, and bounded in bytes.

An answer that depends on a change that is not durable is held until its batch is on disk. Later answers wait
too, because clients match answers to requests by their order. Where too much waits for the disk or for the
peer, reading pauses.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import count
from typing import TYPE_CHECKING

from upper.errors import UpperError
from upper.server.buffers import Answers
from upper.server.connection_state import ANSWERABLE, BUSY, ConnectionCue, ConnectionPhase
from upper.server.durability import MajorityWait
from upper.server.peer_rights import PeerRights
from upper.server.responses import AskedBytes, failures
from upper.server.room import SMALL
from upper.wire.framing import Framer
from upper.wire.packet import HEADER_SIZE

if TYPE_CHECKING:
    from upper.server.node import Node

COUNTED = 64 << 10  # bytes of an answer from which on it is counted as unread at once

_numbers = count(1)


class AnsweringConnection(PeerRights):
    """The answers of a connection, and their bounds."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.number = next(_numbers)
        self._input = Framer()
        self._held = Answers(len(node.bucket.partitions))
        self._changed = 0  # bytes of changes that the requests since the last answer made
        self._answered = 0  # bytes of answers that were sent since everything had left
        self.unread = 0  # bytes of answers that wait for the disk or the peer, as last counted
        self._wants_room = False  # the next answer is large, and waits until there is room for it
        self._due = 0  # the batch that the last write of this peer is in

    @abstractmethod
    def proceed(self) -> None:
        """Process the kept bytes, and read again, if there is room."""

    def _answer(self, out: bytearray, waits: bool, asked: AskedBytes | None = None) -> None:
        """Write, or hold until the batch that it depends on is on disk. In a cluster, `asked` is answered."""
        node, changed = self.node, self._changed
        if node.bucket.pending:
            node.bucket.start_large_batch()
        if changed:
            self._changed = 0
            kept = 0 if asked is None else asked[2] - asked[1]
            node.room.unwritten.add(node.due, changed + kept)
        if waits and node.holds_answers:
            # Also for later answers: a quiet write has none, and a NOOP after it confirms both.
            self._due = node.due
        if self._due > node.committed or self._held.queue:
            if out or changed or waits:
                self._held.hold(self._due, out, changed, asked=asked)
                node.waiting[self.number] = self
                if len(out) >= COUNTED:
                    self.count_unread()
            self._pause_if_full()
            return
        if out:
            if self.stream_session is not None:
                self.stream_session.flush()  # what was asked before this is answered before it
            self._send_answers(out)
        if changed:
            self._pause_if_full()

    def _hold(self, answer: bytearray, majority: MajorityWait) -> None:
        """Hold an answer until its batch is on disk, and a majority of the copies has it."""
        node = self.node
        if node.bucket.pending:
            node.bucket.start_large_batch()
        changed, self._changed, self._due = self._changed, 0, node.due
        if changed:
            node.room.unwritten.add(self._due, changed)
        self._held.hold(self._due, answer, changed, majority)
        node.waiting[self.number] = self
        node.majorities.add(self)

    @property
    def waits_for_majority(self) -> bool:
        return bool(self._held.majorities)

    def _send_answers(self, out: bytearray) -> None:
        self._answered += len(out)
        self.send(out)
        if self.unread or len(out) >= COUNTED or self.unsent:
            self.count_unread()
        else:
            self._answered = 0

    def count_unread(self) -> None:
        """Bring the node's sum of answers that wait up to date. Streams have bounds of their own."""
        unsent = self.unsent
        if not unsent:
            self._answered = 0
        unread = min(unsent, self._answered) + self._held.answers
        self.node.room.count(unread - self.unread)
        self.unread = unread

    def fail(self, partition: int, first: int, why: UpperError) -> None:
        """Changes of this partition in batch `first` and later ones, made so far, will not be confirmed."""
        self._held.fail(partition, first, why)

    def waits_past(self, done: int) -> bool:
        """Whether the end of this batch changes nothing: all answers that are held depend on later ones."""
        held = self._held.queue
        return bool(held) and held[0][0] > done and self.phase is ConnectionPhase.READING

    def release(self, done: int, failed: BaseException | None) -> bool:
        """Write the answers that a commit confirms; false if no further ones are held."""
        ready = self._held.release(done, self.node.now, failed=failed is not None)
        if failed is not None and (ready or self._due == done):
            # Some of these confirm a change that was discarded, and a quiet write may be among them: the peer
            # gets a failure for each, and has to read the stored items.
            self.end(failures(ready, failed))
        elif self._held.unclear:
            self.end(bytes(ready))
        elif ready:
            self._send_answers(ready)
        if self.phase is not ConnectionPhase.READING:
            self._close_if_answered()
        if self.phase is not ConnectionPhase.READING or (self._answers_in_order and not self._held.queue):
            self.proceed()
        return bool(self._held.queue)

    @property
    def _answers_in_order(self) -> bool:
        """DCP: its clients match answers to stream requests by order too, not only by opaque."""
        return self.stream_session is not None and bool(self.stream_session.controls.opened)

    def close_when_answered(self) -> None:
        """Close once the answer to the present request has left. Nothing behind it is processed."""
        self.move(ConnectionCue.LAST)

    def _close_if_answered(self) -> None:
        if self.phase not in ANSWERABLE or self._held.queue:
            return
        if self.phase is not ConnectionPhase.DRAINING or not self._input.ready:
            self.move(ConnectionCue.ANSWERED)

    @property
    def backlog(self) -> int:
        """Bytes that wait in this process for the peer or for the disk."""
        return self.unsent + self._held.size

    # ── Bounds ──────────────────────────────────────────────────────────────────────────

    def _may_go_on(self) -> bool:
        """Whether there is room for more answers or changes; if not, reading pauses."""
        if not self._is_full():
            return True
        self._input.needed = 0
        self.move(ConnectionCue.FULL)
        return False

    def _pause_if_full(self) -> None:
        if self._is_full():
            self.move(ConnectionCue.FULL)

    def _is_full(self) -> bool:
        """Too much waits for a command, the disk or peers. If the node's sum is too high, the node resumes
        this.

        A slow consumer is still read from: it sends acknowledgements and answers to NOOP.
        """
        if self.phase in BUSY and self._input.size > self._largest + HEADER_SIZE:
            return True
        if self._held.size >= self.node.settings.limits.held:
            return True
        if self.node.room.is_full(unread=self._wants_room or self.unread >= SMALL):
            self.node.room.paused[self] = None
            return True
        return not self.writable and (
            self.stream_session is None or self.backlog > 4 * self.node.settings.streams.buffer
        )

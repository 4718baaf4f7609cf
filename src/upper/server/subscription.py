"""One stream: its machine, its filter, the snapshot that it is sending, and what it has sent.

Streams in step are sent each commit as the same bytes, so what they have sent is counted once, by their form:
a stream stores the form's counters at the time it joined, and adds the difference.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING

from upper.history.producing import ProducerStream, Send, Sending
from upper.model.messages import StreamFlag
from upper.model.values import NO_END, Position, Seqno, Snapshot
from upper.server.filters import Filter
from upper.wire.stream_encoder import StreamEncoder

if TYPE_CHECKING:
    from upper.kernel import StreamForm
    from upper.server.fanout import PartitionTail
    from upper.storage import PartitionStore
    from upper.storage.changes import Changes


_IN_STEP = Sending.IN_STEP  # looking up a member of an enum takes a call


class Todo(Enum):
    """The next step of a stream, when its connection has space."""

    TAKE = "take"  # read from the store what follows
    SEND = "send"  # continue with the snapshot that was taken
    ROOM = "room"  # find out whether there is more


class Subscription:
    """A stream of one partition on one connection."""

    __slots__ = (
        "_items",
        "_joined",
        "_opening",
        "_resumes",
        "_sent_bytes",
        "announced",
        "changes",
        "chunks",
        "closing",
        "encoder",
        "filter",
        "flags",
        "form",
        "machine",
        "name",
        "opaque",
        "partition",
        "rest",
        "sending",
        "since",
        "slot",
        "store",
        "tail",
        "todo",
    )  # fmt: skip

    def __init__(
        self,
        store: PartitionStore,
        tail: PartitionTail,
        machine: ProducerStream,
        *,
        opaque: int,
        encoder: StreamEncoder,
        chosen: Filter,
        form: StreamForm | None,
        flags: StreamFlag,
        name: str,
        at: Position | None = None,
    ) -> None:
        """`form`: of its changes in a commit, if the kernel has one for them.

        `at`: the consumer's position, where a marker states the bounds of the snapshot around it.
        """
        self.store, self.tail, self.machine = store, tail, machine
        self.partition = store.id
        self.opaque, self.encoder, self.filter, self.flags, self.name = opaque, encoder, chosen, flags, name
        self.slot = store.id << 32 | opaque
        self.form = form if machine.until == NO_END else None
        bounds = encoder.dialect.snapshot_bounds
        # The start of the snapshot that the consumer is inside.
        self._resumes = at.narrowed().snapshot.start if bounds and at is not None else None
        self._opening = b"" if bounds else encoder.snapshot_start(store.id, opaque)
        self.closing = encoder.snapshot_end(store.id, opaque)
        self.since = time.time()
        self.todo: Todo | None = None
        self.changes: Changes | None = None
        self.chunks: Iterator[list[bytes]] | None = None
        self.rest: list[bytes] | None = None  # of the last chunk
        self.sending: Send | None = None
        self.announced = Seqno(0)
        self._items = self._sent_bytes = 0
        self._joined = (0, 0)  # items and bytes of the form when this stream joined its tail

    @property
    def shares(self) -> bool:
        """True when a commit is the same bytes for this stream as for every other one of its form."""
        return self.form is not None and self._resumes in (None, self.machine.sent)

    def opening(self, after: Seqno, last: Seqno, *, disk: bool) -> bytes:
        """The start of a snapshot; with bounds, which the first one of a resumed snapshot shares with it."""
        if not self.encoder.dialect.snapshot_bounds:
            return self._opening
        if last <= after:
            return b""
        start, self._resumes = after if self._resumes is None else self._resumes, None
        return self.encoder.snapshot_start(self.partition, self.opaque, Snapshot(start, last), disk=disk)

    def count(self, items: int, size: int) -> None:
        self._items += items
        self._sent_bytes += size

    @property
    def in_step(self) -> bool:
        return self.machine.phase is _IN_STEP

    def join_tail(self) -> None:
        assert self.form is not None
        self._joined, self._resumes = self.form.counted(self.partition), None
        self.machine.join()

    def leave_tail(self) -> None:
        self._items, self._sent_bytes = self.items, self.bytes
        self.machine.leave(Seqno(self.tail.reached))

    def drop(self) -> None:
        """Release the snapshot that was taken."""
        if self.changes is not None:
            self.changes.close()
        self.changes = self.chunks = self.sending = self.rest = None

    @property
    def seqno(self) -> int:
        return self.tail.reached if self.in_step else self.machine.sent

    @property
    def items(self) -> int:
        return self._items + self._in_step(0)

    @property
    def bytes(self) -> int:
        return self._sent_bytes + self._in_step(1)

    def _in_step(self, which: int) -> int:
        """The changes (0) or bytes (1) since it joined."""
        if not self.in_step or self.form is None:
            return 0
        return self.form.counted(self.partition)[which] - self._joined[which]

    @property
    def remaining(self) -> int:
        """The seqnos that were not sent yet; at least the number of changes that will follow."""
        return max(0, min(self.tail.limit, self.machine.until) - self.seqno)

    @property
    def phase(self) -> Sending:
        """The phase for statistics, which do not show whether commits are shared with other streams."""
        return Sending.LIVE if self.in_step else self.machine.phase

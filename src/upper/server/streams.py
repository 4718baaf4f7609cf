"""One stream: its machine, what it may leave out, what it holds in its hands, and what it has sent.

Live streams that carry everything are fed past their machine: a commit is the same bytes for all of them.
What they have sent is then known to the partition's line in the hub, and read back from there when somebody
asks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING

from upper.history.producing import ProducerStream, Send, Sending
from upper.model.messages import StreamFlag
from upper.model.values import NO_END, Seqno
from upper.server.filters import Filter
from upper.server.speech import Speech

if TYPE_CHECKING:
    from upper.server.hub import Line
    from upper.storage import PartitionStore
    from upper.storage.changes import Changes


class Todo(Enum):
    """What a stream waits to do when its connection has room."""

    TAKE = "take"  # read from the store what follows
    SEND = "send"  # send on from the snapshot in hand
    ROOM = "room"  # find out whether there is more


class Stream:
    """A stream of one partition on one connection."""

    __slots__ = (
        "_items",
        "_sent_bytes",
        "changes",
        "chunks",
        "closing",
        "filter",
        "flags",
        "in_step",
        "line",
        "machine",
        "name",
        "opaque",
        "opening",
        "partition",
        "sending",
        "since",
        "slot",
        "speech",
        "store",
        "todo",
        "told",
    )  # fmt: skip

    def __init__(
        self,
        store: PartitionStore,
        line: Line,
        machine: ProducerStream,
        *,
        opaque: int,
        speech: Speech,
        chosen: Filter,
        flags: StreamFlag,
        name: str,
    ) -> None:
        self.store, self.line, self.machine = store, line, machine
        self.partition = store.id
        self.opaque, self.speech, self.filter, self.flags, self.name = opaque, speech, chosen, flags, name
        self.slot = store.id << 32 | opaque
        self.opening = speech.snapshot_start(store.id, opaque)
        self.closing = speech.snapshot_end(store.id, opaque)
        self.since = time.time()
        self.in_step = False  # fed by its line, together with others
        self.todo: Todo | None = None
        self.changes: Changes | None = None
        self.chunks: Iterator[list[bytes]] | None = None
        self.sending: Send | None = None
        self.told = Seqno(0)
        self._items = self._sent_bytes = 0

    @property
    def plain(self) -> bool:
        """True when a commit is the same bytes for this stream as for every other plain one."""
        return self.filter.everything and self.machine.until == NO_END and self.speech.exact

    def count(self, items: int, size: int) -> None:
        self._items += items
        self._sent_bytes += size

    def join_line(self) -> None:
        self.in_step = True
        self._items -= self.line.items
        self._sent_bytes -= self.line.bytes

    def leave_line(self) -> None:
        """What was sent past the machine is told to it, and counted here again."""
        self.in_step = False
        self._items += self.line.items
        self._sent_bytes += self.line.bytes
        self.machine.followed(Seqno(self.line.reached))

    def drop(self) -> None:
        """Let go of what is in hand."""
        if self.changes is not None:
            self.changes.close()
        self.changes = self.chunks = self.sending = None

    @property
    def seqno(self) -> int:
        return self.line.reached if self.in_step else self.machine.sent

    @property
    def items(self) -> int:
        return self._items + (self.line.items if self.in_step else 0)

    @property
    def bytes(self) -> int:
        return self._sent_bytes + (self.line.bytes if self.in_step else 0)

    @property
    def remaining(self) -> int:
        """How many seqnos the consumer is behind what it could have; so many changes or fewer will come."""
        return max(0, min(self.store.durable, self.machine.until) - self.seqno)

    @property
    def phase(self) -> Sending:
        return self.machine.phase

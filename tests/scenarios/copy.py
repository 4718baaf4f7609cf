"""An application that keeps a copy of a bucket: what it applied, how to take it back, what it has saved."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tests.scenarios.world import Wire, World
from upper.client.bulk import ColumnDecoder
from upper.client.events import (
    Deletion,
    Event,
    Expiration,
    Flush,
    Mutation,
    Rollback,
    SnapshotEnd,
    StateChange,
)
from upper.client.follow import Follower, FollowSettings
from upper.client.partition_consumer import PartitionConsumer
from upper.client.plan import ChangesRequest, Plan
from upper.client.positions import Positions
from upper.client.reader import EventDecoder, Reader
from upper.client.url import NodeAddress
from upper.model.messages import StreamFlag
from upper.model.values import Partition, Seqno


@dataclass
class Applied:
    """One change as the application has it, with what it would take to undo it."""

    seqno: Seqno
    before: dict[bytes, bytes]


@dataclass
class Copy:
    """The state of each partition, and the way back."""

    items: dict[Partition, dict[bytes, bytes]] = field(default_factory=dict)
    trail: dict[Partition, list[Applied]] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        items = self.items.setdefault(event.partition, {})
        trail = self.trail.setdefault(event.partition, [])
        match event:
            case Rollback(to=to):
                self.take_back(event.partition, to)
            case Mutation() | Deletion() | Expiration() | Flush():
                assert event.seqno is not None
                assert not trail or event.seqno > trail[-1].seqno, "seqnos grow"
                trail.append(Applied(event.seqno, dict(items)))
                if isinstance(event, Mutation):
                    items[event.key] = event.value
                elif isinstance(event, Flush):
                    items.clear()
                else:
                    items.pop(event.key, None)
            case SnapshotEnd() | StateChange():
                pass

    def apply_row(self, row: dict[str, Any]) -> None:
        """The same from a row of a record batch."""
        partition, seqno = Partition(row["partition"]), Seqno(row["seqno"])
        if row["operation"] == "rollback":
            self.take_back(partition, seqno)
            return
        of = {"partition": partition, "seqno": seqno, "branch": row["branch"]}
        match row["operation"]:
            case "mutation":
                self.apply(Mutation(key=row["key"], value=row["value"], **of))
            case "deletion":
                self.apply(Deletion(key=row["key"], **of))
            case operation:
                assert operation == "flush"
                self.apply(Flush(**of))

    def take_back(self, partition: Partition, to: Seqno) -> None:
        """The state at this seqno again."""
        trail = self.trail.setdefault(partition, [])
        while trail and trail[-1].seqno > to:
            self.items[partition] = dict(trail.pop().before)

    def cloned(self) -> Copy:
        items = {p: dict(items) for p, items in self.items.items()}
        return Copy(items, {p: list(trail) for p, trail in self.trail.items()})


class Memory:
    """A store of positions that keeps the application's state with them, as a transaction would."""

    def __init__(self) -> None:
        self.saved: str | None = None
        self.state = Copy()
        self.live: Copy | None = None
        self.saves = 0
        self.ends: set[tuple[Partition, Seqno]] = set()  # where a snapshot has ended, ever

    def load(self) -> Positions | None:
        return None if self.saved is None else Positions.from_json(json.loads(self.saved))

    def save(self, positions: Positions, /) -> None:
        assert self.live is not None
        if self.ends:
            for partition, place in positions.items():
                assert not place.seqno or (partition, place.seqno) in self.ends, (
                    "only snapshot ends are saved"
                )
        self.saved = json.dumps(positions.to_json())
        # What is past the saved position comes again, or never does: it is not part of what is kept.
        self.state = self.live.cloned()
        for partition in self.state.items:
            known = positions.get(partition)
            self.state.take_back(partition, known.seqno if known else Seqno(0))
        self.saves += 1


class Consumer:
    """The real follower and reader, turned by the world's clock instead of a driver's."""

    def __init__(
        self,
        world: World,
        memory: Memory,
        *,
        until: dict[Partition, Seqno] | None = None,
        columns: bool = False,
        noop: int = 0,
        prefix: bytes = b"",
        now: bool = False,
    ) -> None:
        """`columns`: changes in bulk, as record batches, instead of one by one. `prefix`: only such keys.

        `now`: of `until` only what still exists; else all of it, and the snapshot that it lies in.
        """
        self.world, self.memory, self.prefix = world, memory, prefix
        self.copy = memory.live = memory.state.cloned()
        self.alive = True
        self.events: list[Event] = []
        self._wires: dict[NodeAddress, Wire] = {}
        self._unread: dict[NodeAddress, bytes] = {}
        random = world.random
        self.wanted = ChangesRequest(
            since=memory,
            on_rollback=self._go_back,
            checkpoint_every=random.choice((0.0, 0.05, 0.5)),
            settings=FollowSettings(window=random.choice((200, 1 << 20)), noop=noop),
        )
        begins = memory.load() or Positions({}, of=world.partitions)
        flags = StreamFlag.NONE
        if until is not None:
            flags = StreamFlag.UNTIL_NOW if now else StreamFlag.WHOLE_SNAPSHOTS
        consumers = [
            PartitionConsumer(
                p,
                begins.known(p),
                until=None if until is None else until[p],
                flags=flags,
                log_apart=not world.dialect.log_in_answer,
                bounds=world.dialect.snapshot_bounds,
            )
            for p in world.shards
        ]
        follower = Follower(
            consumers,
            world.routes(),
            dialect=world.dialect,
            random=random.random,
            controls={b"filter.key.prefix": prefix} if prefix else None,
            settings=self.wanted.settings,
        )
        plan = Plan(follower, begins)
        self.reader: Reader[Any] = Reader(
            plan, self.wanted, ColumnDecoder(follower) if columns else EventDecoder(plan.follower)
        )
        self.follower = follower
        self._turn()

    def crash(self) -> None:
        """kill -9: whatever was not saved is gone."""
        self.alive = False
        self.world.counts["crashes"] += 1
        for wire in self._wires.values():
            wire.cut()

    def _go_back(self, event: Rollback) -> Seqno | None:
        """Most applications can go back to the given seqno; some only further back."""
        given = [applied.seqno for applied in self.copy.trail.get(event.partition, [])]
        last = max([event.to, *given])
        # A filtered consumer may have advanced further than its last change.
        assert event.lost[1] >= last if self.prefix else event.lost == (event.to, last), (
            "it takes back what was given"
        )
        known = self.follower.consumers[event.partition].stream.trail.ends
        if known and self.world.random.random() < 0.2:
            to = self.world.random.choice([Seqno(0), *known])
            self.copy.take_back(event.partition, to)
            return to
        return None

    def _turn(self) -> None:
        if not self.alive:
            return
        now, follower = self.world.now, self.follower
        for node in list(self._unread):
            self._read(node)
        follower.tick(now)
        if follower.wants_map(now):
            if self.world.random.random() < 0.8:
                follower.learned(self.world.routes(), now)
            else:
                follower.not_learned(now)
        for node in follower.to_close():
            self._unread.pop(node, None)
            self._wires.pop(node).cut()
        for node in follower.to_open(now):
            wire = self.world.connect(node, lambda data, node=node: self._receive(node, data))  # type: ignore[misc]
            if wire is None:
                follower.failed(node, now, "refused")
            else:
                self._wires[node] = wire
                follower.opened(node, now)
        for node, wire in list(self._wires.items()):
            if not wire.alive:
                self._unread.pop(node, None)
                del self._wires[node]
                follower.failed(node, now, "cut")
            elif node in follower.connections and (out := follower.take_output(node)):
                wire.to_node(out)
        due = self.reader.save_due()
        if due is not None and due <= now:
            self.reader.save(now)
        self.world.at(now + 0.02 + self.world.random.random() * 0.02, self._turn)

    def _receive(self, node: NodeAddress, data: bytes) -> None:
        """Bytes have come. Sometimes they are read at once, sometimes together with what comes next."""
        if self.alive and node in self.follower.connections:
            self._unread[node] = self._unread.get(node, b"") + data
            if self.world.random.random() < 0.5:
                self._read(node)

    def _read(self, node: NodeAddress) -> None:
        reader, now, data = self.reader, self.world.now, self._unread.pop(node)
        if node not in self.follower.connections:
            return
        reader.push(node, data, now)
        reader.asked_on(now)
        while (item := reader.next(now)) is not None:
            if isinstance(item, Rollback):
                assert reader.handler_due(item)
                item = reader.handled(item, self._go_back(item))
            if isinstance(item, pa.RecordBatch):
                for row in item.to_pylist():
                    self.copy.apply_row(row)
            else:
                self.events.append(item)
                self.copy.apply(item)
                if isinstance(item, SnapshotEnd):
                    self.memory.ends.add((item.partition, item.seqno))
            reader.asked_on(now)
        wire = self._wires.get(node)
        if (
            wire is not None
            and node in self.follower.connections
            and (out := self.follower.take_output(node))
        ):
            wire.to_node(out)

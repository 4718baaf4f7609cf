"""The follower without sockets: bytes in, events and bytes out."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from upper.client.bulk import ColumnDecoder
from upper.client.decode import FEW
from upper.client.events import Rollback
from upper.client.follow import Follower
from upper.client.partition_consumer import PartitionConsumer
from upper.client.plan import ChangesRequest, Plan
from upper.client.position_codec import ResumePoints
from upper.client.positions import Positions
from upper.client.reader import EventDecoder, Reader
from upper.client.routes import Routes
from upper.client.url import NodeAddress
from upper.history.following import Following
from upper.model.messages import (
    FailoverLogAnswer,
    Message,
    MutationMessage,
    SnapshotEndMessage,
    SnapshotMarker,
    StreamAccepted,
    StreamStart,
)
from upper.model.values import BranchId, FailoverLog, Partition, Seqno, Version
from upper.wire.upr import UPR

NODE = NodeAddress("node0")
P, Q = Partition(0), Partition(1)
OLD = FailoverLog((Version(BranchId(10), Seqno(0)),))
NEW = FailoverLog((Version(BranchId(20), Seqno(9)), *OLD.versions))


def change(partition: Partition, seqno: int) -> MutationMessage:
    return MutationMessage(key=b"k", value=b"v", seqno=Seqno(seqno), partition=partition, opaque=partition)


def begin(partition: Partition, log: FailoverLog) -> list[Message]:
    of: Any = {"partition": partition, "opaque": partition}
    accepted = StreamAccepted(opaque=partition, versions=log.versions)
    return [accepted, StreamStart(**of), SnapshotMarker(**of)]


def places(items: list[Any]) -> list[tuple[int, int]]:
    """Partition and seqno of each change, from events or batches."""
    found = []
    for item in items:
        if isinstance(item, pa.RecordBatch):
            found += [(row["partition"], row["seqno"]) for row in item.to_pylist()]
        elif not isinstance(item, Rollback):
            found.append((item.partition, item.seqno))
    return found


def taken(reader: Reader[Any], *messages: Message) -> list[Any]:
    """What an application gets when these come together."""
    reader.push(NODE, b"".join(UPR.encode(message) for message in messages), 2.0)
    items = []
    while (item := reader.next(2.0)) is not None:
        items.append(item)
    return items


def cut_inside_a_snapshot(bulk: bool) -> tuple[Follower, Reader[Any]]:
    """A follower that was cut off at 5, inside a snapshot that began after 3, and is connected again."""
    consumers = [PartitionConsumer(partition, ResumePoints(OLD, (Seqno(3),))) for partition in (P, Q)]
    routes = Routes(nodes=(NODE,), owners=(0, 0), revision=1)
    follower = Follower(consumers, routes, dialect=UPR, random=lambda: 0.5)
    plan = Plan(follower, Positions({}, of=2))
    wanted = ChangesRequest(on_rollback="continue")
    reader: Reader[Any] = Reader(
        plan, wanted, ColumnDecoder(follower) if bulk else EventDecoder(plan.follower)
    )
    follower.opened(NODE, 0.0)
    assert places(taken(reader, *begin(P, OLD), change(P, 5))) == [(0, 5)]
    follower.failed(NODE, 1.0, "cut")
    follower.opened(NODE, 2.0)
    assert [consumer.stream.phase for consumer in consumers] == [Following.LOG, Following.ASKING]
    return follower, reader


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("bulk", [False, True], ids=["events", "columns"])
def test_a_stream_is_the_same_wherever_it_is_cut_and_joined(bulk: bool, seed: int) -> None:
    """A driver may put the rest of the last piece in front of the next one. Each byte counts once."""
    chance = random.Random(seed)
    follower = Follower(
        [PartitionConsumer(P, ResumePoints())],
        Routes(nodes=(NODE,), owners=(0,), revision=1),
        dialect=UPR,
        random=lambda: 0.5,
    )
    follower.opened(NODE, 0.0)
    reader: Reader[Any] = Reader(
        Plan(follower, Positions({}, of=1)),
        ChangesRequest(on_rollback="continue"),
        ColumnDecoder(follower) if bulk else EventDecoder(follower),
    )
    sent = [*begin(P, OLD)]
    for seqno in range(1, 60):
        value = bytes(chance.choice((1, 100, 2 * FEW)))
        sent.append(replace(change(P, seqno), value=value))
    data = b"".join(map(UPR.encode, [*sent, SnapshotEndMessage(partition=P, opaque=P)]))
    at, found = 0, []
    frames = follower.connections[NODE].frames
    while at < len(data):
        size = chance.choice((1, 30, 500, 3 * FEW))
        rest = frames.rest if chance.random() < 0.8 else b""
        frames.move_rest(rest)
        reader.push(NODE, rest + data[at : at + size], 2.0)
        while (item := reader.next(2.0)) is not None:
            found.append(item)
        at += size
    assert [seqno for _, seqno in places(found) if seqno][:59] == [*range(1, 60)]
    assert follower.bytes_received == len(data)
    assert follower.consumers[P].stream.seqno == 59


@pytest.mark.parametrize("bulk", [False, True], ids=["events", "columns"])
def test_after_an_invalid_claim_nothing_is_delivered_and_nothing_before_it_is_lost(
    bulk: bool,
) -> None:
    """The history branched between the log and the stream, and its changes are already on their way."""
    follower, reader = cut_inside_a_snapshot(bulk)
    items = taken(
        reader,
        FailoverLogAnswer(opaque=P, versions=OLD.versions),
        *begin(Q, OLD),
        change(Q, 4),
        *begin(P, NEW),
        change(P, 7),
        change(Q, 6),
        SnapshotEndMessage(partition=P, opaque=P),
    )
    assert places(items) == [(1, 4)]
    (rollback,) = [item for item in items if isinstance(item, Rollback)]
    assert (rollback.to, rollback.lost, rollback.branch) == (3, (3, 5), 20)
    assert items[-1] is rollback
    assert follower.connections == {}, "only a new connection is free of what was still to come"
    assert follower.to_close() == [NODE]
    ours, other = follower.consumers.values()
    assert (ours.stream.phase, ours.stream.seqno, ours.known.ends) == (Following.BACK, 3, (3,))
    assert (other.stream.phase, other.stream.seqno, other.known.ends) == (Following.AWAY, 4, (3,))

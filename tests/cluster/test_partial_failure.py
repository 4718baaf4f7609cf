"""A batch of several partitions, some of which leave the node before every copy has their changes.

A response fails exactly if the change it rests on is not on all in-sync copies when its partition leaves.
The same batch's other partitions, and the connection, are not affected.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest

import upper
from tests.cluster import replicas
from tests.cluster.test_active_node import HERE, THERE, Member
from tests.server.inside import Held
from tests.server.peers import Peer
from upper.cluster.bucket_map import BucketMap, BucketSettings, PartitionEntry
from upper.errors import NotMyPartition, Unreachable
from upper.history.partition_state import Access
from upper.model.messages import Request, Response
from upper.model.values import Epoch, Partition, Seqno, partition_of
from upper.server.buffers import Answers
from upper.server.connection import Connection
from upper.server.responses import failures_of
from upper.server.settings import PlainClients, ServerSettings
from upper.storage import Durability
from upper.wire.codes import Opcode, Status
from upper.wire.packet import HEADER, HEADER_SIZE, REQUEST, RESPONSE, Header

PARTITIONS = 4
BOTH = frozenset({HERE, THERE})
KEYS = [b"a", b"b", b"c"]
SENTINEL = 0xFFFFFFFF
FAILED = Status.TEMPORARY_FAILURE
UNKNOWN = Status.SYNC_WRITE_AMBIGUOUS  # the change was made here, and another node may have it
READS = (Opcode.GET, Opcode.GETQ)
STORES = (Opcode.SET, Opcode.SETQ, Opcode.ADD, Opcode.ADDQ)
COMMANDS = [*READS, *STORES, Opcode.DELETE, Opcode.DELETEQ, Opcode.NOOP]
QUIET = {Opcode.SETQ: 0, Opcode.ADDQ: 0, Opcode.DELETEQ: 0, Opcode.GETQ: Status.KEY_NOT_FOUND}


@dataclass
class Asked:
    """A request as the model processed it."""

    opaque: int
    opcode: Opcode
    partition: int
    status: int  # of the response, if it is confirmed
    rests_on: int = 0  # the seqno of the change that it made or read
    changed: bool = False
    batch: int = 0
    allowed: set[int] = field(default_factory=set)  # statuses of the response

    @property
    def silence(self) -> int | None:
        """The status that is not sent."""
        return QUIET.get(self.opcode)


@dataclass
class ModelPartition:
    high: int = 0
    acknowledged: int = 0
    epoch: int = 1
    active: bool = True
    keys: dict[bytes, tuple[int, bool]] = field(default_factory=dict)  # its last seqno, and whether it lives
    ends: list[int] = field(default_factory=list)  # seqnos at the ends of batches
    batches: list[tuple[int, int]] = field(default_factory=list)  # batch and last seqno in it
    waiting: list[Asked] = field(default_factory=list)  # not known yet whether confirmed


class Trial:
    """Random steps of clients, disk, replica and map, all within one callback of the node's loop."""

    def __init__(self, member: Member, connections: list[Connection], random: Random) -> None:
        self.member, self.connections, self.random = member, connections, random
        self.partitions = [ModelPartition() for _ in range(PARTITIONS)]
        self.asked: list[list[Asked]] = [[] for _ in connections]
        self.batch = 0
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        for number in range(PARTITIONS):
            self._attach(number)
        steps = [
            self.send,
            self.send,
            self.send,
            self.commit,
            self.commit,
            self.acknowledge,
            self.acknowledge,
        ]
        for _ in range(60):
            self.random.choice([*steps, self.leave, self.come_back])()
        self.commit()
        for number, model in enumerate(self.partitions):
            if model.active:
                self._acknowledge(number, model.high)
                self._know(model, model.high)
        for connection in self.connections:
            connection.data_received(HEADER.pack(REQUEST, Opcode.NOOP, 0, 0, 0, 0, 0, SENTINEL, 0))

    def send(self) -> None:
        place = self.random.randrange(len(self.connections))
        packets = b"".join(self._request(place) for _ in range(self.random.randint(1, 6)))
        self.connections[place].data_received(packets)

    def _request(self, place: int) -> bytes:
        opcode = self.random.choice(COMMANDS)
        number, key = self.random.randrange(PARTITIONS), self.random.choice(KEYS)
        opaque = len(self.asked[place]) + 1
        self.asked[place].append(self._effect(opcode, number, key, opaque))
        if opcode == Opcode.NOOP:
            return HEADER.pack(REQUEST, opcode, 0, 0, 0, 0, 0, opaque, 0)
        extras, value = (bytes(8), b"v") if opcode in STORES else (b"", b"")
        size = len(extras) + len(key) + len(value)
        head = HEADER.pack(REQUEST, opcode, len(key), len(extras), 0, number, size, opaque, 0)
        return head + extras + key + value

    def _effect(self, opcode: Opcode, number: int, key: bytes, opaque: int) -> Asked:
        model = self.partitions[number]
        if opcode == Opcode.NOOP or not model.active:
            status = 0 if opcode == Opcode.NOOP else Status.NOT_MY_VBUCKET
            return Asked(opaque, opcode, number, status, allowed={status})
        seqno, lives = model.keys.get(key, (0, False))
        asked = Asked(opaque, opcode, number, 0, seqno, batch=self.batch)
        if opcode in READS:
            asked.status = 0 if lives else Status.KEY_NOT_FOUND
        elif opcode in (Opcode.ADD, Opcode.ADDQ) and lives:
            asked.status = Status.KEY_EXISTS
        elif opcode in (Opcode.DELETE, Opcode.DELETEQ) and not lives:
            asked.status = Status.KEY_NOT_FOUND
        else:
            model.high += 1
            asked.rests_on, asked.changed = model.high, True
            model.keys[key] = model.high, opcode in STORES
        model.waiting.append(asked)
        return asked

    def commit(self) -> None:
        self.member.bucket.commit()
        for model in self.partitions:
            if model.high > (model.ends[-1] if model.ends else 0):
                model.ends.append(model.high)
                model.batches.append((self.batch, model.high))
        self.batch += 1

    def acknowledge(self) -> None:
        number = self.random.randrange(PARTITIONS)
        model = self.partitions[number]
        ends = [end for end in model.ends if end > model.acknowledged]
        if model.active and ends:
            self._acknowledge(number, self.random.choice(ends))

    def _acknowledge(self, number: int, seqno: int) -> None:
        model = self.partitions[number]
        model.acknowledged = max(model.acknowledged, seqno)
        pairs = struct.pack(">HQ", number, seqno)
        self.member.replication.acknowledged(THERE, {number: Epoch(model.epoch)}, pairs)

    def leave(self) -> None:
        number = self.random.randrange(PARTITIONS)
        model = self.partitions[number]
        if not model.active:
            return
        if self.random.random() < 0.3:
            self.member.replication.park(Partition(number), True)
        model.active, model.epoch = False, model.epoch + 1
        self.member.store(entry(model), Partition(number))
        self._know(model, model.acknowledged)

    def _know(self, model: ModelPartition, covered: int) -> None:
        """Which responses of a partition are confirmed, now that no more of it is acknowledged."""
        lost = [batch for batch, last in model.batches if last > covered]
        first = min(lost, default=self.batch if model.high > covered else self.batch + 1)
        for asked in model.waiting:
            if asked.rests_on > covered:
                asked.allowed = {UNKNOWN if asked.changed else FAILED}
            elif asked.changed or asked.batch < first:
                asked.allowed = {asked.status}
            else:
                asked.allowed = {asked.status, FAILED}  # a read beside a change that is not covered
            self.seen["failed" if asked.allowed <= {FAILED, UNKNOWN} else "confirmed"] += 1
        model.waiting.clear()

    def come_back(self) -> None:
        number = self.random.randrange(PARTITIONS)
        model = self.partitions[number]
        if model.active:
            return
        model.active, model.epoch = True, model.epoch + 1
        self.member.store(entry(model), Partition(number))
        self.commit()
        self._attach(number)

    def _attach(self, number: int) -> None:
        model = self.partitions[number]
        model.acknowledged = model.high
        self.member.replication.attached(Partition(number), THERE, Epoch(model.epoch), Seqno(model.high))
        assert self.member.partition(number).access is Access.OPEN


def entry(model: ModelPartition) -> PartitionEntry:
    active, other = (HERE, THERE) if model.active else (THERE, HERE)
    return PartitionEntry(Epoch(model.epoch), active, (other,), BOTH, branch_epoch=Epoch(1))


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Member]:
    settings = BucketSettings(partitions=PARTITIONS, replicas=1)
    with Member(tmp_path / "data", settings=settings, durability=Durability.MEMORY) as running:
        entries = [entry(ModelPartition()) for _ in range(PARTITIONS)]
        running.map = BucketMap(settings, tuple(entries), 7)
        running.call(running.join)
        running.until(lambda: not running.replication._activating)
        yield running


def received(peer: Peer) -> list[Response]:
    """The responses up to the sentinel."""
    found: list[Response] = []
    while not found or found[-1].opaque != SENTINEL:
        found += [message for message in peer.receive() if isinstance(message, Response)]
    return found[:-1]


@pytest.mark.parametrize("seed", range(25))
def test_a_response_fails_exactly_if_its_own_change_is_not_covered(member: Member, seed: int) -> None:
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer(("127.0.0.1", member.port), timeout=60)) for _ in range(3)]
        for peer in peers:
            assert peer.ask(Opcode.NOOP).status == 0
        node = member.node
        assert node is not None
        by_port = {connection.peer.rsplit(":", 1)[1]: connection for connection in node.connections.values()}
        connections = [by_port[str(peer.socket.getsockname()[1])] for peer in peers]
        trial = Trial(member, connections, Random(seed))
        member.call(trial.run)
        for peer, asked in zip(peers, trial.asked, strict=True):
            found = received(peer)
            answers = {message.opaque: message for message in found}
            assert [message.opaque for message in found] == sorted(answers), "in order, and each once"
            for one in asked:
                answer = answers.get(one.opaque)
                status = one.silence if answer is None else answer.status
                assert status in one.allowed, (one, answer)
        assert trial.seen["failed"] or trial.seen["confirmed"]


# ── Two nodes ─────────────────────────────────────────────────────────────────────────────────────────


def test_with_two_nodes_only_the_partition_that_leaves_fails_and_the_connection_goes_on(
    tmp_path: Path,
) -> None:
    disk = Held()

    async def main() -> None:
        bucket = BucketSettings(partitions=2, replicas=1)
        server = ServerSettings(port=0, plain_clients=PlainClients.PARTITION_0)
        active = await replicas.Member(tmp_path / "a", partitions=2, bucket=bucket, settings=server).start()
        other = replicas.Member(tmp_path / "b", partitions=2, node_id=replicas.REPLICA, disk=disk)
        copy = await other.start()
        await active.lead()
        both = frozenset((replicas.ACTIVE, replicas.REPLICA))
        for tracked in active.copies.values():
            tracked.observed(replace(tracked.entry, in_sync=both))
        copy.follow(active)
        stores = active.bucket.partitions
        await replicas.until(lambda: all(store.access is Access.OPEN for store in stores))
        reader, writer = await asyncio.open_connection("127.0.0.1", active.node.port)
        await replicas.until(lambda: len(copy.links.links[replicas.ACTIVE].accepted) == 2)
        disk.hold()
        asked = [(Opcode.SET, 0), (Opcode.SET, 1), (Opcode.SETQ, 0), (Opcode.SETQ, 1), (Opcode.NOOP, 0)]
        writer.write(b"".join(change(*one, opaque) for opaque, one in enumerate(asked)))
        await replicas.until(lambda: [store.written for store in stores] == [2, 2])
        await replicas.until(disk.waiting.is_set)
        active.replication.retire(Partition(0))
        del active.copies[Partition(0)]
        disk.released.set()
        answers = [await answered(reader) for _ in range(4)]
        assert answers == [(0, UNKNOWN), (1, 0), (2, UNKNOWN), (4, 0)]
        writer.write(change(Opcode.SET, 1, 9))
        assert await answered(reader) == (9, 0)
        await unknown_outcome(active, copy, disk)
        writer.close()
        await writer.wait_closed()
        await copy.stop()
        await active.stop()

    replicas.run(main)


async def unknown_outcome(active: replicas.Member, copy: replicas.Member, disk: Held) -> None:
    """A partition leaves while the library adds to a counter that its replica has received."""
    key = next(f"n{number}" for number in range(99) if partition_of(f"n{number}".encode(), 2) == 1)
    disk.waiting.clear()
    disk.hold()
    async with upper.aio.connect(f"upr://127.0.0.1:{active.node.port}/default", timeout=60) as bucket:
        adding = asyncio.ensure_future(bucket.incr(key, initial=1))
        await replicas.until(disk.waiting.is_set)
        active.replication.retire(Partition(1))
        del active.copies[Partition(1)]
        disk.released.set()
        with pytest.raises(Unreachable, match="not known whether the change is stored") as error:
            await adding
        assert error.value.sent
    await replicas.until(lambda: key.encode() in copy[1].items)


def change(opcode: int, partition: int, opaque: int) -> bytes:
    body = b"" if opcode == Opcode.NOOP else bytes(8) + b"k%d" % opaque + b"value"
    extras, key = (8, 2) if body else (0, 0)
    return HEADER.pack(REQUEST, opcode, key, extras, 0, partition, len(body), opaque, 0) + body


async def answered(reader: asyncio.StreamReader) -> tuple[int, int]:
    async with asyncio.timeout(60):
        head = Header._make(HEADER.unpack(await reader.readexactly(HEADER_SIZE)))
        await reader.readexactly(head.body)
    return head.opaque, head.vbucket


# ── Answers and requests ──────────────────────────────────────────────────────────────────────────────

GONE = {1: NotMyPartition("another node is active", partition=1)}


def request(opcode: int, partition: int, opaque: int) -> bytes:
    body = b"k" if opcode != Opcode.NOOP else b""
    return HEADER.pack(REQUEST, opcode, len(body), 0, 0, partition, len(body), opaque, 0) + body


def response(opcode: int, opaque: int, status: int = 0, value: bytes = b"") -> bytes:
    return HEADER.pack(RESPONSE, opcode, 0, 0, 0, status, len(value), opaque, 0) + value


def statuses(answers: bytes | None) -> list[tuple[int, int]] | None:
    if answers is None:
        return None
    found, at = [], 0
    while at < len(answers):
        head = Header._make(HEADER.unpack_from(answers, at))
        found.append((head.opaque, head.vbucket))
        at += head.size
    return found


def test_a_quiet_request_whose_change_is_not_confirmed_gets_an_answer_in_its_place() -> None:
    asked = [(Opcode.GET, 0, 1), (Opcode.SETQ, 1, 2), (Opcode.SETQ, 0, 3), (Opcode.NOOP, 0, 4)]
    data = b"".join(request(*one) for one in asked)
    answers = response(Opcode.GET, 1, value=b"v") + response(Opcode.NOOP, 4)
    after = failures_of(answers, [(data, 0, len(data), False)], GONE, 4)
    assert statuses(after) == [(1, 0), (2, UNKNOWN), (4, 0)]


def test_quiet_requests_that_cannot_be_distinguished_fail_the_connection() -> None:
    data = request(Opcode.SETQ, 0, 5) + request(Opcode.SETQ, 1, 5)
    for answers in (b"", response(Opcode.SETQ, 5, Status.KEY_EXISTS)):
        assert failures_of(answers, [(data, 0, len(data), False)], GONE, 4) is None
    held = Answers(4)
    held.hold(3, bytearray(response(Opcode.NOOP, 6)), asked=(data + request(Opcode.NOOP, 0, 6), 0, 74, False))
    held.fail(1, 3, GONE[1])
    assert statuses(bytes(held.release(3, float))) == [(6, FAILED)]
    assert held.unclear


def test_a_request_that_changed_nothing_may_be_repeated_when_its_partition_leaves() -> None:
    asked = [(Opcode.GET, 1, 1), (Opcode.ADD, 1, 2), (Opcode.DELETE, 1, 3), (Opcode.INCREMENT, 1, 4)]
    data = b"".join(request(*one) for one in asked)
    answers = response(Opcode.GET, 1, value=b"v") + response(Opcode.ADD, 2, Status.KEY_EXISTS)
    answers += response(Opcode.DELETE, 3, Status.KEY_NOT_FOUND) + response(Opcode.INCREMENT, 4)
    after = failures_of(answers, [(data, 0, len(data), False)], GONE, 4)
    assert statuses(after) == [(1, FAILED), (2, FAILED), (3, FAILED), (4, UNKNOWN)]


def test_refusals_flushes_and_answers_of_several_packets_stay_in_place() -> None:
    asked = [(Opcode.STAT, 0, 1), (Opcode.SET, 1, 2), (Opcode.FLUSH, 0, 3), (Opcode.DELETE, 1, 4)]
    data = b"".join(request(*one) for one in asked)
    answers = response(Opcode.STAT, 1, value=b"1") + response(Opcode.STAT, 1)
    answers += response(Opcode.SET, 2, Status.NOT_MY_VBUCKET, b"map") + response(Opcode.FLUSH, 3)
    answers += response(Opcode.DELETE, 4) + response(Opcode.GET, 9)  # the last one has no request here
    after = failures_of(answers, [(data, 0, len(data), False)], GONE, 4)
    found = [(1, 0), (1, 0), (2, Status.NOT_MY_VBUCKET), (3, UNKNOWN), (4, UNKNOWN), (9, 0)]
    assert statuses(after) == found


def test_answers_that_are_held_after_a_partition_has_left_are_not_its_failures() -> None:
    held = Answers(4)
    for opaque in (1, 2):
        data = request(Opcode.SET, 1, opaque)
        held.hold(3, bytearray(response(Opcode.SET, opaque)), asked=(data, 0, len(data), False))
        if opaque == 1:
            held.fail(1, 3, GONE[1])
    assert statuses(bytes(held.release(3, float))) == [(1, UNKNOWN), (2, 0)]
    assert (held.size, held.answers, bool(held.queue)) == (0, 0, False)


def test_the_key_names_the_partition_of_a_plain_memcached_client() -> None:
    number = partition_of(b"k", 4)
    data, answers = request(Opcode.SET, 0, 1), response(Opcode.SET, 1)
    for gone in range(4):
        why = {gone: NotMyPartition("gone", partition=gone)}
        after = failures_of(answers, [(data, 0, len(data), True)], why, 4)
        assert statuses(after) == [(1, UNKNOWN if gone == number else 0)]


def test_requests_are_kept_only_in_a_cluster_and_count_as_bytes_that_wait() -> None:
    data = Request(opcode=Opcode.SET, key=b"k", value=b"v" * 100, extras=bytes(8), partition=Partition(1))
    held = Answers(4)
    held.hold(1, bytearray(24), 200)
    assert held.size == 224
    held.hold(1, bytearray(24), 200, asked=(bytes(data.value), 0, 100, False))
    assert held.size == 548
    held.release(1, float)
    assert held.size == 0

"""A load generator: many pipelined writes over several connections, the same for the same seed.

Every item is written once, in order; then updates and deletes of keys that a pattern selects follow. Latency
is measured from sending a portion of requests to the arrival of each response, so it includes waiting behind
the other requests of the portion.

On a cluster, operations that a node refuses or does not answer are passed to the library, which follows the
partition to its new node; what comes later goes there directly.
"""

from __future__ import annotations

import math
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, islice
from random import Random
from typing import NamedTuple
from zlib import crc32

from upper.client.bucket import Bucket
from upper.client.commands import expiration_of
from upper.client.link import Answer
from upper.client.refusals import refusal
from upper.client.sockets import NOT_CONNECTED, NodeConnection, lost, open_socket
from upper.client.url import NodeAddress
from upper.errors import InvalidArguments, Unreachable, ValueTooLarge
from upper.model.values import Partition
from upper.wire.codes import Status
from upper.wire.extras import STORE
from upper.wire.packet import HEADER, MAX_VALUE

_SET = STORE.request()
REPEATED = (Status.NOT_MY_VBUCKET, Status.TEMPORARY_FAILURE, Status.BUSY)  # on a cluster


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    items: int
    value_size: int = 100  # bytes
    updates: int = 0  # writes of items that are already there
    deletes: float = 0.0  # share of the items
    pattern: str = "uniform"  # or "zipf": which keys are updated and deleted
    connections: int = 4
    depth: int = 100  # requests under way on a connection
    seed: int = 1
    key_prefix: str = "key:"
    expiry: int = 0  # seconds

    def __post_init__(self) -> None:
        if not self.items and (self.updates or self.deletes):
            raise InvalidArguments("updates and deletes need items; write at least one")
        if self.value_size > MAX_VALUE:
            raise ValueTooLarge(
                f"values of {self.value_size} bytes are more than the {MAX_VALUE} that a node takes"
            )


class LoadOperation(NamedTuple):
    delete: bool
    item: int


def operations(settings: LoadSettings) -> Iterator[LoadOperation]:
    """The operations, in order; they depend on the settings alone."""
    for item in range(settings.items):
        yield LoadOperation(False, item)
    random = Random(settings.seed)
    pick = _picker(settings, random)
    deletes, updates = round(settings.items * settings.deletes), settings.updates
    while deletes + updates:
        delete = random.random() * (deletes + updates) < deletes
        yield LoadOperation(delete, pick())
        if delete:
            deletes -= 1
        else:
            updates -= 1


def _picker(settings: LoadSettings, random: Random) -> Callable[[], int]:
    count = settings.items
    if settings.pattern == "uniform":
        return lambda: random.randrange(count)
    # A rank with a probability of about 1/rank, scattered so that popular keys are not neighbours.
    scale = math.log(count + 1)
    return lambda: (int(math.exp(random.random() * scale)) * 2654435761) % count


class Latencies:
    """Latencies, as counts by value."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []
        self.count = 0

    def add(self, seconds: float, count: int) -> None:
        self._seen.append((seconds, count))
        self.count += count

    def at(self, share: float) -> float:
        """The latency that this share of requests did not exceed."""
        self._seen.sort()
        wanted, have = share * self.count, 0
        for seconds, count in self._seen:
            have += count
            if have >= wanted:
                return seconds
        return 0.0


@dataclass
class LoadResult:
    seconds: float = 0.0
    sets: int = 0
    deletes: int = 0
    missing: int = 0  # deletes of keys that were not there any more
    bytes_sent: int = 0
    latency: dict[str, Latencies] = field(default_factory=lambda: {"set": Latencies(), "delete": Latencies()})


class Planned(NamedTuple):
    """An operation, and where its value begins in the builder's pool."""

    operation: LoadOperation
    start: int


class LoadConnection:
    """One connection, the operations in flight on it, and those that follow."""

    def __init__(self, opened: NodeConnection) -> None:
        self.opened = opened
        self.todo: deque[Planned] = deque()
        self.sent: deque[Planned] = deque()
        self.out = memoryview(b"")
        self.sent_at = 0.0


class _Builder:
    """Operations as keys, values and packets."""

    def __init__(self, bucket: Bucket, settings: LoadSettings) -> None:
        self._settings = settings
        self._mask = bucket.partitions - 1
        size = max(1, settings.value_size)
        self._pool = Random(settings.seed).randbytes(size + 4096).hex().encode()
        self._written = 0
        self._expiration = expiration_of(settings.expiry, time.time())

    def key(self, item: int) -> bytes:
        return f"{self._settings.key_prefix}{item:09d}".encode()

    def partition(self, key: bytes) -> Partition:
        return Partition((crc32(key) >> 16) & 0x7FFF & self._mask)

    def planned(self, operation: LoadOperation) -> Planned:
        self._written += not operation.delete
        return Planned(operation, self._written * 31 % 4096)

    def value(self, start: int) -> bytes:
        return self._pool[start : start + self._settings.value_size]

    def packet(self, planned: Planned) -> bytes:
        operation, start = planned
        key = self.key(operation.item)
        partition = self.partition(key)
        if operation.delete:
            return HEADER.pack(0x80, 4, len(key), 0, 0, partition, len(key), 0, 0) + key
        value = self.value(start)
        body = 8 + len(key) + len(value)
        head = _SET.pack(0x80, 1, len(key), 8, 0, partition, body, 0, 0, 0, self._expiration)
        return head + key + value


def load(
    bucket: Bucket,
    settings: LoadSettings,
    progress: Callable[[int], None] = lambda steps: None,
    result: LoadResult | None = None,
) -> LoadResult:
    """Write everything. `progress` is called with the number of operations of each portion that was answered.

    `result` is filled along the way, so that a caller has the counts also when this is interrupted.
    """
    result = LoadResult() if result is None else result
    run = _LoadRun(bucket, settings, result, progress)
    try:
        for node in bucket.routes.active:
            with suppress(*NOT_CONNECTED if len(bucket.routes.nodes) > 1 else ()):
                run.connections_of(node)
        begin = time.monotonic()
        try:
            run.drive()
        finally:
            result.seconds = time.monotonic() - begin
    except OSError as error:
        raise lost(error) from None
    finally:
        run.close()
    return result


class _LoadRun:
    """One run: connections by node, and the operations on their way."""

    def __init__(
        self, bucket: Bucket, settings: LoadSettings, result: LoadResult, progress: Callable[[int], None]
    ) -> None:
        self._bucket, self._settings, self._result, self._progress = bucket, settings, result, progress
        self._build = _Builder(bucket, settings)
        self._routes = bucket.routes
        self._connections: dict[NodeAddress, list[LoadConnection]] = {}
        self._by_number: dict[int, LoadConnection] = {}
        self._poll = select.poll()

    def connections_of(self, node: NodeAddress) -> list[LoadConnection]:
        """The connections to a node, opened when they are needed."""
        if not self._connections.get(node):
            deadline = time.monotonic() + self._bucket.timeout
            self._connections[node] = [
                LoadConnection(NodeConnection(node, open_socket(self._bucket.access, node, deadline)))
                for _ in range(self._settings.connections)
            ]
            self._by_number |= {each.opened.socket.fileno(): each for each in self._connections[node]}
        return self._connections[node]

    def close(self) -> None:
        for connection in self._by_number.values():
            connection.opened.socket.close()

    def drive(self) -> None:
        todo = operations(self._settings)
        while True:
            idle = [each for each in self._by_number.values() if not each.sent]
            while idle or not self._by_number:
                some = list(islice(todo, self._settings.depth * max(1, len(idle))))
                self._assign(some)
                idle = [each for each in idle if each in self._by_number.values() and not self._send(each)]
                if not some:
                    break
            if not any(each.sent or each.todo for each in self._by_number.values()):
                return
            self._wait()

    def _assign(self, some: Iterable[LoadOperation]) -> None:
        """Operations of one key stay in order only within a connection, so a key always goes to the same."""
        away: set[NodeAddress | None] = {None}  # nodes that cannot be reached at the moment
        unassigned = []
        for operation in some:
            node = self._routes.owner(self._build.partition(self._build.key(operation.item)))
            try:
                mine = self.connections_of(node) if node is not None and node not in away else []
            except NOT_CONNECTED:
                away.add(node)
                mine = []
            if mine:
                mine[operation.item % len(mine)].todo.append(self._build.planned(operation))
            else:
                unassigned.append(self._build.planned(operation))
        self._again(unassigned)

    def _wait(self) -> None:
        ready = self._poll.poll(self._bucket.timeout * 1000)
        if not ready:
            raise Unreachable(f"no answer within {self._bucket.timeout:g} seconds; see the node's log")
        for number, _ in ready:
            connection = self._by_number.get(number)
            if connection is not None:
                try:
                    self._push(connection)
                    refused = self._receive(connection)
                except OSError as error:
                    self._failed(connection, error)
                else:
                    self._again(refused)

    def _send(self, connection: LoadConnection) -> bool:
        """Send the next portion, if there is one and the last is answered."""
        if connection.sent or not connection.todo:
            return False
        for _ in range(min(self._settings.depth, len(connection.todo))):
            connection.sent.append(connection.todo.popleft())
        data = b"".join(map(self._build.packet, connection.sent))
        self._result.bytes_sent += len(data)
        connection.out = memoryview(data)
        connection.sent_at = time.perf_counter()
        try:
            self._push(connection)
        except OSError as error:
            self._failed(connection, error)
        return True

    def _push(self, connection: LoadConnection) -> None:
        while connection.out and (sent := connection.opened.send(connection.out)):
            connection.out = connection.out[sent:]
        events = select.POLLIN | (select.POLLOUT if connection.out else 0)
        self._poll.register(connection.opened.socket, events)

    def _receive(self, connection: LoadConnection) -> list[Planned]:
        """Count the responses that have arrived; the operations that were refused for the moment."""
        data = connection.opened.receive()
        if data is None:
            return []
        if not data:
            raise ConnectionResetError("the node closed the connection")
        answers: list[Answer] = connection.opened.link.receive(data)
        latency = time.perf_counter() - connection.sent_at
        deletes, refused = 0, []
        for answer in answers:
            planned = connection.sent.popleft()
            delete = planned.operation.delete
            if answer.status:
                if answer.status in REPEATED and len(self._routes.nodes) > 1:
                    refused.append(planned)
                    continue
                if answer.status != Status.KEY_NOT_FOUND or not delete:
                    raise refusal(answer)
                self._result.missing += 1
            deletes += delete
        self._count(len(answers) - len(refused) - deletes, deletes, latency)
        return refused

    def _count(self, sets: int, deletes: int, latency: float) -> None:
        for kind, count in (("set", sets), ("delete", deletes)):
            if count:
                self._result.latency[kind].add(latency, count)
        self._result.sets += sets
        self._result.deletes += deletes
        self._progress(sets + deletes)

    def _failed(self, connection: LoadConnection, error: OSError) -> None:
        """A connection broke. Its operations are performed by the library, if there are other nodes."""
        if len(self._routes.nodes) < 2:
            raise error
        opened = connection.opened
        self._poll.unregister(opened.socket)
        del self._by_number[opened.socket.fileno()]
        opened.socket.close()
        self._connections[opened.node].remove(connection)
        self._again([*connection.sent, *connection.todo])

    def _again(self, some: list[Planned]) -> None:
        """Perform operations wherever their partitions are by now, and use the newer map from then on."""
        for delete, group in groupby(some, key=lambda planned: planned.operation.delete):
            pairs = [(self._build.key(op.item), self._build.value(start)) for op, start in group]
            begin = time.perf_counter()
            if delete:
                self._result.missing += len(pairs) - self._bucket.delete_many(key for key, _ in pairs)
            else:
                self._bucket.set_many(pairs, expiry=self._settings.expiry)
            self._count(0 if delete else len(pairs), len(pairs) if delete else 0, time.perf_counter() - begin)
        self._routes = self._bucket.routes

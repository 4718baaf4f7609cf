"""A load generator: many pipelined writes over several connections, the same for the same seed.

Every item is written once, in order; then come updates and deletes of keys that a pattern chooses. Latency is
from the moment a portion of requests is handed to the socket to the arrival of each answer, so it includes
waiting behind the others of the portion, as a pipelining client sees it.
"""

from __future__ import annotations

import math
import select
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import NamedTuple
from zlib import crc32

from upper.client.bucket import Bucket
from upper.client.link import Answer, refusal
from upper.client.sockets import Line, open_socket
from upper.client.url import Node
from upper.errors import InvalidArguments, Unreachable, ValueTooLarge
from upper.wire.codes import Opcode, Status
from upper.wire.packet import MAX_VALUE

_SET = struct.Struct(">BBHBBHIIQII")
_DELETE = struct.Struct(">BBHBBHIIQ")


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
            raise InvalidArguments("updates and deletes are of items, and there are none; write at least one")
        if self.value_size > MAX_VALUE:
            raise ValueTooLarge(
                f"values of {self.value_size} bytes are more than the {MAX_VALUE} that a node takes"
            )


class Operation(NamedTuple):
    delete: bool
    item: int


def operations(settings: LoadSettings) -> Iterator[Operation]:
    """What is done, in order; it depends on the settings alone."""
    for item in range(settings.items):
        yield Operation(False, item)
    random = Random(settings.seed)
    pick = _picker(settings, random)
    deletes, updates = round(settings.items * settings.deletes), settings.updates
    while deletes + updates:
        delete = random.random() * (deletes + updates) < deletes
        yield Operation(delete, pick())
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


class Spread:
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
class Result:
    seconds: float = 0.0
    sets: int = 0
    deletes: int = 0
    missing: int = 0  # deletes of keys that were not there any more
    bytes_sent: int = 0
    latency: dict[str, Spread] = field(default_factory=lambda: {"set": Spread(), "delete": Spread()})


class _Lane:
    """One connection and what it has under way."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.todo: deque[bytes] = deque()
        self.out = memoryview(b"")
        self.missing = 0
        self.sent_at = 0.0


class _Builder:
    """Operations as packets."""

    def __init__(self, bucket: Bucket, settings: LoadSettings) -> None:
        self._settings = settings
        self._mask = bucket.partitions - 1
        self._routes = bucket.routes
        size = max(1, settings.value_size)
        self._pool = Random(settings.seed).randbytes(size + 4096).hex().encode()
        self._written = 0

    def __call__(self, operation: Operation) -> tuple[Node, bytes]:
        settings = self._settings
        key = f"{settings.key_prefix}{operation.item:09d}".encode()
        partition = (crc32(key) >> 16) & 0x7FFF & self._mask
        node = self._routes.nodes[self._routes.owners[partition]]
        if operation.delete:
            return node, _DELETE.pack(0x80, 4, len(key), 0, 0, partition, len(key), 0, 0) + key
        size = settings.value_size
        self._written += 1
        start = self._written * 31 % 4096
        body = 8 + len(key) + size
        head = _SET.pack(0x80, 1, len(key), 8, 0, partition, body, 0, 0, 0, settings.expiry)
        return node, head + key + self._pool[start : start + size]


def load(
    bucket: Bucket, settings: LoadSettings, progress: Callable[[int], None] = lambda steps: None
) -> Result:
    """Carry it all out; `progress` hears of every portion that was answered."""
    result = Result()
    nodes = sorted({bucket.routes.nodes[owner] for owner in bucket.routes.owners if owner >= 0})
    deadline = time.monotonic() + bucket.timeout
    lanes: dict[Node, list[_Lane]] = {}
    try:
        for node in nodes:
            lanes[node] = [
                _Lane(Line(node, open_socket(bucket.access, node, deadline)))
                for _ in range(settings.connections)
            ]
        begin = time.monotonic()
        _drive(bucket, settings, lanes, result, progress)
        result.seconds = time.monotonic() - begin
    except OSError as error:
        raise Unreachable(
            f"the connection was lost ({error}); what was under way may have happened or not"
        ) from None
    finally:
        for each in (lane for some in lanes.values() for lane in some):
            each.line.socket.close()
    return result


def _drive(
    bucket: Bucket,
    settings: LoadSettings,
    lanes: dict[Node, list[_Lane]],
    result: Result,
    progress: Callable[[int], None],
) -> None:
    todo, build = operations(settings), _Builder(bucket, settings)
    everyone = [lane for some in lanes.values() for lane in some]
    by_number = {lane.line.socket.fileno(): lane for lane in everyone}
    poll = select.poll()
    idle = list(everyone)
    while True:
        while idle:
            # A round of operations for everybody; those of one key stay in order only within a lane, so a key
            # always goes to the same lane of its node.
            some = list(islice(todo, settings.depth * len(idle)))
            if not some and not any(lane.todo for lane in everyone):
                break
            for operation in some:
                node, packet = build(operation)
                mine = lanes[node]
                mine[operation.item % len(mine)].todo.append(packet)
            idle = [lane for lane in idle if not _send(lane, settings.depth, poll, result)]
            if not some:
                break
        waiting = [lane for lane in everyone if lane.missing]
        if not waiting:
            return
        for number, _ in poll.poll(bucket.timeout * 1000) or [(-1, 0)]:
            if number < 0:
                raise Unreachable(f"no answer within {bucket.timeout:g} seconds; look into the node's log")
            lane = by_number[number]
            _push(lane, poll)
            _receive(lane, result, progress)
            if not lane.missing:
                idle.append(lane)


def _send(lane: _Lane, depth: int, poll: select.poll, result: Result) -> bool:
    """Hand the next portion to the socket, if there is one and the last is answered."""
    if lane.missing or not lane.todo:
        return False
    portion = [lane.todo.popleft() for _ in range(min(depth, len(lane.todo)))]
    lane.missing = len(portion)
    data = b"".join(portion)
    result.bytes_sent += len(data)
    lane.out = memoryview(data)
    lane.sent_at = time.perf_counter()
    _push(lane, poll)
    return True


def _push(lane: _Lane, poll: select.poll) -> None:
    while lane.out and (sent := lane.line.send(lane.out)):
        lane.out = lane.out[sent:]
    poll.register(lane.line.socket, select.POLLIN | (select.POLLOUT if lane.out else 0))


def _receive(lane: _Lane, result: Result, progress: Callable[[int], None]) -> None:
    data = lane.line.receive()
    if data is None:
        return
    if not data:
        raise ConnectionResetError("the node closed the connection")
    answers: list[Answer] = lane.line.link.receive(data)
    latency = time.perf_counter() - lane.sent_at
    deletes = 0
    for answer in answers:
        if answer.opcode == Opcode.DELETE:
            deletes += 1
            if answer.status == Status.KEY_NOT_FOUND:
                result.missing += 1
                continue
        if answer.status:
            raise refusal(answer)
    sets = len(answers) - deletes
    if sets:
        result.latency["set"].add(latency, sets)
    if deletes:
        result.latency["delete"].add(latency, deletes)
    result.sets += sets
    result.deletes += deletes
    lane.missing -= len(answers)
    progress(len(answers))

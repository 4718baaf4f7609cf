"""What each key-value call asks of the nodes, and what it makes of their answers. No I/O.

A call is a generator: it yields a `Batch` of packets by node, or a `Wait`, and a driver sends back all
answers, or throws in what went wrong. So a call is written once for both drivers. Opaques are the
places of requests in a call; a partition that has moved is asked for again where the new map says.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from zlib import crc32

from upper.client.backoff import Backoff, BackoffSettings
from upper.client.calls import Answers, Batch, Call, Copy, Item, Promoted, Stored, Text, Wait
from upper.client.link import Answer, nobody, refusal
from upper.client.routes import Routes
from upper.client.url import Address, Node
from upper.errors import InvalidArguments, RemoteProtocolError, TimedOut, Unreachable, ValueTooLarge
from upper.model.values import BranchId, Cas, FailoverLog, Partition, Seqno, Version
from upper.wire.codes import Opcode, Status
from upper.wire.packet import MAX_VALUE, REQUEST, pack

FAILOVER_LOG = 0x51  # UPR's; a connection that asks it goes on to take key-value calls
NEVER = 0xFFFFFFFF  # the expiration that makes a counter fail instead of creating it

_STORE = struct.Struct(">BBHBBHIIQII")
_BARE = struct.Struct(">BBHBBHIIQ")
_TOKEN = struct.Struct(">QQ")
_READS = (Opcode.GET, Opcode.GET_META)


class Commands:
    """The calls of one bucket, and the map they go by."""

    def __init__(
        self, address: Address, *, random: Callable[[], float], backoff: BackoffSettings | None = None
    ) -> None:
        self._address = address
        self._random = random
        self._backoff = backoff or BackoffSettings()
        self._routes: Routes | None = None

    # ── The map ───────────────────────────────────────────────────────────────────────────────────

    @property
    def routes(self) -> Routes:
        if self._routes is None:
            raise Unreachable("no node has been asked for the map yet; connect first")
        return self._routes

    def learn(self) -> Call[Routes]:
        """Ask the nodes for the map, those that are known first, until one answers."""
        known = self._routes.nodes if self._routes else ()
        failure: Unreachable | None = None
        nodes = dict.fromkeys((*known, *self._address.nodes))
        for node in nodes:
            try:
                answers: Answers = yield Batch({node: [pack(REQUEST, Opcode.GET_CLUSTER_CONFIG)]})
            except TimedOut:
                raise
            except Unreachable as error:
                failure = error
                continue
            answer = answers[node][0]
            if answer.status:
                raise refusal(answer)
            return self.adopt(answer.value, asked=node)
        if failure is None or len(nodes) == 1:
            raise failure or Unreachable("the URL names no node that answers")
        raise Unreachable(f"none of {', '.join(map(str, nodes))} can be reached; is a node running there?")

    def adopt(self, data: bytes, *, asked: Node) -> Routes:
        """Go by this map from now on, unless a newer one is known."""
        routes = Routes.parse(data, asked=asked)
        if self._routes is None or routes.revision >= self._routes.revision:
            self._routes = routes
        return self._routes

    def patient_learn(self) -> Call[Routes]:
        """The map, however long it takes; the driver's deadline ends it."""
        backoff = Backoff(self._backoff, self._random)
        while True:
            try:
                return (yield from self.learn())
            except TimedOut:
                raise
            except Unreachable as error:
                try:
                    yield Wait(backoff.next())
                except TimedOut:
                    raise error from None

    def spread(
        self, requests: Sequence[tuple[Partition, bytes]], *, again: bool, tokens: bool = False
    ) -> Call[list[Answer]]:
        """Each request to the node that holds its partition; the answers in the order of the requests.

        Opaques must be the indices. `again`: the requests may be sent a second time when a connection is
        lost, because doing them twice does no harm.
        """
        if self._routes is None:
            yield from self.patient_learn()
        answers: list[Answer | None] = [None] * len(requests)
        pending: Iterable[int] = range(len(requests))
        backoff = Backoff(self._backoff, self._random)
        while pending:
            by_node, moved = self._by_node(requests, pending)
            refused: Exception | None = nobody(requests[moved[0]][0]) if moved else None
            try:
                got: Answers = yield Batch(by_node, tokens)
            except TimedOut:
                raise
            except Unreachable as error:
                if not again:
                    raise
                moved, refused = list(pending), error
            else:
                for node, batch in got.items():
                    for answer in batch:
                        if answer.status == 0 and answer.opaque < len(answers):
                            answers[answer.opaque] = answer
                        elif answer.status == Status.NOT_MY_VBUCKET:
                            moved.append(answer.opaque)
                            if answer.value:
                                self.adopt(answer.value, asked=node)
                            refused = refused or refusal(answer, partition=requests[answer.opaque][0])
                        elif answer.opaque < len(answers):
                            answers[answer.opaque] = answer
            if moved:
                try:
                    yield Wait(backoff.next())
                    yield from self.learn()
                except TimedOut:
                    if refused is None:
                        raise
                    raise refused from None
                except Unreachable:
                    pass  # the next round meets the same, or better
            pending = sorted(moved)
        whole = [answer for answer in answers if answer is not None]
        if len(whole) != len(requests):
            raise RemoteProtocolError(
                "a node left requests unanswered and answered others; it is not a node of ours"
            )
        return whole

    def _by_node(
        self, requests: Sequence[tuple[Partition, bytes]], pending: Iterable[int]
    ) -> tuple[dict[Node, list[bytes]], list[int]]:
        """The packets by the node that takes them, and the requests that nobody takes at the moment."""
        nodes, owners = self.routes.nodes, self.routes.owners
        portions: list[list[bytes]] = [[] for _ in nodes]
        homeless = []
        for index in pending:
            partition, packet = requests[index]
            owner = owners[partition]
            if owner < 0:
                homeless.append(index)
            else:
                portions[owner].append(packet)
        by_node = {node: portion for node, portion in zip(nodes, portions, strict=True) if portion}
        return by_node, homeless

    def one(
        self,
        key: Text,
        opcode: Opcode,
        *,
        again: bool,
        extras: bytes = b"",
        value: bytes = b"",
        cas: int = 0,
    ) -> Call[Answer]:
        """One request about one key, and the answer, which is not a refusal."""
        name = as_bytes(key)
        if self._routes is None:
            yield from self.patient_learn()
        partition = self.routes.partition_of(name)
        packet = pack(REQUEST, opcode, key=name, extras=extras, value=value, cas=cas, vbucket=partition)
        tokens = opcode not in _READS
        (answer,) = yield from self.spread([(partition, packet)], again=again, tokens=tokens)
        if answer.status:
            raise refusal(answer, partition=partition)
        return answer

    # ── One key ───────────────────────────────────────────────────────────────────────────────────

    def get(self, key: Text) -> Call[Item]:
        return _item((yield from self.one(key, Opcode.GET, again=True)))

    def store(
        self, opcode: Opcode, key: Text, value: Text, *, expiry: int = 0, flags: int = 0, cas: int = 0
    ) -> Call[Stored]:
        extras = struct.pack(">II", flags, expiry)
        again = opcode == Opcode.SET and not cas
        return _stored(
            (yield from self.one(key, opcode, again=again, extras=extras, value=as_value(value), cas=cas))
        )

    def extend(self, opcode: Opcode, key: Text, value: Text, *, cas: int = 0) -> Call[Stored]:
        """APPEND and PREPEND."""
        return _stored((yield from self.one(key, opcode, again=False, value=as_value(value), cas=cas)))

    def delete(self, key: Text, *, cas: int = 0) -> Call[Stored]:
        return _stored((yield from self.one(key, Opcode.DELETE, again=False, cas=cas)))

    def touch(self, key: Text, expiry: int) -> Call[Stored]:
        return _stored((yield from self.one(key, Opcode.TOUCH, again=True, extras=struct.pack(">I", expiry))))

    def get_and_touch(self, key: Text, expiry: int) -> Call[Item]:
        return _item((yield from self.one(key, Opcode.GAT, again=True, extras=struct.pack(">I", expiry))))

    def get_and_lock(self, key: Text, seconds: int) -> Call[Item]:
        return _item(
            (yield from self.one(key, Opcode.GET_LOCKED, again=False, extras=struct.pack(">I", seconds)))
        )

    def unlock(self, key: Text, cas: int) -> Call[None]:
        yield from self.one(key, Opcode.UNLOCK_KEY, again=False, cas=cas)

    def count(self, opcode: Opcode, key: Text, by: int, *, initial: int | None, expiry: int = 0) -> Call[int]:
        extras = struct.pack(">QQI", by, initial or 0, NEVER if initial is None else expiry)
        answer = yield from self.one(key, opcode, again=False, extras=extras)
        return int.from_bytes(answer.value, "big")

    # ── Many keys ─────────────────────────────────────────────────────────────────────────────────

    def get_many(self, keys: Sequence[Text]) -> Call[dict[bytes, Item]]:
        names = [as_bytes(key) for key in keys]
        answers = yield from self._bare(Opcode.GET, names)
        found = {}
        for name, answer in zip(names, answers, strict=True):
            if answer.status == Status.OK:
                found[name] = _item(answer)
            elif answer.status != Status.KEY_NOT_FOUND:
                raise refusal(answer)
        return found

    def delete_many(self, keys: Sequence[Text]) -> Call[int]:
        """How many of them were there."""
        answers = yield from self._bare(Opcode.DELETE, [as_bytes(key) for key in keys])
        _check(answers, but=Status.KEY_NOT_FOUND)
        return sum(answer.status == Status.OK for answer in answers)

    def set_many(
        self, items: Iterable[tuple[Text, Text]], *, expiry: int = 0, flags: int = 0
    ) -> Call[list[Stored]]:
        if self._routes is None:
            yield from self.patient_learn()
        mask, pack = self.routes.partitions - 1, _STORE.pack
        requests = []
        for index, (key, value) in enumerate(items):
            name = key.encode() if isinstance(key, str) else as_bytes(key)
            data = value if type(value) is bytes and len(value) <= MAX_VALUE else as_value(value)
            partition = Partition((crc32(name) >> 16) & 0x7FFF & mask)
            size = len(name)
            head = pack(REQUEST, 0x01, size, 8, 0, partition, 8 + size + len(data), index, 0, flags, expiry)
            requests.append((partition, head + name + data))
        answers = yield from self.spread(requests, again=True)
        _check(answers)
        new = tuple.__new__  # as in `link`: one for each of very many
        return [new(Stored, (answer.cas, None, None)) for answer in answers]

    def copy_many(self, copies: Sequence[Copy], *, force: bool = False) -> Call[list[bool]]:
        """Writes with their own revision and CAS; False where the node already has something newer.

        `force`: what is given here wins, whatever the node has.
        """
        if self._routes is None:
            yield from self.patient_learn()
        options = struct.pack(">I", FORCE) if force else b""
        requests = []
        for index, copy in enumerate(copies):
            partition = self.routes.partition_of(copy.key)
            gone = copy.value is None
            extras = struct.pack(">IIQQ", copy.flags, copy.expiration, copy.revision, copy.cas) + options
            packet = pack(
                REQUEST,
                Opcode.DELETE_WITH_META if gone else Opcode.SET_WITH_META,
                key=copy.key,
                value=copy.value or b"",
                extras=extras,
                vbucket=partition,
                opaque=index,
            )
            requests.append((partition, packet))
        answers = yield from self.spread(requests, again=True)
        _check(answers, but=Status.KEY_EXISTS)
        return [answer.status == Status.OK for answer in answers]

    def _bare(self, opcode: Opcode, names: Sequence[bytes]) -> Call[list[Answer]]:
        """A command that is only a key, for each of them."""
        if self._routes is None:
            yield from self.patient_learn()
        mask = self.routes.partitions - 1
        requests = []
        for index, name in enumerate(names):
            partition = Partition((crc32(name) >> 16) & 0x7FFF & mask)
            head = _BARE.pack(REQUEST, opcode, len(name), 0, 0, partition, len(name), index, 0)
            requests.append((partition, head + name))
        return (yield from self.spread(requests, again=True))

    # ── The nodes and their partitions ────────────────────────────────────────────────────────────

    def flush(self) -> Call[None]:
        yield from self._everywhere(Opcode.FLUSH)

    def _everywhere(
        self, opcode: int, *, key: bytes = b"", extras: bytes = b"", but: int | None = None
    ) -> Call[Answers]:
        """One command to every node that holds something."""
        if self._routes is None:
            yield from self.patient_learn()
        packet = pack(REQUEST, opcode, key=key, extras=extras)
        answers: Answers = yield Batch({node: [packet] for node in self.routes.nodes})
        for batch in answers.values():
            _check(batch, but=but)
        return answers

    def stats(self, group: str = "") -> Call[dict[Node, dict[str, str]]]:
        """By node; of a partition, by the node that holds it."""
        answers = yield from self._everywhere(Opcode.STAT, key=group.encode(), but=Status.NOT_MY_VBUCKET)
        found = {
            node: {
                line.key.decode(errors="replace"): line.value.decode(errors="replace")
                for line in lines
                if not line.final
            }
            for node, lines in answers.items()
            if not any(line.status for line in lines)
        }
        if not found:
            last = self.routes.partitions - 1
            raise InvalidArguments(f"no node holds such a partition; they are numbered from 0 to {last}")
        return found

    def seqnos(self) -> Call[dict[Partition, Seqno]]:
        """How far each active partition is."""
        answers = yield from self._everywhere(Opcode.GET_ALL_VB_SEQNOS, extras=struct.pack(">I", 1))
        highs: dict[Partition, Seqno] = {}
        for node, (answer,) in answers.items():
            if len(answer.value) % 10:
                raise RemoteProtocolError(
                    f"{node} sent seqnos of {len(answer.value)} bytes, 10 are one partition"
                )
            for partition, seqno in struct.iter_unpack(">HQ", answer.value):
                highs[Partition(partition)] = Seqno(seqno)
        return dict(sorted(highs.items()))

    def failover_logs(
        self, partitions: Iterable[Partition] | None = None
    ) -> Call[dict[Partition, FailoverLog]]:
        if self._routes is None:
            yield from self.patient_learn()
        wanted = list(range(self.routes.partitions) if partitions is None else partitions)
        self._exist(wanted)
        requests = [
            (Partition(partition), pack(REQUEST, FAILOVER_LOG, vbucket=partition, opaque=index))
            for index, partition in enumerate(wanted)
        ]
        answers = yield from self.spread(requests, again=True)
        _check(answers)
        return {Partition(p): parse_log(answer.value) for p, answer in zip(wanted, answers, strict=True)}

    def promote(self, partition: Partition, *, to: Seqno | None = None) -> Call[Promoted]:
        """Record a history branch by hand; with `to`, go back to there (or before) first."""
        request: dict[str, object] = {"promote": True}
        if to is not None:
            request["to"] = int(to)
        if self._routes is None:
            yield from self.patient_learn()
        self._exist([partition])
        packet = pack(
            REQUEST,
            Opcode.SET_VBUCKET_STATE,
            extras=b"\x01",
            value=json.dumps(request).encode(),
            vbucket=partition,
        )
        (answer,) = yield from self.spread([(partition, packet)], again=False)
        if answer.status:
            raise refusal(answer, partition=partition)
        try:
            said = json.loads(answer.value)
            versions = (Version(BranchId(int(b)), Seqno(int(s))) for b, s in said["log"])
            return Promoted(partition, Seqno(said["seqno"]), FailoverLog(tuple(versions)))
        except (ValueError, KeyError, TypeError) as error:
            raise RemoteProtocolError(f"the answer to the promotion makes no sense: {error}") from None

    def _exist(self, partitions: Iterable[int]) -> None:
        for partition in partitions:
            if not 0 <= partition < self.routes.partitions:
                raise InvalidArguments(
                    f"there is no partition {partition}; they are 0 to {self.routes.partitions - 1}"
                )


def parse_log(value: bytes) -> FailoverLog:
    try:
        return FailoverLog(tuple(Version(BranchId(b), Seqno(s)) for b, s in struct.iter_unpack(">QQ", value)))
    except (ValueError, struct.error) as error:
        raise RemoteProtocolError(f"the failover log makes no sense: {error}") from None


def as_bytes(text: Text) -> bytes:
    if isinstance(text, str):
        return text.encode()
    if isinstance(text, bytes | bytearray | memoryview):
        return bytes(text)
    # Of a number Python would make as many zeros.
    raise TypeError(f"keys and values are str or bytes, not {type(text).__name__}; convert it first")


def as_value(text: Text) -> bytes:
    """A value, if a node would take one of this size; it would close the connection on a larger one."""
    data = as_bytes(text)
    if len(data) > MAX_VALUE:
        raise ValueTooLarge(f"the value has {len(data)} bytes and a node takes at most {MAX_VALUE}; split it")
    return data


FORCE = 0x01  # the option of with-meta writes that skips the comparison with what is there


def _item(answer: Answer) -> Item:
    flags = int.from_bytes(answer.extras[:4], "big") if len(answer.extras) >= 4 else 0
    return Item(answer.value, Cas(answer.cas), flags)


def _stored(answer: Answer) -> Stored:
    if len(answer.extras) == 16:
        branch, seqno = _TOKEN.unpack(answer.extras)
        return Stored(Cas(answer.cas), branch, seqno)
    return Stored(Cas(answer.cas))


def _check(answers: Iterable[Answer], *, but: int | None = None) -> None:
    for answer in answers:
        if answer.status and answer.status != but:
            raise refusal(answer)


__all__ = ["Commands", "Copy", "Item", "Promoted", "Stored", "as_bytes", "parse_log"]

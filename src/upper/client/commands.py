"""What each key-value call sends, and what it returns. No I/O.

This is the one description of the calls of a bucket: `operations` gives each of them to the blocking and to
the asyncio bucket, with these signatures and docstrings. Opaques are the indices of requests in a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from upper import kernel
from upper.client.calls import (
    MAX_KEY,
    Call,
    Copy,
    Item,
    Metadata,
    NewDeadline,
    Stored,
    Text,
    as_bytes,
    as_key,
    require_number,
    too_long,
)
from upper.client.copies import (
    MAX_IN_FLIGHT,
    MAX_REQUESTS,
    copy_requests,
    row_portions,
    row_requests,
    too_large,
)
from upper.client.link import Answer, Purpose
from upper.client.node_commands import NodeCommands, check
from upper.client.refusals import refusal
from upper.client.routing import PackedRequests
from upper.errors import InvalidArguments, KeyNotFound, RemoteProtocolError
from upper.model.values import BranchId, Cas, Seqno
from upper.wire.codes import Opcode, Status
from upper.wire.extras import (
    COUNT,
    EXPIRATION,
    LOCK_TIME,
    META,
    STORE,
    TOKEN,
)
from upper.wire.packet import HEADER, MAX_VALUE, REQUEST, pack

if TYPE_CHECKING:
    import pyarrow

MONTH = 30 * 86400  # seconds; nodes read a larger expiration as seconds since the epoch, as memcached does
NO_OPTIONS = STORE.build(0, 0)  # of most writes
NEVER_CREATE = 0xFFFFFFFF  # the expiration with which a counter that does not exist is not created

_status = itemgetter(1)  # of an `Answer`
_PURPOSES = dict.fromkeys((Opcode.GET, Opcode.GET_META), Purpose.REQUESTS)

T = TypeVar("T")


class Commands(NodeCommands):
    """The calls of one bucket."""

    clock: Callable[[], float] = staticmethod(time.time)

    def _one(
        self,
        key: Text,
        opcode: Opcode,
        *,
        again: bool,
        extras: bytes = b"",
        value: bytes = b"",
        cas: int = 0,
        wait: bool = True,
    ) -> Call[Answer]:
        """One request about one key, and the response; a refusal is raised."""
        name = as_key(key)
        require_number("cas", cas, 64)
        routes = self._routes or (yield from self.ready())
        partition = routes.partition_of(name)
        body = extras + name + value
        packet = HEADER.pack(REQUEST, opcode, len(name), len(extras), 0, partition, len(body), 0, cas) + body
        purpose = _PURPOSES.get(opcode, Purpose.TOKENS)
        answer = yield from self.ask(partition, packet, again=again, purpose=purpose, wait=wait)
        if answer.status:
            raise refusal(answer, partition=partition, key=name)
        return answer

    def _expiration(self, expiry: int) -> int:
        return expiration_of(expiry, self.clock())

    # ── One key ───────────────────────────────────────────────────────────────────────────────────

    def get(self, key: Text) -> Call[Item]:
        """The item of a key; raises KeyNotFound."""
        return _item((yield from self._one(key, Opcode.GET, again=True)))

    def exists(self, key: Text) -> Call[bool]:
        """Whether a key exists."""
        try:
            metadata = yield from self.metadata(key)
        except KeyNotFound:
            return False
        return not metadata.deleted

    def metadata(self, key: Text) -> Call[Metadata]:
        """CAS, revision, flags, expiration and data type, also of a tombstone; raises KeyNotFound."""
        answer = yield from self._one(key, Opcode.GET_META, again=True, extras=b"\x02")
        if len(answer.extras) != META.size + 1:
            raise RemoteProtocolError("the metadata of a key has the wrong length")
        deleted, flags, expiration, revision = META.read(answer.extras)
        return Metadata(Cas(answer.cas), revision, flags, expiration, answer.extras[-1], bool(deleted))

    def ttl(self, key: Text) -> Call[int | None]:
        """Seconds until a key expires, None where it does not; raises KeyNotFound."""
        metadata = yield from self.metadata(key)
        if metadata.deleted:
            raise refusal(Answer(Opcode.GET_META, Status.KEY_NOT_FOUND, 0, 0, b"", b"", b""), key=as_key(key))
        return max(0, metadata.expiration - int(self.clock())) if metadata.expiration else None

    def _store(
        self, opcode: Opcode, key: Text, value: Text, expiry: int, flags: int, cas: int = 0
    ) -> Call[Stored]:
        if flags == 0 == expiry and type(flags) is type(expiry) is int:
            extras = NO_OPTIONS
        else:
            require_number("flags", flags, 32)
            extras = STORE.build(flags, self._expiration(expiry))
        again = opcode == Opcode.SET and not cas
        return self._stored(
            key,
            (yield from self._one(key, opcode, again=again, extras=extras, value=as_value(value), cas=cas)),
        )

    def _stored(self, key: Text, answer: Answer) -> Stored:
        if len(answer.extras) == TOKEN.size:
            branch, seqno = TOKEN.read(answer.extras)
            partition = self.routes.partition_of(as_key(key))
            # As in `link`: one for each of very many.
            return tuple.__new__(Stored, (Cas(answer.cas), BranchId(branch), Seqno(seqno), partition))
        return Stored(Cas(answer.cas))

    def set(self, key: Text, value: Text, *, expiry: int = 0, flags: int = 0, cas: int = 0) -> Call[Stored]:
        """Store a value. `expiry`: seconds from now. `cas`: only if the key has this CAS, else KeyExists."""
        return self._store(Opcode.SET, key, value, expiry, flags, cas)

    def add(self, key: Text, value: Text, *, expiry: int = 0, flags: int = 0) -> Call[Stored]:
        """Store a value under a key that does not exist; raises KeyExists."""
        return self._store(Opcode.ADD, key, value, expiry, flags)

    def replace(
        self, key: Text, value: Text, *, expiry: int = 0, flags: int = 0, cas: int = 0
    ) -> Call[Stored]:
        """Store a value under a key that exists; raises KeyNotFound."""
        return self._store(Opcode.REPLACE, key, value, expiry, flags, cas)

    def append(self, key: Text, value: Text, *, cas: int = 0) -> Call[Stored]:
        """Add bytes to the end of a value; raises NotStored where the key does not exist."""
        answer = yield from self._one(key, Opcode.APPEND, again=False, value=as_value(value), cas=cas)
        return self._stored(key, answer)

    def prepend(self, key: Text, value: Text, *, cas: int = 0) -> Call[Stored]:
        """Add bytes to the beginning of a value; raises NotStored where the key does not exist."""
        answer = yield from self._one(key, Opcode.PREPEND, again=False, value=as_value(value), cas=cas)
        return self._stored(key, answer)

    def delete(self, key: Text, *, cas: int = 0) -> Call[Stored]:
        """Delete a key; raises KeyNotFound."""
        return self._stored(key, (yield from self._one(key, Opcode.DELETE, again=False, cas=cas)))

    def touch(self, key: Text, expiry: int) -> Call[Stored]:
        """Set the expiry of a key, in seconds from now; 0 removes it."""
        extras = EXPIRATION.build(self._expiration(expiry))
        return self._stored(key, (yield from self._one(key, Opcode.TOUCH, again=True, extras=extras)))

    def get_and_touch(self, key: Text, expiry: int) -> Call[Item]:
        """The item of a key, whose expiry is set as `touch` does."""
        extras = EXPIRATION.build(self._expiration(expiry))
        return _item((yield from self._one(key, Opcode.GAT, again=True, extras=extras)))

    def get_and_lock(self, key: Text, seconds: int = 15) -> Call[Item]:
        """The item of a key, locked until `unlock`, a write with its CAS, or the end of the lock time."""
        require_number("seconds", seconds, 32)
        extras = LOCK_TIME.build(seconds)
        return _item((yield from self._one(key, Opcode.GET_LOCKED, again=False, extras=extras)))

    def unlock(self, key: Text, cas: int) -> Call[None]:
        """End the lock of a key, with the CAS that `get_and_lock` returned."""
        # A key that is not locked is answered with "temporary failure".
        yield from self._one(key, Opcode.UNLOCK_KEY, again=False, cas=cas, wait=False)

    def _count(self, opcode: Opcode, key: Text, by: int, initial: int | None, expiry: int) -> Call[int]:
        require_number("by", by, 64)
        require_number("initial", initial or 0, 64)
        expiration = NEVER_CREATE if initial is None else self._expiration(expiry)
        extras = COUNT.build(by, initial or 0, expiration)
        answer = yield from self._one(key, opcode, again=False, extras=extras)
        return int.from_bytes(answer.value, "big")

    def incr(self, key: Text, by: int = 1, *, initial: int | None = None, expiry: int = 0) -> Call[int]:
        """Add to a counter and return its new value. Without `initial` the key must exist."""
        return self._count(Opcode.INCREMENT, key, by, initial, expiry)

    def decr(self, key: Text, by: int = 1, *, initial: int | None = None, expiry: int = 0) -> Call[int]:
        """Subtract from a counter, not below 0, and return its new value."""
        return self._count(Opcode.DECREMENT, key, by, initial, expiry)

    # ── Many keys, pipelined ──────────────────────────────────────────────────────────────────────

    def get_many(self, keys: Iterable[Text]) -> Call[dict[Any, Item]]:
        """The items of the keys that exist, by the keys as they were given: str or bytes."""
        found: dict[Any, Item] = {}
        for some in portions(keys):
            names = _names(some)
            answers = yield from self._bare(Opcode.GET, names)
            for key, name, answer in zip(some, names, answers, strict=True):
                if not (status := answer.status):
                    found[key if isinstance(key, str) else name] = _item(answer)
                elif status != Status.KEY_NOT_FOUND:
                    raise refusal(answer, key=name)
            yield NewDeadline()
        return found

    def delete_many(self, keys: Iterable[Text]) -> Call[int]:
        """Delete keys, and return how many of them existed."""
        deleted = 0
        for some in portions(keys):
            names = _names(some)
            answers = yield from self._bare(Opcode.DELETE, names)
            check(answers, names, but=(Status.KEY_NOT_FOUND,))
            deleted += sum(answer.status == Status.OK for answer in answers)
            yield NewDeadline()
        return deleted

    def set_many(
        self, items: Mapping[Any, Text] | Iterable[tuple[Text, Text]], *, expiry: int = 0, flags: int = 0
    ) -> Call[list[Stored]]:
        """Store many values. All are stored when this returns, and some may be when it raises.

        For throughput the results have the CAS of each write, not its seqno.
        """
        require_number("flags", flags, 32)
        stored: list[Stored] = []
        routes = yield from self.ready()
        pairs = iter(items.items() if isinstance(items, Mapping) else items)
        while True:
            extras = STORE.build(flags, self._expiration(expiry))
            packets, keys = kernel.stores(
                pairs, MAX_REQUESTS, MAX_IN_FLIGHT, extras, routes.partitions - 1, as_key, as_value
            )
            if not keys:
                return stored
            answers = yield from self.spread(PackedRequests(packets, len(keys)), again=True)
            if any(map(_status, answers)):
                check(answers, [as_key(key) for key in keys])
            stored += kernel.written(answers, Stored)
            yield NewDeadline()

    def copy_many(self, copies: Iterable[Copy], *, force: bool = False) -> Call[list[bool]]:
        """Write changes of another bucket with their metadata: revision, CAS, flags, expiration, lock, data
        type.

        A second write of the same change has no effect. Where the node has the same change or a newer one,
        that stays and the result is False; with `force` the copy wins.
        """
        written: list[bool] = []
        for some in portions(copies, lambda copy: len(copy.value or b"")):
            mask = (yield from self.ready()).partitions - 1
            requests = copy_requests(some, mask, force=force)
            written += yield from self._copied(requests, [copy.key for copy in some])
        return written

    def copy_arrow(
        self, rows: pyarrow.Table | pyarrow.RecordBatch, *, force: bool = False
    ) -> Call[list[bool]]:
        """`copy_many` of rows with the columns of `changes_arrow`, with the highest throughput.

        The columns `key`, `value`, `revision` and `cas` are required; without `operation` every row is a
        mutation.
        """
        statuses = yield from self.copy_outcomes(rows, force=force)
        return [status == Status.OK for status in statuses]

    def copy_outcomes(
        self,
        rows: pyarrow.Table | pyarrow.RecordBatch,
        *,
        force: bool = False,
        last_write_wins: bool = False,
        but: Sequence[int] = (),
    ) -> Call[list[int]]:
        """`copy_arrow` for replication: the status of each row. KEY_EXISTS and those in `but` are no errors.

        `last_write_wins`: the higher CAS wins, not the higher revision. With a column `replaces` a row is
        written only if the key has that CAS.
        """
        statuses: list[int] = []
        for some in row_portions(rows):
            mask = (yield from self.ready()).partitions - 1
            requests = row_requests(some, mask, force=force, last_write_wins=last_write_wins)
            answers = yield from self.spread(requests, again=True)
            check(answers, some["key"].to_pylist(), but=(Status.KEY_EXISTS, *but))
            statuses += [answer.status for answer in answers]
            yield NewDeadline()
        return statuses

    def metadata_many(self, keys: Iterable[bytes]) -> Call[dict[bytes, Metadata]]:
        """The metadata of the keys that exist or have a tombstone."""
        found: dict[bytes, Metadata] = {}
        for some in portions(keys):
            names = _names(some)
            answers = yield from self._bare(Opcode.GET_META, names)
            for name, answer in zip(names, answers, strict=True):
                if not answer.status:
                    deleted, flags, expiration, revision = META.read(answer.extras[: META.size])
                    found[name] = Metadata(Cas(answer.cas), revision, flags, expiration, 0, bool(deleted))
                elif answer.status != Status.KEY_NOT_FOUND:
                    raise refusal(answer, key=name)
            yield NewDeadline()
        return found

    def swap_many(self, writes: Iterable[tuple[bytes, bytes, int]]) -> Call[list[Cas | None]]:
        """Store values under keys that have the given CAS, 0 for a key that does not exist; the new CAS of
        each, None where it had another. Writes of one partition happen in this order."""
        stored: list[Cas | None] = []
        for some in portions(writes, lambda write: len(write[1])):
            routes = yield from self.ready()
            requests = []
            for index, (key, value, cas) in enumerate(some):
                partition = routes.partition_of(key)
                opcode = Opcode.SET if cas else Opcode.ADD
                packet = pack(
                    REQUEST, opcode, key=key, extras=STORE.build(0, 0), value=as_value(value), cas=cas,
                    vbucket=partition, opaque=index,
                )  # fmt: skip
                requests.append((partition, packet))
            answers = yield from self.spread(requests, again=False)
            changed = (Status.KEY_EXISTS, Status.KEY_NOT_FOUND, Status.NOT_STORED)
            check(answers, [key for key, _, _ in some], but=changed)
            stored += [None if answer.status else Cas(answer.cas) for answer in answers]
            yield NewDeadline()
        return stored

    def _copied(self, requests: Sequence[tuple[int, bytes]], names: Sequence[bytes]) -> Call[list[bool]]:
        answers = yield from self.spread(requests, again=True)
        check(answers, names, but=(Status.KEY_EXISTS,))
        yield NewDeadline()
        return [answer.status == Status.OK for answer in answers]

    def _bare(self, opcode: Opcode, names: list[bytes]) -> Call[list[Answer]]:
        """A request that is only a key, for each of them."""
        routes = yield from self.ready()
        packets = kernel.requests(opcode, names, b"", routes.partitions - 1)
        return (yield from self.spread(PackedRequests(packets, len(names)), again=True))


def expiration_of(expiry: int, now: float) -> int:
    """An expiry in seconds from now, in the form in which nodes take it."""
    require_number("expiry", expiry, 32)
    if expiry <= MONTH:
        return expiry
    expiration = int(now) + expiry
    if expiration >= NEVER_CREATE:
        raise InvalidArguments(f"expiry is {expiry}, which ends after the year 2105; use 0 for no expiry")
    return expiration


def portions(items: Iterable[T], size: Callable[[T], int] | None = None) -> Iterator[Sequence[T]]:
    """Lists of at most MAX_REQUESTS items, that stop growing at MAX_IN_FLIGHT bytes."""
    if size is None:
        iterator = iter(items)
        while some := list(islice(iterator, MAX_REQUESTS)):
            yield some
        return
    some, total = [], 0
    for item in items:
        some.append(item)
        total += size(item)
        if len(some) == MAX_REQUESTS or total >= MAX_IN_FLIGHT:
            yield some
            some, total = [], 0
    if some:
        yield some


def _names(keys: Sequence[Text]) -> list[bytes]:
    """`as_key` of each, for very many keys."""
    names = [key.encode() if isinstance(key, str) else as_bytes(key) for key in keys]
    if max(map(len, names), default=0) > MAX_KEY:
        raise too_long(max(names, key=len))
    return names


def as_value(text: Text) -> bytes:
    """A value of a size that nodes accept; they close the connection on a larger packet."""
    data = as_bytes(text)
    if len(data) > MAX_VALUE:
        raise too_large(data)
    return data


def _item(answer: Answer) -> Item:
    extras = answer.extras
    flags = int.from_bytes(extras[:4], "big") if len(extras) >= 4 else 0
    return tuple.__new__(Item, (answer.value, answer.cas, flags))  # as in `link`: one for each of very many

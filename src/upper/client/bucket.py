"""A bucket for programs that block: key-value calls, and changes to iterate over.

What follows changes is imported by whoever follows: a program that reads one key starts three times as fast.
"""

from __future__ import annotations

import random
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from upper.client.calls import Batch, Call, Copy, Item, Promoted, Stored, Text, Wait, fitting
from upper.client.commands import Commands, as_bytes
from upper.client.routes import Routes
from upper.client.sockets import Access, Lines, tls_context
from upper.client.url import Address, Node, parse_url
from upper.errors import InvalidArguments, TimedOut, UpperError
from upper.model.values import Cas, FailoverLog, Partition, Seqno
from upper.wire.codes import Opcode

if TYPE_CHECKING:
    import pyarrow

    from upper.client.events import Event
    from upper.client.feed import Feed
    from upper.client.plan import Plan, Wanted, Wishes

T = TypeVar("T")
TIMEOUT = 10.0  # seconds that a call may take
AT_ONCE = 4096  # requests of a pipelined call that are under way together
HEAVY = 16 << 20  # bytes of values after which no more of them are
# Bytes that go into one record batch, where they are there at once: as many as stay in a processor's cache
# between finding the packets and decoding them, which is measurably faster than more.
GATHER = 2 << 20


def connect(
    url: str,
    *,
    timeout: float | None = None,
    tls: bool | ssl.SSLContext | None = None,
    user: str | None = None,
    password: str | None = None,
    name: str = "upper",
    patience: float = 0.0,
) -> Bucket:
    """A bucket, for blocking programs: `upr://HOST:PORT/BUCKET`. Arguments win over what the URL says.

    A node must answer, or this fails; with `patience`, only after so many seconds of trying.
    """
    address = address_of(url, user=user, password=password)
    return Bucket(address, timeout=timeout, tls=tls, name=name, patience=patience)


def address_of(url: str, *, user: str | None = None, password: str | None = None) -> Address:
    address = parse_url(url)
    if user is None and password is None:
        return address
    return Address(
        address.dialect,
        address.nodes,
        address.bucket,
        address.user if user is None else user,
        address.password if password is None else password,
        address.settings,
    )


def timeout_of(given: float | None, address: Address) -> float:
    """Seconds that a call may take: what the program says, else the URL, else what is usual."""
    if given is not None and not given > 0:
        raise InvalidArguments(f"a timeout is a number of seconds above 0, not {given}")
    return given or address.timeout or TIMEOUT


class Bucket:
    """Key-value calls and changes of one bucket. One call at a time goes out; any thread may make it."""

    def __init__(
        self,
        address: Address,
        *,
        timeout: float | None = None,
        tls: bool | ssl.SSLContext | None = None,
        name: str = "upper",
        patience: float = 0.0,
    ) -> None:
        self.address = address
        self.timeout = timeout_of(timeout, address)
        self.access = Access(address, tls_context(address, tls), address.settings.get("name", name))
        self._commands = Commands(address, random=random.random)
        self._lines = Lines(self.access)
        self._lock = threading.Lock()
        self._run(self._commands.patient_learn() if patience else self._commands.learn(), patience)

    def __repr__(self) -> str:
        return f"<bucket {self.address}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._lines.close()

    # ── The map ───────────────────────────────────────────────────────────────────────────────────

    @property
    def routes(self) -> Routes:
        """Which node holds which partition, as far as is known."""
        return self._commands.routes

    @property
    def partitions(self) -> int:
        """How many partitions the bucket has."""
        return self._commands.routes.partitions

    def partition_of(self, key: Text) -> Partition:
        return self._commands.routes.partition_of(as_bytes(key))

    def learn(self) -> Routes:
        """Ask for the map again."""
        return self._run(self._commands.learn())

    # ── One key ───────────────────────────────────────────────────────────────────────────────────

    def get(self, key: Text) -> Item:
        """What is stored under a key; KeyNotFound where nothing is."""
        return self._run(self._commands.get(key))

    def set(self, key: Text, value: Text, *, expiry: int = 0, flags: int = 0, cas: int = 0) -> Stored:
        """Store a value. `expiry`: seconds from now. `cas`: only if the key has not changed since."""
        return self._run(self._commands.store(Opcode.SET, key, value, expiry=expiry, flags=flags, cas=cas))

    def add(self, key: Text, value: Text, *, expiry: int = 0, flags: int = 0) -> Stored:
        """Store a value under a key that does not exist; KeyExists where it does."""
        return self._run(self._commands.store(Opcode.ADD, key, value, expiry=expiry, flags=flags))

    def replace(self, key: Text, value: Text, *, expiry: int = 0, flags: int = 0, cas: int = 0) -> Stored:
        """Store a value under a key that exists; KeyNotFound where it does not."""
        return self._run(
            self._commands.store(Opcode.REPLACE, key, value, expiry=expiry, flags=flags, cas=cas)
        )

    def append(self, key: Text, value: Text, *, cas: int = 0) -> Stored:
        return self._run(self._commands.extend(Opcode.APPEND, key, value, cas=cas))

    def prepend(self, key: Text, value: Text, *, cas: int = 0) -> Stored:
        return self._run(self._commands.extend(Opcode.PREPEND, key, value, cas=cas))

    def delete(self, key: Text, *, cas: int = 0) -> Stored:
        """Remove a key; KeyNotFound where there is none."""
        return self._run(self._commands.delete(key, cas=cas))

    def touch(self, key: Text, expiry: int) -> Stored:
        """Give a key another expiry, in seconds from now; 0 for none."""
        return self._run(self._commands.touch(key, expiry))

    def get_and_touch(self, key: Text, expiry: int) -> Item:
        return self._run(self._commands.get_and_touch(key, expiry))

    def get_and_lock(self, key: Text, seconds: int = 15) -> Item:
        """Read a key and keep others from writing it; write with the CAS that this gives, or unlock."""
        return self._run(self._commands.get_and_lock(key, seconds))

    def unlock(self, key: Text, cas: int) -> None:
        self._run(self._commands.unlock(key, cas))

    def incr(self, key: Text, by: int = 1, *, initial: int | None = None, expiry: int = 0) -> int:
        """Count up, and the new number. Without `initial` the key must exist."""
        return self._run(self._commands.count(Opcode.INCREMENT, key, by, initial=initial, expiry=expiry))

    def decr(self, key: Text, by: int = 1, *, initial: int | None = None, expiry: int = 0) -> int:
        """Count down, not below 0."""
        return self._run(self._commands.count(Opcode.DECREMENT, key, by, initial=initial, expiry=expiry))

    # ── Many keys, pipelined ──────────────────────────────────────────────────────────────────────

    def get_many(self, keys: Iterable[Text]) -> dict[bytes, Item]:
        """What is stored under the keys that exist."""
        found: dict[bytes, Item] = {}
        for some in portions(keys):
            found |= self._run(self._commands.get_many(some))
        return found

    def set_many(
        self, items: Mapping[Any, Text] | Iterable[tuple[Text, Text]], *, expiry: int = 0, flags: int = 0
    ) -> list[Stored]:
        """Store many values; they are all stored when this returns, and some may be when it raises.

        For speed the answers tell the CAS of each, but not its seqno.
        """
        pairs = items.items() if isinstance(items, Mapping) else items
        stored: list[Stored] = []
        for some in portions(pairs, weight):
            stored += self._run(self._commands.set_many(some, expiry=expiry, flags=flags))
        return stored

    def delete_many(self, keys: Iterable[Text]) -> int:
        """Remove the keys that exist; how many did."""
        return sum(self._run(self._commands.delete_many(some)) for some in portions(keys))

    def copy_many(self, copies: Iterable[Copy], *, force: bool = False) -> list[bool]:
        """Write changes as they are, with the revision and CAS that they have elsewhere.

        Twice is once: where the node already has this or something newer it stays, and the answer is False.
        `force` writes whatever the node has.
        """
        written: list[bool] = []
        for some in portions(copies, lambda copy: len(copy.value or b"")):
            written += self._run(self._commands.copy_many(some, force=force))
        return written

    # ── Nodes and partitions ──────────────────────────────────────────────────────────────────────

    def stats(self, group: str = "") -> dict[Node, dict[str, str]]:
        """What each node says about itself."""
        return self._run(self._commands.stats(group))

    def seqnos(self) -> dict[Partition, Seqno]:
        """The high seqno of each partition that is active somewhere."""
        return self._run(self._commands.seqnos())

    def failover_log(self, partition: int) -> FailoverLog:
        return self._run(self._commands.failover_logs([Partition(partition)]))[Partition(partition)]

    def failover_logs(self, partitions: Iterable[int] | None = None) -> dict[Partition, FailoverLog]:
        """The failover logs of some partitions, or of all."""
        wanted = None if partitions is None else [Partition(p) for p in partitions]
        return self._run(self._commands.failover_logs(wanted))

    def promote(self, partition: int, *, to: int | None = None) -> Promoted:
        """Record a history branch by hand, for drills.

        With `to` the partition first goes back to the newest point at or below it that storage can rebuild.
        """
        return self._run(self._commands.promote(Partition(partition), to=None if to is None else Seqno(to)))

    def flush(self) -> None:
        """Remove every item of the bucket."""
        self._run(self._commands.flush())

    # ── Changes ───────────────────────────────────────────────────────────────────────────────────

    def changes(self, *, patience: float | None = None, **wanted: Unpack[Wishes]) -> Feed[Event]:
        """Every change, as events; see `upper.client.plan.Wanted` for what can be asked.

        since: "beginning", "now", a checkpoint (loaded from and saved to), or positions.
        until: None for never, "now", or seqnos by partition.
        partitions, keys_only, key_prefix, operations: less than everything.
        on_rollback: a function that takes back what is lost, or "continue".
        """
        from upper.client.feed import Feed
        from upper.client.plan import Wanted
        from upper.client.reader import Reader, Typed

        want = Wanted(**wanted)
        made = self._plan(want)
        return Feed(Reader(made, want, Typed(made)), self, patience=patience)

    def changes_arrow(
        self, *, gather: int = GATHER, patience: float | None = None, **wanted: Any
    ) -> Feed[pyarrow.RecordBatch]:
        """The same as Arrow record batches, in bulk: the fast way.

        Flushes and rollbacks are rows; `positions` says where all that was given out is consistent.
        """
        from upper.client.bulk import Columns
        from upper.client.feed import Feed
        from upper.client.plan import Wanted
        from upper.client.reader import Reader

        want = Wanted(**wanted)
        made = self._plan(want)
        return Feed(Reader(made, want, Columns(made.follower)), self, gather=gather, patience=patience)

    def _plan(self, wanted: Wanted) -> Plan:
        from upper.client.plan import plan

        address = self.address
        return self._run(
            plan(wanted, self._commands, dialect=address.dialect, bucket=address.bucket, random=random.random)
        )

    # ── The driver ────────────────────────────────────────────────────────────────────────────────

    def _run(self, call: Call[T], timeout: float = 0.0) -> T:
        """Carry out a call: send its batches, wait its waits, and give up when the time is over."""
        call = fitting(call)
        deadline = time.monotonic() + (timeout or self.timeout)
        with self._lock:
            try:
                effect = next(call)
                while True:
                    try:
                        result: object
                        if isinstance(effect, Batch):
                            result = self._lines.exchange(effect, deadline)
                        else:
                            result = None
                            _wait(effect, deadline)
                    except UpperError as error:
                        effect = call.throw(error)
                    else:
                        effect = call.send(result)
            except StopIteration as stop:
                value: T = stop.value
                return value


def _wait(wait: Wait, deadline: float) -> None:
    left = deadline - time.monotonic()
    if wait.seconds >= left:
        raise TimedOut("the call took longer than its timeout; try again, or give it more time")
    time.sleep(wait.seconds)


def weight(pair: tuple[Text, Text]) -> int:
    """Bytes of the value, about; what is no value is refused later, with a sentence."""
    return len(pair[1]) if hasattr(pair[1], "__len__") else 0


def portions(items: Iterable[T], weigh: Callable[[T], int] | None = None) -> Iterator[Sequence[T]]:
    """As many at a time as may be under way together, and no heavier than that."""
    if weigh is None:
        iterator = iter(items)
        while some := list(islice(iterator, AT_ONCE)):
            yield some
        return
    some, heavy = [], 0
    for item in items:
        some.append(item)
        heavy += weigh(item)
        if len(some) == AT_ONCE or heavy >= HEAVY:
            yield some
            some, heavy = [], 0
    if some:
        yield some


__all__ = ["Bucket", "Cas", "address_of", "connect"]

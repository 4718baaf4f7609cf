"""A Kafka topic as a target: one record for each change, in Debezium's envelope, and positions beside it.

Every round is one transaction: records, recorded keys and positions are committed together or not at all, and
a producer that was replaced is fenced by its transactional id. Positions are in the compacted topic
`TOPIC.upper`. A partition of the source goes to one partition of the topic, which keeps the order of changes.

When the source loses changes, records follow that bring each key to the state of the source. They are marked:
`source.rollback` is true.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from upper.apps.push.content import content, key_text, quoted
from upper.apps.push.state import TargetState, WorkMode
from upper.apps.push.tasks import (
    SIGNS,
    AnotherWriter,
    HeldState,
    Portion,
    RejectedChange,
    Save,
    TargetUnavailable,
)
from upper.client.bulk import change_schema
from upper.errors import InvalidArguments, NotInstalled, UpperError
from upper.model.values import Partition, Seqno, partition_of
from upper.pipeline.changes import DELETION, EXPIRATION, MUTATION
from upper.version import VERSION

WITHIN = 60.0  # seconds for a request to the brokers
TRANSACTION = 600  # seconds that a round may take; brokers allow 900 by default
READ_AT_ONCE = 10_000  # records


class Transaction(Protocol):
    """Records that become visible together."""

    def send(self, topic: str, key: bytes, value: bytes | None, partition: int) -> None: ...
    def commit(self) -> None: ...
    def abort(self) -> None: ...


class Broker(Protocol):
    """The calls to Kafka. Can be pickled."""

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has; it is created where it does not exist."""
        ...

    def begin(self, identity: str) -> Transaction:
        """Begin a transaction; earlier ones of this identity are aborted, and their producers fenced."""
        ...

    def newest(self, topic: str, partition: int) -> dict[bytes, bytes | None]:
        """The last committed record of each key; None for a tombstone."""
        ...


@dataclass(frozen=True)
class KafkaOptions:
    """`name`: of this push, in the topic of positions. `partitions`: of the source."""

    topic: str
    name: str
    bucket: str
    partitions: int

    @property
    def positions(self) -> str:
        return f"{self.topic}.upper"

    @property
    def identity(self) -> str:
        """The transactional id."""
        return f"upper-{self.name}-{self.topic}"

    @cached_property
    def about(self) -> str:
        """The fields of `source` that all records share, as JSON."""
        names = {"version": VERSION, "connector": "upper", "name": self.name, "db": self.bucket}
        return ",".join(f'"{name}":{quoted(value)}' for name, value in names.items())

    def document(self, partition: Partition, slot: int | None = None) -> bytes:
        return f"{self.name}/{partition}/{'state' if slot is None else f'keys/{slot}'}".encode()


class KafkaTarget:
    """A topic. One worker writes at a time, so that one transactional id fences all others."""

    width = 1

    def __init__(self, broker: Broker, options: KafkaOptions) -> None:
        self._broker, self._options, self.name = broker, options, options.name

    def close(self) -> None:
        pass

    def history(self) -> Mapping[Partition, int]:
        return {}  # committed records are not lost

    def load(self) -> dict[Partition, HeldState]:
        # A transaction that was just committed becomes visible a little later. The beginning of the next one
        # waits for it.
        self._broker.partitions(self._options.topic)
        self._broker.begin(self._options.identity).abort()
        found = self._broker.newest(self._options.positions, 0)
        held = {}
        for number in range(self._options.partitions):
            partition = Partition(number)
            if (data := found.get(self._options.document(partition))) is not None:
                state = TargetState.decode(data)
                held[partition] = HeldState(state, 0, state.stood.position.seqno)
        return held

    def open(self, task: int) -> KafkaSession:
        return KafkaSession(self._broker, self._options)


class KafkaSession:
    """One transaction."""

    def __init__(self, broker: Broker, options: KafkaOptions) -> None:
        self._broker, self._options = broker, options
        self.rejections: list[RejectedChange] = []
        self._width = broker.partitions(options.topic)
        self._transaction: Transaction | None = broker.begin(options.identity)

    def close(self) -> None:
        if self._transaction is not None:
            self._transaction.abort()

    # ── States ────────────────────────────────────────────────────────────────────────────────────

    def slots(self, partition: Partition, state: TargetState) -> Sequence[bytes | None]:
        found = self._broker.newest(self._options.positions, 0) if state.slots else {}
        return [found.get(self._options.document(partition, slot.number)) for slot in state.slots]

    def save(self, saves: Sequence[Save]) -> list[HeldState]:
        for each in saves:
            if each.slot is not None:
                number = each.held.state.slots[-1].number
                self._send(self._options.positions, self._document(each, number), each.slot, 0)
            self._send(self._options.positions, self._document(each), each.held.state.encode(), 0)
        return [each.held for each in saves]

    def _document(self, save: Save, slot: int | None = None) -> bytes:
        return self._options.document(save.partition, slot)

    def commit(self, saves: Sequence[Save]) -> list[HeldState]:
        held = self.save(saves)
        if self._transaction is not None:
            self._transaction.commit()
            self._transaction = None
        return held

    def _send(self, topic: str, key: bytes, value: bytes | None, partition: int) -> None:
        assert self._transaction is not None, "the transaction is over"
        self._transaction.send(topic, key, value, partition)

    # ── Changes ───────────────────────────────────────────────────────────────────────────────────

    def prepare(self, portions: Sequence[Portion]) -> list[Portion]:
        return list(portions)

    def write(self, portions: Sequence[Portion]) -> set[Partition]:
        for portion in portions:
            at = portion.partition % self._width
            rolled_back = None if portion.mode is WorkMode.COMPARE else portion.suspects
            made = envelopes(portion.rows, self._options, snapshot=portion.first, rolled_back=rolled_back)
            for key, value, mutation in made:
                self._send(self._options.topic, key, value, at)
                if not mutation:
                    self._send(self._options.topic, key, None, at)
        return set()

    def keys(self, partition: Partition) -> Iterable[bytes]:
        found = self._broker.newest(self._options.topic, partition % self._width)
        count = self._options.partitions
        return [
            key for key, value in found.items() if value is not None and partition_of(key, count) == partition
        ]

    def remove(
        self, partition: Partition, keys: Mapping[bytes, set[int]], *, epoch: int, seqno: Seqno
    ) -> None:
        at = partition % self._width
        gone = {"operation": DELETION, "partition": partition, "seqno": seqno}
        rows = pa.Table.from_pylist([{**gone, "key": key} for key in keys], schema=change_schema())
        for key, value, _ in envelopes(rows, self._options, rolled_back=None):
            self._send(self._options.topic, key, value, at)
            self._send(self._options.topic, key, None, at)


def envelopes(
    rows: pa.Table,
    options: KafkaOptions,
    *,
    snapshot: bool = False,
    rolled_back: Container[bytes] | None = (),
) -> Iterator[tuple[bytes, bytes, bool]]:
    """Changes of one partition and branch as Debezium describes them: key, value, and whether it is no
    deletion. The source has no older version of a key, so `before` is null. `rolled_back`: keys whose records
    undo a rollback; None for all.

    Each row costs a few microseconds, most of what a push takes: columns are lists, and what all rows share
    is one text.
    """
    if not len(rows):
        return
    partition, branch = (rows[name][0].as_py() or 0 for name in ("partition", "branch"))
    source = f',"source":{{{options.about},"ts_ms":'
    place = (
        f',"snapshot":"{"true" if snapshot else "false"}","partition":{partition},'
        f'"branch":"{branch & SIGNS}","seqno":"'
    )
    columns = (rows[name].to_pylist() for name in ("key", "value", "operation", "seqno"))
    numbers = (_unsigned(rows[name]) for name in ("cas", "revision", "flags", "expiration"))
    for key, value, operation, seqno, cas, revision, flags, expiration in zip(
        *columns, *numbers, strict=True
    ):
        moment = cas // 1_000_000  # a CAS is a time in nanoseconds
        mutation = operation == MUTATION
        if mutation:
            field, text, _ = content(value or b"")
            after = f'{{"key":{key_text(key)},"{field}":{text},"flags":{flags},"expiration":{expiration}}}'
            kind = "r" if snapshot else "c" if revision == 1 else "u"
        else:
            after, kind = "null", "d"
        expired = "true" if operation == EXPIRATION else "false"
        rollback = "true" if rolled_back is None or key in rolled_back else "false"
        record = (
            f'{{"before":null,"after":{after}{source}{moment}{place}{seqno}","cas":"{cas}",'
            f'"revision":"{revision}","expired":{expired},"rollback":{rollback}}},"op":"{kind}",'
            f'"ts_ms":{moment}}}'
        )
        yield key, record.encode(), mutation


def _unsigned(column: pa.ChunkedArray) -> list[int]:
    """The numbers of a signed column with the same bits; null, which older rows have, is 0."""
    held = column.combine_chunks()
    bits = pa.uint64() if held.type == pa.int64() else pa.uint32()
    found: list[int] = pc.fill_null(held.view(bits), 0).to_pylist()
    return found


# ── The library ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ConfluentBroker:
    """Kafka through confluent-kafka. `settings`: of librdkafka, such as security.protocol."""

    servers: str
    settings: Mapping[str, str]
    replicas: int = -1  # of topics that are created; -1: the default of the brokers

    def _configured(self, **more: Any) -> dict[str, Any]:
        return {"bootstrap.servers": self.servers, "log_level": 3, **self.settings, **more}

    def partitions(self, topic: str) -> int:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

        admin = AdminClient(self._configured())
        try:
            known = admin.list_topics(timeout=WITHIN).topics
            missing = [name for name in (topic, f"{topic}.upper") if name not in known]
            for name in missing:
                positions = name != topic
                new = NewTopic(
                    name,
                    num_partitions=1 if positions else -1,
                    replication_factor=self.replicas,
                    config={"cleanup.policy": "compact"} if positions else {},
                )
                for future in admin.create_topics([new], operation_timeout=WITHIN).values():
                    future.result(WITHIN)
            if topic in missing:
                known = admin.list_topics(topic, timeout=WITHIN).topics
            return len(known[topic].partitions) or 1
        except (KafkaException, TimeoutError) as error:
            raise _unavailable(self.servers, error) from error

    def begin(self, identity: str) -> ConfluentTransaction:
        return ConfluentTransaction(
            self._configured(
                **{
                    "transactional.id": identity,
                    "transaction.timeout.ms": TRANSACTION * 1000,
                    "linger.ms": 20,
                    "compression.type": "lz4",
                    "queue.buffering.max.messages": 500_000,
                    "queue.buffering.max.kbytes": 65_536,
                }
            ),
            self.servers,
        )

    def newest(self, topic: str, partition: int) -> dict[bytes, bytes | None]:
        from confluent_kafka import Consumer, KafkaException, TopicPartition

        settings = self._configured(
            **{
                "group.id": "upper",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
            }
        )
        consumer = Consumer(settings)
        found: dict[bytes, bytes | None] = {}
        try:
            consumer.assign([TopicPartition(topic, partition, 0)])
            while True:
                first = consumer.poll(WITHIN)
                if first is None:
                    raise TargetUnavailable(f"{self.servers} does not answer; trying again may help")
                for message in (first, *consumer.consume(READ_AT_ONCE, 0.0)):
                    if (error := message.error()) is None:
                        if (key := message.key()) is not None:
                            found[key] = message.value()
                    elif error.name() == "_PARTITION_EOF":
                        return found
                    else:
                        raise KafkaException(error)
        except KafkaException as error:
            raise _unavailable(self.servers, error) from error
        finally:
            consumer.close()


class ConfluentTransaction:
    def __init__(self, settings: Mapping[str, Any], servers: str) -> None:
        from confluent_kafka import KafkaException, Producer

        self._servers, self._error = servers, KafkaException
        try:
            self._producer = Producer(dict(settings))
            self._producer.init_transactions(WITHIN)
            self._producer.begin_transaction()
        except KafkaException as error:
            raise _unavailable(servers, error) from error

    def send(self, topic: str, key: bytes, value: bytes | None, partition: int) -> None:
        while True:
            try:
                self._producer.produce(topic, value=value, key=key, partition=partition)
                return
            except BufferError:
                self._producer.poll(1.0)  # wait until some have been sent
            except self._error as error:
                raise _unavailable(self._servers, error) from error

    def commit(self) -> None:
        try:
            self._producer.commit_transaction(TRANSACTION)
        except self._error as error:
            raise _unavailable(self._servers, error) from error

    def abort(self) -> None:
        try:
            self._producer.abort_transaction(WITHIN)
        except self._error:
            return  # the next transaction of this identity aborts it


def _unavailable(servers: str, error: Any) -> UpperError:
    cause = error.args[0] if error.args else error
    name = cause.name() if hasattr(cause, "name") else ""
    if name in ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH"):
        return AnotherWriter("of this topic")
    text = cause.str() if hasattr(cause, "str") else str(cause)
    return TargetUnavailable(f"{servers}: {text or name}; check the brokers and the topic")


def parse_kafka(url: str) -> tuple[str, str]:
    """The brokers and the topic of kafka://HOST:PORT[,HOST:PORT...]/TOPIC."""
    servers, _, topic = url.removeprefix("kafka://").partition("/")
    if not servers or not topic or "/" in topic or "@" in servers:
        raise InvalidArguments(
            "write the target as kafka://HOST:PORT[,HOST:PORT...]/TOPIC; credentials go into "
            "the file of --settings-file"
        )
    return servers, topic


def require_kafka() -> None:
    from importlib.util import find_spec

    if find_spec("confluent_kafka") is None:
        raise NotInstalled("Kafka needs its client; install it with: pip install 'upper-kv[kafka]'")


def kafka_target(
    url: str, *, name: str, bucket: str, partitions: int, settings: Mapping[str, str], replicas: int = -1
) -> KafkaTarget:
    """The topic of a URL."""
    require_kafka()
    servers, topic = parse_kafka(url)
    options = KafkaOptions(topic, name, bucket, partitions)
    return KafkaTarget(ConfluentBroker(servers, dict(settings), replicas), options)

"""A topic compared with a bucket that keeps its history: rollbacks, and crashes between any two steps."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings

from tests.apps.push_story import PARTITIONS, Steps, Story, live_through, stories
from tests.apps.replica_model import ReplicaBucket
from upper.apps.push.kafka import KafkaOptions, KafkaTarget, envelopes
from upper.client.bulk import change_schema

OPTIONS = KafkaOptions("changes", "test", "default", PARTITIONS)
Sent = list[tuple[str, int, bytes, bytes | None]]


class ModelBroker:
    """Topics as lists, and transactions that append to them in one step."""

    def __init__(self) -> None:
        self.committed: Sent = []
        self.step = Steps()

    def partitions(self, topic: str) -> int:
        return 3

    def begin(self, identity: str) -> ModelTransaction:
        self.step()
        return ModelTransaction(self)

    def newest(self, topic: str, partition: int) -> dict[bytes, bytes | None]:
        found: dict[bytes, bytes | None] = {}
        for where, at, key, value in self.committed:
            if (where, at) == (topic, partition):
                found.pop(key, None)
                found[key] = value
        return found

    def live(self) -> dict[bytes, tuple[int, int]]:
        """(revision, cas) of the last record of each key that has not been deleted."""
        found = {}
        for at in range(3):
            for key, value in self.newest(OPTIONS.topic, at).items():
                if value is not None:
                    source = json.loads(value)["source"]
                    found[key] = (int(source["revision"]), int(source["cas"]))
        return found


class ModelTransaction:
    def __init__(self, broker: ModelBroker) -> None:
        self._broker, self._sent = broker, Sent()

    def send(self, topic: str, key: bytes, value: bytes | None, partition: int) -> None:
        self._broker.step()
        self._sent.append((topic, partition, key, value))

    def commit(self) -> None:
        self._broker.step()
        self._broker.committed += self._sent
        self._broker.step()

    def abort(self) -> None:
        self._sent.clear()


@pytest.mark.timeout(300)
@settings(max_examples=60)
@given(stories)
def test_a_topic_ends_equal_to_the_source_and_marks_what_undoes_a_rollback(story: Story) -> None:
    source, broker = ReplicaBucket(PARTITIONS, first_cas=1000), ModelBroker()
    live_through(lambda: KafkaTarget(broker, OPTIONS), broker.step, source, story)
    assert broker.live() == {key: version[:2] for key, version in source.live().items()}
    lost: set[tuple[bytes, str]] = set()
    true = {(op.key, str(op.cas)) for partition in source.partitions for op in partition.ops}
    for topic, _, key, value in broker.committed:
        if topic == OPTIONS.topic and value is not None:
            about = json.loads(value)["source"]
            if (key, about["cas"]) not in true and not about["rollback"]:
                lost.add((key, about["cas"]))
    # Every version that the source lost is followed by a record that undoes it, or was written over since; a
    # key that neither has needs none.
    for key, cas in lost:
        if key not in source.live():
            continue  # that the topic has no such key either was compared above
        after = [
            json.loads(value)["source"]
            for topic, _, name, value in broker.committed
            if topic == OPTIONS.topic and name == key and value is not None
        ]
        at = next(number for number, about in enumerate(after) if about["cas"] == cas)
        assert any(about["rollback"] or int(about["cas"]) > int(cas) for about in after[at + 1 :])


def envelope(row: dict[str, Any], *, rollback: bool = False) -> Any:
    rows = pa.Table.from_pylist([row, {**row, "key": b"other"}], schema=change_schema())
    (key, value, mutation), (other, _, _) = envelopes(rows, OPTIONS, rolled_back=(b"k",) if rollback else ())
    assert (key, other, mutation) == (b"k", b"other", row["operation"] == "mutation")
    return json.loads(value)


def test_the_envelope_is_debeziums() -> None:
    row = {"key": b"k", "value": b'{"a": 1}', "operation": "mutation", "partition": 3, "branch": -1,
           "seqno": 9, "cas": 1_700_000_000_000_000_000, "revision": 2, "flags": 7,
           "expiration": 0}  # fmt: skip
    value = envelope(row)
    assert value["op"] == "u"
    assert value["before"] is None
    assert value["after"] == {"key": "k", "value": {"a": 1}, "flags": 7, "expiration": 0}
    assert value["ts_ms"] == 1_700_000_000_000
    assert value["source"]["branch"] == str(2**64 - 1)
    assert (value["source"]["partition"], value["source"]["seqno"]) == (3, "9")
    assert envelope({**row, "value": b"NaN"})["after"]["text"] == "NaN"
    assert envelope({**row, "value": b"\xff"})["after"]["base64"] == "/w=="
    gone = envelope({**row, "operation": "expiration", "value": None}, rollback=True)
    assert (gone["op"], gone["after"]) == ("d", None)
    assert gone["source"]["expired"] is True
    assert gone["source"]["rollback"] is True

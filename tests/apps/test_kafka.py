"""A push to a real Kafka broker: records, tombstones, positions, a rollback, a fenced producer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import upper
from tests.apps.push_lake import push_through_a_rollback
from tests.brokers import kafka
from tests.nodes import Node
from upper.apps.push.kafka import KafkaTarget, kafka_target
from upper.apps.push.rounds import Push
from upper.apps.push.tasks import AnotherWriter
from upper.pipeline.local import LocalRunner
from upper.pipeline.source import BucketSource

pytest.importorskip("confluent_kafka", reason="Kafka's client is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with kafka(tmp_path_factory.mktemp("kafka")) as servers:
        yield servers


def target(servers: str, topic: str) -> KafkaTarget:
    return kafka_target(
        f"kafka://{servers}/{topic}", name="test", bucket="default", partitions=16, settings={}, replicas=1
    )


def settle(push: Push) -> None:
    for _ in range(6):
        done = push.round()
        if not push.incomplete and not done.rows:
            return


def records(servers: str, topic: str) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Everything that a consumer of committed records gets, once all are visible."""
    target(servers, topic).load()
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    found: list[tuple[bytes, dict[str, Any] | None]] = []
    try:
        count = len(consumer.list_topics(topic, timeout=30).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, number, 0) for number in range(count)])
        ended: set[int | None] = set()
        while len(ended) < count:
            message = consumer.poll(60)
            assert message is not None, "the broker is silent"
            if (error := message.error()) is not None:
                assert error.name() == "_PARTITION_EOF", error
                ended.add(message.partition())
                continue
            key, value = message.key(), message.value()
            assert key is not None
            found.append((key, None if value is None else json.loads(value)))
    finally:
        consumer.close()
    return found


def live(servers: str, topic: str) -> dict[bytes, tuple[str, str]]:
    newest = dict(records(servers, topic))
    return {
        key: (value["source"]["revision"], value["source"]["cas"])
        for key, value in newest.items()
        if value is not None
    }


def test_a_topic_follows_a_bucket_through_a_rollback(broker: str, tmp_path: Path) -> None:
    with Node(tmp_path / "node", partitions=16) as node, upper.connect(node.url) as bucket:
        bucket.set_many((f"k{n}", json.dumps({"n": n})) for n in range(500))
        bucket.delete_many(f"k{n}" for n in range(50))
        source = BucketSource(node.url)
        settle(Push(source, target(broker, "shop"), LocalRunner()))

        def true() -> dict[bytes, tuple[str, str]]:
            found = bucket.metadata_many(bucket.keys(""))
            return {key: (str(meta.revision), str(meta.cas)) for key, meta in found.items()}

        assert live(broker, "shop") == true()
        before = len(records(broker, "shop"))
        push = Push(source, target(broker, "shop"), LocalRunner())
        settle(push)
        assert len(records(broker, "shop")) == before, "positions are in Kafka: nothing is sent twice"
        kept = bucket.seqnos()
        for _ in range(2):
            bucket.set_many((f"k{n}", "lost") for n in range(100, 150))
        bucket.set("new", "lost")
        bucket.delete("k200")
        settle(push)
        assert live(broker, "shop") == true()
        for partition, seqno in kept.items():
            bucket.promote(partition, to=seqno)
        settle(Push(source, target(broker, "shop"), LocalRunner()))
        assert live(broker, "shop") == true()
        marked = [value for _, value in records(broker, "shop") if value and value["source"]["rollback"]]
        assert {value["after"]["key"] for value in marked if value["after"]} == {
            *(f"k{n}" for n in range(100, 150)),
            "k200",
        }
        assert [value["op"] for value in marked].count("d") == 1  # of "new"
        source.close()
        bucket.set("by the command", "1")
        command = [
            sys.executable,
            "-m",
            "upper",
            "push",
            node.url,
            f"kafka://{broker}/shop",
            "--name",
            "test",
        ]
        options = ["--once", "--local", "--json"]
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, check=True)
        assert json.loads(done.stdout)["rows"] == 1
        assert live(broker, "shop") == true()


def test_a_lake_is_followed_through_a_rollback(broker: str, tmp_path: Path) -> None:
    def found() -> dict[bytes, int]:
        return {key: int(cas) for key, (_, cas) in live(broker, "of-a-lake").items()}

    push_through_a_rollback(tmp_path, [f"kafka://{broker}/of-a-lake"], found)


def test_a_producer_that_was_left_behind_is_fenced(broker: str) -> None:
    first = target(broker, "fenced").open(0)
    first._send("fenced", b"k", b"1", 0)
    second = target(broker, "fenced").open(0)
    with pytest.raises(AnotherWriter):
        first.commit([])
    second._send("fenced", b"k", b"2", 0)
    second.commit([])
    first.close()
    assert [key for key, _ in records(broker, "fenced")] == [b"k"]

"""Targets outside: replication against the writer of `upper load`, Kafka against its own producer.

Each pair writes the same items of 100 bytes, in one process, in one run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import upper
from bench import Absent, Row
from bench.load import load, node, scratch
from tests.nodes import Node
from upper.apps.push.kafka import kafka_target
from upper.apps.push.rounds import Push
from upper.apps.replicate.replicate import BucketPair, ReplicationSettings
from upper.cli.load_generator import LoadSettings
from upper.cli.load_generator import load as write_items
from upper.pipeline.local import LocalRunner
from upper.pipeline.source import BucketSource

PARTITIONS = 64


def rows(quick: bool) -> Iterator[Row]:
    items = 40_000 if quick else 1_000_000
    with node(partitions=PARTITIONS) as running:
        load("write", running.port, n=items // 8, c=8, d=100, V=PARTITIONS)
        yield from replicating(running, items)
        yield from kafka(running, items)


def taken(push: Push) -> tuple[int, float]:
    """The changes of one round, and its seconds."""
    began = time.perf_counter()
    done = push.round()
    return done.rows, time.perf_counter() - began


def replicating(running: Node, items: int) -> Iterator[Row]:
    with node(partitions=PARTITIONS) as loaded, upper.connect(loaded.url) as bucket:
        wrote = write_items(bucket, LoadSettings(items=items))
    writer = wrote.sets / wrote.seconds
    yield Row(name="writer of `upper load`", value=writer, unit="items/s")
    for name, both_ways in (("replication, first filling", False), ("the same, both ways", True)):
        with node(partitions=PARTITIONS) as empty:
            settings = ReplicationSettings(both_ways=both_ways)
            with BucketPair(running.url, empty.url, settings) as pair:
                rate = rate_of(pair.pushes(LocalRunner())["there"])
        yield Row(
            name=name, value=rate, unit="items/s", ratio=rate / writer, against="the writer of `upper load`"
        )


def rate_of(push: Push) -> float:
    count, seconds = taken(push)
    return count / seconds


def kafka(running: Node, items: int) -> Iterator[Row]:
    import pytest

    try:
        from confluent_kafka import Producer

        from tests.brokers import kafka as broker
    except ImportError as missing:
        raise Absent(f"Kafka's client is not installed: {missing}") from None
    source = BucketSource(running.url)
    try:
        with scratch() as directory, broker(directory) as servers:
            value = b"v" * 450  # an envelope around 100 bytes has about this size
            producer = Producer(
                {
                    "bootstrap.servers": servers,
                    "log_level": 0,
                    "transactional.id": "bench",
                    "linger.ms": 20,
                    "compression.type": "lz4",
                    "queue.buffering.max.messages": 2_000_000,
                }
            )
            producer.init_transactions(60)
            producer.begin_transaction()
            began = time.perf_counter()
            for number in range(items):
                producer.produce("alone", value=value, key=b"key-%d" % number)
            producer.commit_transaction(300)
            alone = items / (time.perf_counter() - began)
            target = kafka_target(
                f"kafka://{servers}/pushed",
                name="bench",
                bucket="default",
                partitions=PARTITIONS,
                settings={},
                replicas=1,
            )
            rate = rate_of(Push(source, target, LocalRunner()))
    except pytest.skip.Exception as missing:
        raise Absent(f"no Kafka broker: {missing}") from None
    finally:
        source.close()
    yield Row(name="Kafka's producer, ready records", value=alone, unit="records/s")
    yield Row(
        name="push to Kafka", value=rate, unit="records/s", ratio=rate / alone, against="Kafka's producer"
    )

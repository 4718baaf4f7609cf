"""Targets outside: replication against the writer of `upper load`, Kafka and OpenSearch against their own.

Each pair writes the same items of 100 bytes, in one process, in one run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection

import upper
from bench import Absent, Row
from bench.load import load, node, scratch
from tests.nodes import Node
from upper.apps.push.kafka import kafka_target
from upper.apps.push.opensearch import IndexOptions, IndexTarget
from upper.apps.push.rounds import Push
from upper.apps.push.search_engine import BULK_OPERATIONS, parse_opensearch
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
        absent = []
        for part in (kafka, opensearch):
            try:
                yield from part(running, items)
            except Absent as missing:
                absent.append(str(missing))
        if absent:
            raise Absent("; ".join(absent))


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


def opensearch(running: Node, items: int) -> Iterator[Row]:
    """Against bulk requests of documents that are ready, one after the other as the push sends them."""
    import pytest

    from tests.search_engines import opensearch as engine

    source = BucketSource(running.url)
    try:
        with scratch() as directory, engine(directory) as server:
            host, _, port = server.partition(":")
            bodies = list(bulk_bodies(items))
            connection = HTTPConnection(host, int(port), timeout=600)
            began = time.perf_counter()
            for body in bodies:
                headers = {"Content-Type": "application/x-ndjson"}
                connection.request("POST", "/alone/_bulk?filter_path=errors", body=body, headers=headers)
                answer = connection.getresponse()
                assert json.loads(answer.read()) == {"errors": False}, "a document was refused"
            alone = items / (time.perf_counter() - began)
            connection.close()
            cluster = parse_opensearch(f"opensearch://{server}", lambda user: "")
            target = IndexTarget(cluster, IndexOptions("pushed", "bench", PARTITIONS))
            rate = rate_of(Push(source, target, LocalRunner()))
    except pytest.skip.Exception as missing:
        raise Absent(f"no OpenSearch: {missing}") from None
    finally:
        source.close()
    yield Row(name="bulk requests to OpenSearch, ready documents", value=alone, unit="documents/s")
    yield Row(
        name="push to OpenSearch",
        value=rate,
        unit="documents/s",
        ratio=rate / alone,
        against="bulk requests of ready documents",
    )


def bulk_bodies(items: int) -> Iterator[bytes]:
    about = {"seqno": 1, "partition": 1, "cas": "1" * 19}
    document = json.dumps({"about": about, "text": "v" * 100}).encode()
    for first in range(0, items, BULK_OPERATIONS):
        keys = range(first, min(items, first + BULK_OPERATIONS))
        yield b"".join(b'{"index":{"_id":"key-%d"}}\n%b\n' % (key, document) for key in keys)

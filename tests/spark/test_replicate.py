"""`upper replicate` as a Spark job: workers write to the target, and carry a rollback of the source over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import upper
from tests.nodes import Node
from upper.apps.push.rounds import Push
from upper.apps.replicate.replicate import BucketPair, ReplicationSettings
from upper.pipeline.target import Task
from upper.spark.session import SparkRunner

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]


class CountingRunner(SparkRunner):
    """Spark's workers, and how many tasks each job had."""

    def __init__(self, spark: Any) -> None:
        super().__init__(spark)
        self.jobs: list[int] = []

    def run(self, tasks: Any) -> list[Any]:
        self.jobs.append(len(tasks))
        return super().run(tasks)


class Dying:
    """A task that writes everything, and whose result is lost with its worker."""

    def __init__(self, task: Task[Any]) -> None:
        self.task = task

    def __call__(self) -> Any:
        self.task()
        raise RuntimeError("the worker was lost")


def settle(push: Push) -> int:
    rows = 0
    for _ in range(6):
        rows += (done := push.round()).rows
        if not push.incomplete and not done.rows:
            break
    return rows


def versions(bucket: Any) -> dict[bytes, tuple[int, int, int, bytes]]:
    items = dict(bucket.scan())
    found = bucket.metadata_many(items)
    return {
        key: (meta.revision, int(meta.cas), meta.flags, items[key].value)
        for key, meta in found.items()
        if not key.startswith(b"_upper/")
    }


def test_spark_replicates_a_bucket_and_carries_a_rollback_over(
    spark: Any, node: Node, bucket: Any, tmp_path: Path
) -> None:
    with (
        Node(tmp_path / "other", partitions=16) as other,
        upper.connect(other.url) as target,
        BucketPair(node.url, other.url, ReplicationSettings()) as pair,
    ):
        runner = CountingRunner(spark)
        push = pair.pushes(runner)["there"]
        bucket.set_many({f"k{n}": b"one" for n in range(8_000)}, flags=7)
        bucket.delete_many([f"k{n}" for n in range(100)])
        settle(push)
        assert max(runner.jobs) > 1, "several tasks write at a time"
        assert versions(target) == versions(bucket)
        kept = bucket.seqnos()
        for _ in range(2):  # the revisions of the lost branch are higher
            bucket.set_many({f"k{n}": b"lost" for n in range(1_000, 6_000)})
        bucket.set("only there", "lost")
        assert settle(push) > 5_000
        assert versions(target) == versions(bucket)
        for partition, seqno in kept.items():
            bucket.promote(partition, to=seqno)
        settle(pair.pushes(runner)["there"])  # a new driver, with the positions in the target
        assert versions(target) == versions(bucket)


def test_a_job_whose_workers_are_lost_is_completed_by_the_next(
    spark: Any, node: Node, bucket: Any, tmp_path: Path
) -> None:
    class LosingRunner(SparkRunner):
        def run(self, tasks: Any) -> list[Any]:
            return super().run([Dying(task) for task in tasks])

    with (
        Node(tmp_path / "other", partitions=16) as other,
        upper.connect(other.url) as target,
        BucketPair(node.url, other.url, ReplicationSettings()) as pair,
    ):
        bucket.set_many({f"k{n}": b"one" for n in range(6_000)})
        with pytest.raises(upper.UpperError):
            pair.pushes(LosingRunner(spark))["there"].round()
        bucket.delete_many([f"k{n}" for n in range(3_000)])
        settle(pair.pushes(SparkRunner(spark))["there"])
        assert versions(target) == versions(bucket)
        assert len(versions(target)) == 3_000

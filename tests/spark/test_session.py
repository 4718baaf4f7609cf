"""Sessions of Spark: a verb stops the one that it has started, and none that was there before."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from upper.spark.session import STARTS_FAST, NoSpark, SparkRunner
from upper.spark.workers import WorkerSettings, workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.conftest import SharedSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_session_that_was_running_is_used_with_its_settings_and_goes_on(spark: SparkSession) -> None:
    shuffles = spark.conf.get("spark.sql.shuffle.partitions")
    with workers("another", WorkerSettings(master="local[1]")) as make:
        assert make().run([lambda: 1, lambda: 2]) == [1, 2]
        assert make(pool="beside").run([lambda: 3]) == [3]
    assert SparkRunner(spark).run([lambda: 4]) == [4]
    assert spark.conf.get("spark.sql.shuffle.partitions") == shuffles
    assert spark.sparkContext.appName == "tests"


def test_a_session_for_tasks_starts_java_with_less_work(spark: SparkSession) -> None:
    options = spark.conf.get("spark.driver.extraJavaOptions", "") or ""
    assert set(STARTS_FAST) <= set(options.split())
    jvm: Any = spark._jvm
    arguments = jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments()
    assert set(STARTS_FAST) <= set(arguments), "Java was started with them"


def test_a_runner_whose_session_was_stopped_reports_it_and_the_next_test_gets_another(
    shared_session: SharedSession,
) -> None:
    session = shared_session.get()
    runner = SparkRunner(session)
    session.stop()
    for attempt in (lambda: runner.width, lambda: runner.run([lambda: 1])):
        with pytest.raises(NoSpark, match="was stopped; start another"):
            attempt()
    with workers("its own", WorkerSettings(master="local[1]")) as make:
        own = make()
        assert own.run([lambda: 5]) == [5]
    with pytest.raises(NoSpark, match="was stopped"):
        own.run([lambda: 6])
    assert SparkRunner(shared_session.get()).run([lambda: 7]) == [7]


class WhereItRuns:
    """A task whose result is the process that ran it."""

    def __init__(self, *, small: bool) -> None:
        self.small = small

    def __call__(self) -> int:
        return os.getpid()


def test_a_small_task_alone_runs_here_once_workers_have_done_a_job(spark: SparkSession) -> None:
    runner, small, large = SparkRunner(spark), WhereItRuns(small=True), WhereItRuns(small=False)
    assert runner.run([small]) != [os.getpid()]  # workers that cannot do it are found at once
    assert runner.run([small]) == [os.getpid()]
    assert runner.run([large]) != [os.getpid()]
    assert os.getpid() not in runner.run([small, small])

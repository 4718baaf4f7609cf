"""A Spark session for the verbs that need one, and its workers as the task runner of the pipeline.

A program that has a session of its own registers the source with it and needs nothing here. `upper sync`
starts one: few settings, each with its reason, and any `spark.*` setting of the caller overrides them.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

from py4j.protocol import Py4JError, Py4JNetworkError  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from upper.errors import InvalidArguments, UpperError
from upper.pipeline.local import LocalRunner
from upper.pipeline.target import NoWorkers, WorkFailed, is_small
from upper.spark import java
from upper.spark.worker import leave_pandas_out

T = TypeVar("T")
# Java's optimising compiler takes a third of the processor time of a short run, and improves only code that
# rows pass through. A virtual machine without these options ignores them.
STARTS_FAST = ("-XX:+IgnoreUnrecognizedVMOptions", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
TASKS_ONLY = "spark.upper.tasksOnly"  # of a session whose workers run nothing but tasks of upper
WATCH_INTERVAL = 0.5  # seconds between two reports of finished tasks


class NoSpark(NoWorkers):
    """Spark did not start, or has ended."""


def running() -> bool:
    """Whether this process has a Spark context already, such as that of a notebook."""
    return SparkContext._active_spark_context is not None


def start(
    *,
    app: str,
    master: str = "local[*]",
    settings: Mapping[str, str] | None = None,
    py_files: Sequence[str] = (),
    tasks_only: bool = False,
) -> SparkSession:
    """A session; `master` is `local[*]`, or the address of a cluster.

    `tasks_only`: Java schedules tasks of upper and sees no rows, and workers run nothing else, so that both
    start with less work.

    Where one is running, it is that one with its own settings: a process has one Spark context.
    """
    if not re.match(r"local(\[[^]]+\])?$|(spark|k8s)://.|yarn$", master):
        raise InvalidArguments(f"Spark has no master {master!r}; name one as local[*] or spark://HOST:PORT")
    java.ensure()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    local = master.startswith("local")
    conf = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # Workers import pyarrow once; that takes too long for every batch of a second.
        "spark.python.worker.reuse": "true",
        # Data comes over the network, so waiting for a worker near some disk gains nothing.
        "spark.locality.wait": "0s",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "8",
        TASKS_ONLY: str(tasks_only).lower(),
    }
    options = list(STARTS_FAST) if tasks_only and local else []
    if "SPARK_CONF_DIR" not in os.environ:
        options.append(f"-Dlog4j2.configurationFile={_quiet()}")
    if options:
        conf["spark.driver.extraJavaOptions"] = " ".join(options)
    if local:
        conf |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    builder = SparkSession.builder
    if not running():
        builder = builder.appName(app).master(with_retries(master))
        for name, value in {**conf, **(settings or {})}.items():
            builder = builder.config(name, value)
    # Py4J logs a stack trace for every call that is interrupted.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    try:
        # In another thread: an interrupted start would leave a Java process behind, and on the main thread
        # Spark would replace our signal handler.
        session = in_thread(builder.getOrCreate)
        # Spark looks up Python data sources of a stream in the session that is active in the calling thread.
        jvm: Any = session._jvm
        jvm.SparkSession.setActiveSession(session._jsparkSession)
        for file in py_files:
            session.sparkContext.addPyFile(file)
    except (Py4JError, PySparkException, ConnectionError) as error:
        raise NoSpark(f"Spark does not start with the master {master!r}: {_cause(error)}") from error
    return session


def stop(session: SparkSession, *, within: float | None = None) -> None:
    """End a session, also in the middle of its work, or when its Java process has ended.

    `within`: seconds after which Java is terminated. This process cannot start another session then.
    """

    def end() -> None:
        # Py4J meets any error while Java ends.
        with suppress(Exception):
            # Tasks that are cut off would log errors.
            session.sparkContext.setLogLevel("OFF")
            session.stop()

    java_process = getattr(session.sparkContext._gateway, "proc", None)
    ending = threading.Thread(target=end, name="spark-stop", daemon=True)
    ending.start()
    ending.join(within)
    if ending.is_alive() and java_process is not None:
        java_process.terminate()  # its handler ends the session


def _quiet() -> str:
    """A file with log settings that pass errors only; without it, Spark logs ten lines at every start.

    A task that fails is retried, and reported when Spark gives up, so executors need not log each failure.
    """
    # The file stays: a Java whose start was interrupted may read it after this process has ended.
    name = f"log4j2-{sha256(QUIET.encode()).hexdigest()[:12]}.properties"
    path = java.cache_directory(os.environ) / name
    java.put(path, QUIET)
    return str(path)


QUIET = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
logger.executor.name = org.apache.spark.executor.Executor
logger.executor.level = off
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n%ex
"""


def with_retries(master: str) -> str:
    """The master with retries: in local mode Spark fails a job at the first failure of a task."""
    return re.sub(r"^local\[([^,\]]+)\]$", r"local[\1,4]", "local[1]" if master == "local" else master)


class SparkRunner:
    """Runs tasks on the workers of a session, one Spark task each.

    A single small task runs in this process: Spark's job around it would take longer than the task. The first
    one does not, so that workers that cannot do such tasks are found at once.
    """

    def __init__(
        self, session: SparkSession, *, watch: Callable[[float], None] | None = None, pool: str | None = None
    ) -> None:
        """`watch` is called now and then with the share of the tasks that are done.

        `pool`: of Spark's fair scheduler. Jobs of two pools share the workers; those of one pool queue.
        """
        self._context, self._watch, self._pool = session.sparkContext, watch, pool
        self._alone = self._context.getConf().get(TASKS_ONLY) == "true"
        self._proven = False  # the workers have done a job

    @property
    def width(self) -> int:
        """Two tasks for each core: while one waits for its node, the other works."""
        self._require_running()
        return 2 * int(self._context.defaultParallelism)

    def _require_running(self) -> None:
        if self._context._jsc is None:
            raise NoSpark("the Spark session of this runner was stopped; start another and a runner over it")

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        if not tasks:
            return []
        self._require_running()
        if self._proven and len(tasks) == 1 and is_small(tasks[0]):
            return LocalRunner(width=1).run(tasks)
        try:
            with self._watched(len(tasks)):
                answers: list[Any] = in_thread(lambda: self._collect(tasks))
        except (Py4JNetworkError, ConnectionError) as error:
            raise NoSpark("Spark ended while tasks were running; start again") from error
        except (Py4JError, PySparkException) as error:
            raise WorkFailed(f"a task failed on Spark's workers: {_cause(error)}") from error
        for answer in answers:
            if isinstance(answer, _Failed):
                raise answer.error
        self._proven = True
        return answers

    def _collect(self, tasks: Sequence[Callable[[], T]]) -> list[Any]:
        if self._pool is not None:
            self._context.setLocalProperty("spark.scheduler.pool", self._pool)  # of this thread
        return (
            self._context.parallelize(list(tasks), len(tasks))
            .map(partial(_done, alone=self._alone))
            .collect()
        )

    @contextmanager
    def _watched(self, tasks: int) -> Iterator[None]:
        if (watch := self._watch) is None:
            yield
            return
        over, tracker = threading.Event(), self._context.statusTracker()

        def look() -> None:
            while not over.wait(WATCH_INTERVAL):
                stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
                watch(sum(stage.numCompletedTasks for stage in stages if stage) / tasks)

        looking = threading.Thread(target=look, name="watch-tasks", daemon=True)
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join()


def in_thread(work: Callable[[], T]) -> T:
    """Run it in another thread and wait: Ctrl-C then ends the wait, and interrupts no call of Py4J."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised in the thread that waits)
            answer.set_exception(error)

    threading.Thread(target=run, name="spark-job", daemon=True).start()
    return answer.result()


class _Failed:
    """An error of ours as a result, so that the driver gets its message instead of a stack trace."""

    def __init__(self, error: UpperError) -> None:
        self.error = error


def _done(task: Callable[[], T], *, alone: bool) -> T | _Failed:
    if alone:
        leave_pandas_out()
    # Ctrl-C goes to every process on a terminal. The driver decides what becomes of the tasks.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return task()
    except UpperError as error:
        error.__traceback__ = error.__cause__ = None
        return _Failed(error)


def _cause(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"^(\w+\.)*\w*(Error|Exception): ", line)]
    return (named or lines or ["no reason given"])[-1][:500]

"""A Spark session that suits this work, and the workers behind it as a place to run tasks.

Whoever has a session of their own registers the source with it and needs nothing here. `upper sync`
makes one: few settings, each with its reason, and any `spark.*` setting of the caller wins.
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
from hashlib import sha256
from typing import Any, TypeVar

from py4j.protocol import Py4JError, Py4JNetworkError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from upper.errors import InvalidArguments, UpperError
from upper.spark import java

T = TypeVar("T")
LOOK_EVERY = 0.5  # seconds between two looks at how far the tasks are


class WorkFailed(UpperError):
    """A task failed on Spark's workers as often as Spark tries."""


class NoSpark(UpperError):
    """There is no Spark to work on: it did not start, or it has ended."""


def start(
    *,
    app: str,
    master: str = "local[*]",
    settings: Mapping[str, str] | None = None,
    py_files: Sequence[str] = (),
) -> SparkSession:
    """A session; `master` is `local[*]`, or the address of a cluster."""
    if not re.match(r"local(\[[^]]+\])?$|(spark|k8s)://.|yarn$", master):
        raise InvalidArguments(f"Spark has no master {master!r}; name one as local[*] or spark://HOST:PORT")
    java.ensure()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    local = master.startswith("local")
    conf = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # Workers import pyarrow once and stay; a batch of a second cannot pay for that each time.
        "spark.python.worker.reuse": "true",
        # Data comes over the network, not from a disk near somebody: waiting for a near worker gains nothing.
        "spark.locality.wait": "0s",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "8",
    }
    if "SPARK_CONF_DIR" not in os.environ:
        conf["spark.driver.extraJavaOptions"] = f"-Dlog4j2.configurationFile={_quiet()}"
    if local:
        conf |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    builder = SparkSession.builder.appName(app).master(patient(master))
    for name, value in {**conf, **(settings or {})}.items():
        builder = builder.config(name, value)
    # What Spark's bridge logs about a call that was interrupted is for those who debug the bridge.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    try:
        # Aside: an interrupted start would leave a Java behind that nobody ends, and on the main thread Spark
        # would put its own handler in the place of ours.
        session = aside(builder.getOrCreate)
        for file in py_files:
            session.sparkContext.addPyFile(file)
    except (Py4JError, PySparkException, ConnectionError) as error:
        raise NoSpark(f"Spark does not start with the master {master!r}: {_cause(error)}") from error
    return session


def stop(session: SparkSession) -> None:
    """End a session, also in the middle of its work, and one whose Java has gone before us."""
    with suppress(Py4JError, ConnectionError):
        # What it cannot finish any more, nobody waits for.
        session.sparkContext.setLogLevel("OFF")
        session.stop()


def _quiet() -> str:
    """Settings of Java's logging that let errors through; without, Spark says ten lines at every start.

    A task that fails is tried again and told of once it is given up, so executors need not tell of each try.
    """
    # It stays: a Java whose start was interrupted may come to read it when we are gone.
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


def patient(master: str) -> str:
    """In local mode Spark gives up at the first failure of a task unless told otherwise."""
    return re.sub(r"^local\[([^,\]]+)\]$", r"local[\1,4]", "local[1]" if master == "local" else master)


class SparkRunner:
    """Runs tasks on the workers of a session, one Spark task each."""

    def __init__(self, session: SparkSession, *, watch: Callable[[float], None] | None = None) -> None:
        """`watch` is told now and then what share of the tasks under way is done."""
        self._context, self._watch = session.sparkContext, watch

    @property
    def width(self) -> int:
        """Two tasks a core: when one waits for its node, the other works."""
        return 2 * int(self._context.defaultParallelism)

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        if not tasks:
            return []
        try:
            with self._watched(len(tasks)):
                answers: list[Any] = aside(
                    lambda: self._context.parallelize(list(tasks), len(tasks)).map(_done).collect()
                )
        except (Py4JNetworkError, ConnectionError) as error:
            raise NoSpark("Spark has ended in the middle of the work; start again") from error
        except (Py4JError, PySparkException) as error:
            raise WorkFailed(f"the work failed on Spark's workers: {_cause(error)}") from error
        for answer in answers:
            if isinstance(answer, _Failed):
                raise answer.error
        return answers

    @contextmanager
    def _watched(self, tasks: int) -> Iterator[None]:
        if (watch := self._watch) is None:
            yield
            return
        over, tracker = threading.Event(), self._context.statusTracker()

        def look() -> None:
            while not over.wait(LOOK_EVERY):
                stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
                watch(sum(stage.numCompletedTasks for stage in stages if stage) / tasks)

        looking = threading.Thread(target=look, name="watch-tasks", daemon=True)
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join()


def aside(work: Callable[[], T]) -> T:
    """Do it in another thread and wait here: Ctrl-C then ends the waiting, and tears no call apart."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # noqa: BLE001 (it goes to whoever waits)
            answer.set_exception(error)

    threading.Thread(target=run, name="spark-job", daemon=True).start()
    return answer.result()


class _Failed:
    """An error of ours on its way to the driver: it has a sentence, where Spark has a stack trace."""

    def __init__(self, error: UpperError) -> None:
        self.error = error


def _done(task: Callable[[], T]) -> T | _Failed:
    # Ctrl-C goes to every process on a terminal. It is the driver that decides what becomes of the work.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return task()
    except UpperError as error:
        error.__traceback__ = error.__cause__ = None
        return _Failed(error)


def _cause(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if re.match(r"^(\w+\.)*\w*(Error|Exception): ", line)]
    return (told or lines or ["no reason given"])[-1][:500]

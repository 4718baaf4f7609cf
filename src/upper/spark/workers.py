"""The workers of a verb: those of a Spark session, or threads of this process, without PySpark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from upper.pipeline.local import LocalRunner
from upper.pipeline.target import Runner


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    local: bool = False  # threads of this process, without Spark
    master: str = "local[*]"
    py_files: tuple[str, ...] = ()
    spark: Mapping[str, str] = field(default_factory=dict)


class Workers(Protocol):
    """Makes runners over the same workers."""

    def __call__(self, *, pool: str | None = None, watch: Callable[[float], None] | None = None) -> Runner:
        """Jobs of two pools share the workers; those of one pool queue. `watch`: the share that is done."""
        ...


@contextmanager
def workers(app: str, settings: WorkerSettings, *, stop_within: float | None = None) -> Iterator[Workers]:
    """Start the workers, and stop them at the end. A session that was running before goes on.

    `stop_within`: seconds, for a process that ends then.
    """
    if settings.local:
        yield lambda *, pool=None, watch=None: LocalRunner(watch=watch)
        return
    from upper.spark.session import SparkRunner, running, start, stop

    # Jobs of several pools share the workers.
    conf = {"spark.scheduler.mode": "FAIR", **settings.spark}
    foreign = running()
    session = start(
        app=app, master=settings.master, settings=conf, py_files=settings.py_files, tasks_only=True
    )
    try:
        yield lambda *, pool=None, watch=None: SparkRunner(session, pool=pool, watch=watch)
    finally:
        if not foreign:
            stop(session, within=stop_within)

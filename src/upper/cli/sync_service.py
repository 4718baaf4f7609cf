"""`upper sync` as a service: the lakes of a file, or one lake with metrics. Prints a line when ready."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from upper.apps.lake.follow import LakeFollower, Report, SyncSettings, SyncTotals
from upper.apps.lake.service import LakeMetrics, Service
from upper.apps.lake.store import LakeStore
from upper.apps.lake.sync import SyncRound
from upper.cli.output import Output
from upper.cli.sync_config import LakeConfig, read_config
from upper.pipeline.metrics import MetricsServer
from upper.pipeline.signals import stop_signals


def serve_config(path: Path, port: int | None, out: Output, *, stopping: Callable[[], None]) -> None:
    """Follow the lakes of a file until SIGTERM or SIGINT. `port` overrides the one of the file."""
    config = read_config(path)
    logging.getLogger("upper").setLevel(logging.INFO)
    service = Service(config.workers)
    for lake in config.lakes:
        service.add(partial(_follower, lake))
    _serve(service, config.metrics_port if port is None else port, len(config.lakes), out, stopping)
    out.note("upper: stopped; the next sync resumes from the last commits")


def _follower(lake: LakeConfig, metrics: LakeMetrics) -> LakeFollower:
    return LakeFollower(lake.url, lake.store, lake.settings, name=lake.name, report=metrics.report)


def serve_one(
    url: str,
    store: LakeStore,
    settings: SyncSettings,
    port: int,
    out: Output,
    *,
    report: Report,
    stopping: Callable[[], None],
) -> SyncTotals:
    """Follow one lake, with metrics on a port."""

    def follower(metrics: LakeMetrics) -> LakeFollower:
        def both(progress: SyncTotals, done: SyncRound | None) -> None:
            metrics.report(progress, done)
            report(progress, done)

        return LakeFollower(url, store, settings, report=both)

    service = Service(settings.workers)
    progress = service.add(follower).progress
    _serve(service, port, 1, out, stopping)
    return progress


def _serve(service: Service, port: int | None, lakes: int, out: Output, stopping: Callable[[], None]) -> None:
    with ExitStack() as stack:
        if port is not None:
            port = stack.enter_context(MetricsServer(port, service.page, service.health)).port

        def ready() -> None:
            count = "1 lake is" if lakes == 1 else f"{lakes} lakes are"
            metrics = "" if port is None else f", metrics on port {port}"
            text = f"ready: {count} followed{metrics}"
            out.show({"ready": True, "lakes": lakes, "metrics_port": port}, text=text)
            sys.stdout.flush()

        service.run(stop_signals(stopping), ready=ready)

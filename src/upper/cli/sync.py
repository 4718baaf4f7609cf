"""Copy the changes of a bucket to a lake: three Delta tables, kept up to date with Spark.

LAKE/changes holds every change once, LAKE/latest one row for each live key, LAKE/lost the changes that a
rollback removed. The position is part of each commit, so a sync that was stopped or killed resumes exactly.
Without --once it follows the bucket until Ctrl-C or SIGTERM. The current round may take 4 more seconds then;
a longer one is abandoned, and the next sync does it again. A second Ctrl-C stops at once.

Starting Spark takes longer than syncing a small bucket: --local does the same work, with the same commits, in
threads of this process. A lake may be synced with Spark one day and without it the next.

--types FILE adds typed tables, which every later sync keeps as well; see `upper lake LAKE types`.

--config FILE follows several buckets in one process, as a service: FILE is TOML, with a [[lake]] for each. It
prints a line when all of them are followed, and retries while a bucket or a store is not available.
--metrics-port serves their lag, commits, rollbacks and sizes to Prometheus, also for a single lake.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

from upper.cli.common import add_bucket, add_lake, lake_of, log_to_stderr, number, setting, url_of
from upper.cli.durations import seconds
from upper.cli.output import ExitCode, Output
from upper.cli.workers import add_workers, worker_settings
from upper.errors import InvalidArguments

EXAMPLES = """
upper sync upr://127.0.0.1:11210/default ./lake --once
upper sync upr://127.0.0.1:11210/default ./lake --every 1s --latest-every 60s
upper sync upr://127.0.0.1:11210/default ./lake --local --once
upper sync upr://127.0.0.1:11210/default ./lake --types types.yml --local
upper sync upr://10.0.0.7/default /shared/lake --master spark://10.0.0.8:7077
upper sync --config sync.toml --metrics-port 9464
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_bucket(parser, optional=True)
    add_lake(parser, optional=True)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="follow the buckets of this file, instead of URL and LAKE"
    )
    parser.add_argument(
        "--metrics-port",
        type=number(0, 65535),
        metavar="PORT",
        help="Prometheus metrics over HTTP, on loopback",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--every",
        type=seconds,
        default=1.0,
        metavar="TIME",
        help="commit this often, as 1s or 500ms (default 1s)",
    )
    how.add_argument("--once", action="store_true", help="bring the lake up to now, and end")
    parser.add_argument(
        "--latest-every",
        type=seconds,
        default=60.0,
        metavar="TIME",
        help="refresh the parts of `latest` that changed much, this often (default 60s)",
    )
    parser.add_argument(
        "--latest-within",
        type=seconds,
        default=3600.0,
        metavar="TIME",
        help="refresh every part of `latest` that changed within this time (default 1h)",
    )
    parser.add_argument(
        "--vacuum-keep",
        type=seconds,
        default=7200.0,
        metavar="TIME",
        help="keep replaced files this long, for readers of older versions (default 2h)",
    )
    parser.add_argument(
        "--trim",
        type=seconds,
        default=0.0,
        metavar="TIME",
        help="remove changes that are older than this (default: keep all)",
    )
    parser.add_argument(
        "--types",
        type=Path,
        metavar="FILE",
        help="keep the typed tables of this file (YAML) too: columns out of JSON values",
    )
    parser.add_argument(
        "--private",
        action="store_true",
        help="only the owner may read the lake: mode 0700, and 0600 for files (default: set by the umask)",
    )
    add_workers(parser)
    parser.add_argument(
        "--groups",
        type=_groups,
        metavar="N",
        help="groups that the files of a new lake form (default 16, at most one a partition)",
    )
    parser.add_argument(
        "--keep",
        choices=("both", "changes", "latest"),
        help="what a new lake keeps (both); the history alone, or the live keys alone, take half the space",
    )
    parser.add_argument(
        "--new-history",
        action="store_true",
        help="continue with a bucket that was created again: the lake's rows move to `lost`",
    )
    parser.add_argument(
        "--py-files",
        action="append",
        type=_file,
        default=[],
        metavar="FILE",
        help="send this package or file to Spark's workers",
    )
    parser.add_argument(
        "--conf",
        action="append",
        type=setting,
        default=[],
        metavar="NAME=VALUE",
        help="a setting of Spark's; may be repeated",
    )


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.apps.lake.follow import SyncSettings, follow
    from upper.cli.progress import SyncProgress
    from upper.cli.sync_config import read_types
    from upper.cli.sync_service import serve_config, serve_one

    if args.config is not None:
        _only_config(args)
        log_to_stderr(out)
        serve_config(args.config, args.metrics_port, out, stopping=_stopping)
        return ExitCode.OK
    if args.url is None or args.lake is None:
        raise InvalidArguments("a sync needs URL and LAKE, or --config FILE; see `upper sync --help`")
    if args.once and args.metrics_port is not None:
        raise InvalidArguments("--metrics-port is for a sync that keeps running; leave it or --once out")
    settings = SyncSettings(
        once=args.once,
        every=args.every,
        latest_every=args.latest_every,
        latest_within=args.latest_within,
        vacuum_keep=args.vacuum_keep,
        trim=args.trim,
        groups=args.groups,
        keep=args.keep,
        new_history=args.new_history,
        types=() if args.types is None else read_types(args.types),
        workers=replace(worker_settings(args), py_files=tuple(args.py_files), spark=dict(args.conf)),
    )
    log_to_stderr(out)
    store = lake_of(args)
    if args.private:
        os.umask(0o077)  # Spark's local workers inherit it
        store.make_private()
    try:
        with SyncProgress(out) as shown:
            if args.metrics_port is None:
                summary = follow(url_of(args), store, settings, report=shown.report, stopping=_stopping)
            else:
                summary = serve_one(
                    url_of(args),
                    store,
                    settings,
                    args.metrics_port,
                    out,
                    report=shown.report,
                    stopping=_stopping,
                )
    except KeyboardInterrupt:
        out.note("upper: stopped; the next sync resumes from the last commit")
        raise
    made = {field.name: getattr(summary, field.name) for field in fields(summary) if field.name != "doing"}
    out.show(made, text=summary.sentence())
    return ExitCode.OK


def _only_config(args: Namespace) -> None:
    """Reject options that the file replaces."""
    usual = ArgumentParser()
    add_arguments(usual)
    for name, value in vars(args).items():
        if name not in ("config", "metrics_port", "json") and value != usual.get_default(name):
            option = f"--{name.replace('_', '-')}" if name not in ("url", "lake") else name.upper()
            raise InvalidArguments(f"{option} and --config do not go together; write it into {args.config}")


def _stopping() -> None:
    # From a signal handler: unlike print, write() cannot collide with a line that is being printed.
    with suppress(OSError):
        os.write(2, b"\nupper: stopping after this round; press Ctrl-C again to stop at once\n")


def _groups(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


def _file(text: str) -> str:
    if not Path(text).is_file():
        raise ArgumentTypeError(f"there is no file {text}")
    return text

"""Keep a lake true: three Delta tables that follow a bucket.

LAKE/changes has every change once, LAKE/latest one row for each live key, LAKE/lost what a rollback took
back. The position is in the commits themselves: stop it, kill it, start it again, and it goes on where it
was. Without --once it follows until it is stopped.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from upper.cli.output import ExitCode, Output
from upper.cli.spans import seconds

EXAMPLES = """
upper sync upr://127.0.0.1:11210/default ./lake --once
upper sync upr://127.0.0.1:11210/default ./lake --every 1s --latest-every 60s
upper sync upr://10.0.0.7/default /shared/lake --master spark://10.0.0.8:7077
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the bucket, as upr://HOST:PORT/BUCKET")
    parser.add_argument(
        "lake", metavar="LAKE", type=_directory, help="the directory of the lake; made if it is not there"
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
        help="bring `latest` up to date this often (default 60s)",
    )
    parser.add_argument(
        "--master",
        default="local[*]",
        metavar="MASTER",
        help="where Spark works: local[*] or spark://HOST:PORT",
    )
    parser.add_argument(
        "--groups",
        type=_groups,
        metavar="N",
        help="groups that the files of a new lake form (default 16, at most one a partition)",
    )
    parser.add_argument(
        "--new-history",
        action="store_true",
        help="go on with a bucket that was made anew: what the lake has moves to `lost`",
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
        type=_setting,
        default=[],
        metavar="NAME=VALUE",
        help="a setting of Spark's; may be repeated",
    )


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.apps.lake.follow import FollowSettings, follow
    from upper.cli.progress import SyncProgress

    settings = FollowSettings(
        once=args.once,
        every=args.every,
        latest_every=args.latest_every,
        master=args.master,
        groups=args.groups,
        new_history=args.new_history,
        py_files=tuple(args.py_files),
        spark=dict(args.conf),
    )
    with SyncProgress(out) as progress:
        summary = follow(args.url, args.lake, settings, tell=progress.tell)
    out.show(summary, text=summary.sentence())
    return ExitCode.OK


def _directory(text: str) -> Path:
    if "://" in text:
        raise ArgumentTypeError(f"{text!r} is an address; a lake is a directory that all workers see")
    return Path(text)


def _groups(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


def _file(text: str) -> str:
    if not Path(text).is_file():
        raise ArgumentTypeError(f"there is no file {text}")
    return text


def _setting(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as spark.executor.memory=2g")
    return name, value

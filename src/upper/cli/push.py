"""Push the changes of a bucket to another system, and keep it equal to the bucket.

kafka://HOST:PORT[,HOST:PORT...]/TOPIC gets a record for each change, in Debezium's envelope, and a tombstone
for each deletion. Each round is one transaction; positions are in the topic TOPIC.upper. This needs the extra
upper-kv[kafka].

When the source loses changes in a failover, the target is brought to the state of the source. Without --once
it follows until Ctrl-C or SIGTERM.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from upper.cli.common import add_bucket, as_typed, number, setting, url_of
from upper.cli.durations import seconds
from upper.cli.following import add_metrics, run_until_stopped, teller
from upper.cli.output import ExitCode, Output
from upper.cli.workers import add_workers, worker_settings
from upper.errors import InvalidArguments

if TYPE_CHECKING:
    from upper.apps.push.tasks import Destination
    from upper.pipeline.source import BucketSource

EXAMPLES = """
upper push upr://127.0.0.1:11210 kafka://127.0.0.1:9092/shop --once --local
upper push upr://127.0.0.1:11210 kafka://10.0.0.9:9092/shop --setting security.protocol=SSL
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_bucket(parser)
    parser.add_argument("target", metavar="TARGET", help="kafka://HOST:PORT[,HOST:PORT...]/TOPIC")
    parser.add_argument(
        "--prefix", type=as_typed, default=b"", metavar="PREFIX", help="only keys that begin with this"
    )
    parser.add_argument(
        "--name", default="", metavar="NAME", help="under which TARGET keeps positions (the bucket's name)"
    )
    parser.add_argument(
        "--new-history",
        action="store_true",
        help="go on with a bucket that was made anew: TARGET is brought to its state",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--every", type=seconds, default=1.0, metavar="TIME", help="a round this often, as 500ms (1s)"
    )
    how.add_argument("--once", action="store_true", help="bring TARGET up to now, and end")
    parser.add_argument(
        "--setting",
        action="append",
        type=setting,
        default=[],
        metavar="NAME=VALUE",
        help="a setting of Kafka's client, such as security.protocol=SSL; may be repeated",
    )
    parser.add_argument(
        "--settings-file",
        type=Path,
        metavar="FILE",
        help="read such settings from the lines of FILE: the place for passwords",
    )
    parser.add_argument(
        "--topic-replicas", type=number(1, 100), default=-1, metavar="N", help="of a topic that is created"
    )
    add_metrics(parser)
    add_workers(parser)


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.apps.push.follow import Follow, PushSettings
    from upper.apps.push.rounds import Push
    from upper.spark.workers import workers

    how = PushSettings(once=args.once, every=args.every, metrics_port=args.metrics_port)
    with _source(args) as source, workers("upper push", worker_settings(args)) as make:
        push = Push(source, _target(args, source), make(), new_history=args.new_history)
        run_until_stopped(Follow({"there": push}, how, tell=teller(out)), out, once=args.once)
    return ExitCode.OK


@contextmanager
def _source(args: Namespace) -> Iterator[BucketSource]:
    from upper.pipeline.source import BucketSource, Filters

    source = BucketSource(url_of(args), filters=Filters(key_prefix=args.prefix or None), name="push")
    try:
        yield source
    finally:
        source.close()


def _target(args: Namespace, source: BucketSource) -> Destination:
    from upper.apps.push.kafka import kafka_target

    bucket = source.bucket
    name = args.name or bucket.address.bucket
    if args.prefix:
        name += f":{args.prefix.decode(errors='backslashreplace')}"
    if not args.target.startswith("kafka://"):
        raise InvalidArguments(f"{args.target} is not a target; write it as kafka://HOST:PORT/TOPIC")
    settings = dict(args.setting)
    if args.settings_file is not None:
        settings |= dict(
            setting(line)
            for line in args.settings_file.read_text().splitlines()
            if line.strip() and not line.startswith("#")
        )
    return kafka_target(
        args.target,
        name=name,
        bucket=bucket.address.bucket,
        partitions=bucket.partitions,
        settings=settings,
        replicas=args.topic_replicas,
    )

"""Push the changes of a bucket or of a lake to another system, and keep it equal to the source.

kafka://HOST:PORT[,HOST:PORT...]/TOPIC gets a record for each change, in Debezium's envelope, and a tombstone
for each deletion. Each round is one transaction; positions are in the topic TOPIC.upper. This needs the extra
upper-kv[kafka].

opensearch://[USER@]HOST[:PORT][,HOST...] with --index gets a document for each key; positions are in the
index INDEX.upper. opensearchs:// is TLS. Elasticsearch has the same calls. Documents that the index rejects
are listed in the file of --rejected.

SOURCE is the URL of a bucket, or a lake, which `upper sync` keeps up to date: then no node is needed.

When the source loses changes in a failover, the target is brought to the state of the source. Without --once
it follows until Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from upper.cli.common import (
    add_credentials,
    add_storage_options,
    ask_password,
    is_lake,
    number,
    setting,
    url_of,
)
from upper.cli.following import add_following, add_metrics, progress_line, push_settings, run_until_stopped
from upper.cli.output import ExitCode, Output
from upper.cli.workers import add_workers, worker_settings
from upper.errors import InvalidArguments

if TYPE_CHECKING:
    from upper.apps.push.follow import PushTotals
    from upper.apps.push.rounds import PushRound
    from upper.apps.push.tasks import Destination
    from upper.pipeline.source import ChangeSource

EXAMPLES = """
upper push upr://127.0.0.1:11210 kafka://127.0.0.1:9092/shop --once --local
upper push upr://127.0.0.1:11210 kafka://10.0.0.9:9092/shop --setting security.protocol=SSL
upper push upr://127.0.0.1:11210 opensearch://127.0.0.1:9200 --index shop --once --local
upper push upr://127.0.0.1:11210 opensearchs://ann@10.0.0.9 --index shop --rejected rejected.jsonl
upper push ./lake opensearch://127.0.0.1:9200 --index shop
"""
SEARCH = ("opensearch", "opensearchs", "elasticsearch", "elasticsearchs")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "url",
        metavar="SOURCE",
        help="upr://[USER@]HOST[:PORT][,HOST...][/BUCKET], or a lake",
    )
    add_credentials(parser)
    add_storage_options(parser)
    parser.add_argument(
        "target", metavar="TARGET", help="kafka://HOST:PORT[,HOST...]/TOPIC or opensearch://HOST[:PORT]"
    )
    add_following(parser, "BUCKET, or lake:BUCKET")
    kafka = parser.add_argument_group("Kafka")
    kafka.add_argument(
        "--setting",
        action="append",
        type=setting,
        default=[],
        metavar="NAME=VALUE",
        help="a setting of Kafka's client, such as security.protocol=SSL; may be repeated",
    )
    kafka.add_argument(
        "--settings-file",
        type=Path,
        metavar="FILE",
        help="read such settings from the lines of FILE: the place for passwords",
    )
    kafka.add_argument(
        "--topic-replicas",
        type=number(1, 100),
        default=-1,
        metavar="N",
        help="replicas of a topic that is created (the default of the brokers)",
    )
    search = parser.add_argument_group("OpenSearch")
    search.add_argument("--index", metavar="INDEX", help="the index that gets the documents")
    search.add_argument(
        "--target-password-file",
        type=Path,
        metavar="FILE",
        help="read the password of the user of TARGET from the first line of FILE (UPPER_TARGET_PASSWORD)",
    )
    search.add_argument(
        "--rejected",
        type=Path,
        metavar="FILE",
        help="append a line of JSON to FILE for each document that the index rejects",
    )
    add_metrics(parser)
    add_workers(parser)


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.apps.push.follow import Follow
    from upper.apps.push.rounds import Push
    from upper.spark.workers import workers

    show = progress_line(out)
    with (
        _origin(args) as origin,
        _rejections(args.rejected) as write,
        workers("upper push", worker_settings(args)) as make,
    ):

        def report(totals: PushTotals, rounds: Sequence[PushRound]) -> None:
            write(rounds)
            show(totals, rounds)

        push = Push(origin.source, _target(args, origin), make(), new_history=args.new_history)
        following = Follow({"there": push}, push_settings(args), report=report)
        run_until_stopped(following, out, once=args.once)
    return ExitCode.OK


@dataclass(frozen=True)
class Origin:
    """What is pushed: the source, and what the target records about it."""

    source: ChangeSource
    bucket: str
    partitions: int
    name: str  # of the positions; a lake may have begun later than the bucket, so the two differ


@contextmanager
def _origin(args: Namespace) -> Iterator[Origin]:
    if is_lake(args.url):
        from upper.apps.lake.store import open_store
        from upper.apps.push.lake import LakeSource

        lake = LakeSource(open_store(args.url, dict(args.storage_option)), prefix=args.prefix)
        layout = lake.lake.layout
        yield Origin(lake, layout.bucket, layout.partitions, f"lake:{layout.bucket}")
        return
    from upper.pipeline.source import BucketSource, Filters

    source = BucketSource(url_of(args), filters=Filters(key_prefix=args.prefix or None), name="push")
    try:
        bucket = source.bucket.address.bucket
        yield Origin(source, bucket, source.bucket.partitions, bucket)
    finally:
        source.close()


def _target(args: Namespace, origin: Origin) -> Destination:
    name = args.name or origin.name
    if args.prefix:
        name += f":{args.prefix.decode(errors='backslashreplace')}"
    scheme = args.target.partition("://")[0]
    if scheme in SEARCH:
        from upper.apps.push.opensearch import IndexOptions, IndexTarget, check_index_name
        from upper.apps.push.search_engine import parse_opensearch

        options = IndexOptions(check_index_name(args.index), name, origin.partitions)
        return IndexTarget(parse_opensearch(args.target, lambda user: _password(args, user)), options)
    if scheme != "kafka":
        raise InvalidArguments(
            f"{args.target.rpartition('@')[2]} is not a target; write it as kafka://HOST:PORT/TOPIC or "
            "opensearch://HOST:PORT"
        )
    from upper.apps.push.kafka import kafka_target

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
        bucket=origin.bucket,
        partitions=origin.partitions,
        settings=settings,
        replicas=args.topic_replicas,
    )


def _password(args: Namespace, user: str) -> str:
    from upper.client.url import password_in

    if args.target_password_file is not None:
        return password_in(args.target_password_file)
    return ask_password(user, variable="UPPER_TARGET_PASSWORD", option="--target-password-file")


@contextmanager
def _rejections(file: Path | None) -> Iterator[Callable[[Sequence[PushRound]], None]]:
    """Writes rejected documents to the file; without one nothing is written."""
    with ExitStack() as stack:
        written = None
        if file is not None:
            try:
                written = stack.enter_context(open(file, "a", opener=_private))
            except OSError as error:
                raise InvalidArguments(
                    f"{file} cannot be written ({error.strerror}); give --rejected another path"
                ) from None

        def write(rounds: Sequence[PushRound]) -> None:
            if written is not None:
                for done in rounds:
                    written.writelines(json.dumps(asdict(each)) + "\n" for each in done.rejections)
                written.flush()

        yield write


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

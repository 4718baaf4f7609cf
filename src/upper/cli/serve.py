"""Start a node: key-value and change streams on one port, from a directory.

With --join it is a node of a cluster (`upper cluster`), and holds the copies that the cluster's map gives it.

It binds to loopback. Any other address needs --users and TLS, or --insecure. SIGTERM and Ctrl-C end it in
order: streams end with a reason, everything is committed. Statistics: `upper stats`; metrics: --metrics-port.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from upper.cli.durations import seconds, some_seconds, whole_seconds
from upper.cli.output import ExitCode, Output
from upper.cli.store_options import STORE_HELP, add_store_options, store_opener

if TYPE_CHECKING:
    from upper.server.settings import ServerSettings
    from upper.storage import StorageSettings

EXAMPLES = """
upper serve --data ./data
upper serve --data ./data --port 11211 --durability memory --memory 4G
upper serve --data ./data --host 10.0.0.7 --users users.json --tls-cert node.pem --tls-key node.key
upper serve --data ./n1 --name n1 --join ./agreement
upper serve --data ./n1 --name n1 --join etcd://10.0.0.1,10.0.0.2/orders --zone a --advertise 10.0.0.7:11210
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="directory of the bucket; created if missing"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=11210, help="port, 0 for a free one (%(default)s)")
    parser.add_argument("--bucket", metavar="NAME", help="name of a new bucket (default)")
    parser.add_argument(
        "--partitions", type=int, metavar="N", help="partitions of a new bucket, a power of two (1024)"
    )
    parser.add_argument("--restored", action="store_true",
                        help="the directory is a restored backup: begin new history branches")  # fmt: skip
    parser.add_argument("--durability", choices=("disk", "memory"), default="disk",
                        help="when a write is answered: once on disk, or at once (%(default)s)")  # fmt: skip
    parser.add_argument("--memory", metavar="SIZE", help="memory for items, such as 512M or 4G")
    parser.add_argument("--plain-clients", choices=("route", "partition-0"), default="route",
                        help="partition of keys of memcached clients (%(default)s)")  # fmt: skip
    parser.add_argument("--purge-age", type=seconds, default=3 * 86400.0, metavar="TIME",
                        help="how long deletions are kept, such as 12h or 3d (3d)")  # fmt: skip
    parser.add_argument("--max-lock", type=whole_seconds(2**32 - 1), default=30, metavar="TIME",
                        help="longest lock of get-and-lock (30s)")  # fmt: skip
    parser.add_argument(
        "--users", type=Path, metavar="FILE", help="users and roles; created by `upper users`"
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate, PEM")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM")
    parser.add_argument("--insecure", action="store_true", help="allow other addresses without users or TLS")
    parser.add_argument(
        "--metrics-port", type=int, metavar="PORT", help="Prometheus metrics over HTTP, on loopback"
    )
    parser.add_argument(
        "--rest-port", type=int, metavar="PORT", help="the map for clients of Couchbase that need REST"
    )
    parser.add_argument(
        "--connections",
        type=int,
        default=10_000,
        metavar="N",
        help="maximum number of connections (%(default)s)",
    )
    parser.add_argument("--idle", type=seconds, default=3600.0, metavar="TIME",
                        help="close idle connections after this, 0 for never (1h)")  # fmt: skip
    joining = parser.add_argument_group("a node of a cluster")
    joining.add_argument("--join", metavar="STORE", help=STORE_HELP)
    joining.add_argument("--name", metavar="NAME", help="its name in the cluster (the name of the machine)")
    joining.add_argument(
        "--zone",
        default="",
        metavar="ZONE",
        help="copies of a partition lie in different zones where possible",
    )
    joining.add_argument("--advertise", metavar="HOST:PORT", help="where others reach it (where it listens)")
    joining.add_argument(
        "--cluster-secret",
        type=Path,
        metavar="FILE",
        help="the password with which nodes log in to each other; the same file on each",
    )
    joining.add_argument(
        "--cluster-ca", type=Path, metavar="FILE", help="certificates that sign those of the other nodes, PEM"
    )
    joining.add_argument(
        "--lease",
        type=some_seconds,
        default=3.0,
        metavar="TIME",
        help="how long it counts as alive without a renewal (3s)",
    )
    joining.add_argument(
        "--restore-after",
        type=seconds,
        default=300.0,
        metavar="TIME",
        help="how long another node is away before its copies are made elsewhere (5m)",
    )
    add_store_options(joining)


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.server.main import serve
    from upper.server.settings import BadSettings, Limits, PlainClients, ServerSettings, Tls
    from upper.storage import Durability, StorageSettings

    if (args.tls_cert is None) != (args.tls_key is None):
        raise BadSettings("--tls-cert and --tls-key belong together; give both")
    settings = ServerSettings(
        host=args.host,
        port=args.port,
        metrics_port=args.metrics_port,
        rest_port=args.rest_port,
        users=args.users,
        tls=None if args.tls_cert is None else Tls(certificate=args.tls_cert, key=args.tls_key),
        insecure=args.insecure,
        cluster_secret=args.cluster_secret,
        plain_clients=PlainClients(args.plain_clients),
        limits=Limits(connections=args.connections, idle=args.idle, lock=args.max_lock),
    )
    storage = StorageSettings(
        durability=Durability(args.durability),
        purge_age=args.purge_age,
        memory_quota=None if args.memory is None else size(args.memory),
    )
    with ExitStack() as opening:

        def ready(at: object) -> None:
            opening.close()
            out.show(at, text=str(at))

        opening.enter_context(out.progress("opening the bucket"))
        if args.join is not None:
            _join(args, out, settings, storage, ready)
            return ExitCode.OK
        serve(
            settings, storage, data=args.data, name=args.bucket, partitions=args.partitions,
            restored=args.restored, ready=ready,
        )  # fmt: skip
    return ExitCode.OK


def _join(
    args: Namespace,
    out: Output,
    settings: ServerSettings,
    storage: StorageSettings,
    ready: Callable[[object], None],
) -> None:
    from upper.cluster.controller import ControllerSettings
    from upper.cluster.identity import JoinSettings
    from upper.cluster.lease import LeaseSettings
    from upper.cluster.serving import serve_member
    from upper.server.settings import BadSettings

    for option in ("bucket", "partitions", "restored"):
        if getattr(args, option):
            raise BadSettings(f"--{option} is decided by the cluster; leave it out with --join")
    if args.lease < 1:
        raise BadSettings(f"--lease is at least 1 second, not {args.lease:g}")
    serve_member(
        settings,
        storage,
        JoinSettings(name=args.name, zone=args.zone, advertise=args.advertise, authority=args.cluster_ca),
        store_opener(args, args.join, create=True),
        data=args.data,
        lease=LeaseSettings(lease=args.lease),
        control=ControllerSettings(restore_after=args.restore_after),
        ready=ready,
        waiting=out.note,
    )


UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def size(text: str) -> int:
    """`512M` in bytes."""
    from upper.server.settings import BadSettings

    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in UNITS else ""
    try:
        found = int(float(number.removesuffix(unit)) * UNITS[unit])
    except (ValueError, OverflowError):
        found = -1
    if found < 0:
        raise BadSettings(f"{text!r} is not a size; write it like 512M or 4G")
    return found

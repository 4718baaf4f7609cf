"""Start a node: key-value and change streams on one port, from a directory.

It binds to loopback. Any other address needs --users and TLS, or --insecure. SIGTERM and Ctrl-C end it in
order: streams end with a reason, everything is committed. Statistics: `upper stats`; metrics: --metrics-port.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from pathlib import Path

from upper.cli.output import ExitCode, Output

EXAMPLES = """
upper serve --data ./data
upper serve --data ./data --port 11211 --durability memory --memory 4G
upper serve --data ./data --host 10.0.0.7 --users users.json --tls-cert node.pem --tls-key node.key
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="where the bucket is, or will be"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=11210, help="port, 0 for a free one (%(default)s)")
    parser.add_argument("--bucket", metavar="NAME", help="of a new bucket: its name (default)")
    parser.add_argument("--partitions", type=int, metavar="N", help="of a new bucket: a power of two (1024)")
    parser.add_argument("--durability", choices=("disk", "memory"), default="disk",
                        help="when a write is answered: once on disk, or at once (%(default)s)")  # fmt: skip
    parser.add_argument(
        "--memory", metavar="SIZE", help="bytes that items may take in memory, such as 512M or 4G"
    )
    parser.add_argument("--users", type=Path, metavar="FILE", help="who may come in; made with `upper users`")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate, PEM")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM")
    parser.add_argument("--insecure", action="store_true", help="allow other addresses without users or TLS")
    parser.add_argument(
        "--metrics-port", type=int, metavar="PORT", help="Prometheus metrics over HTTP, on loopback"
    )
    parser.add_argument(
        "--connections", type=int, default=10_000, metavar="N", help="at most so many (%(default)s)"
    )
    parser.add_argument("--idle", type=float, default=3600, metavar="SECONDS",
                        help="close connections that say nothing, 0 for never (%(default)s)")  # fmt: skip


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.server.main import serve
    from upper.server.settings import BadSettings, Limits, ServerSettings, Tls
    from upper.storage import Durability, StorageSettings

    if (args.tls_cert is None) != (args.tls_key is None):
        raise BadSettings("--tls-cert and --tls-key belong together; give both")
    settings = ServerSettings(
        host=args.host,
        port=args.port,
        metrics_port=args.metrics_port,
        users=args.users,
        tls=None if args.tls_cert is None else Tls(certificate=args.tls_cert, key=args.tls_key),
        insecure=args.insecure,
        limits=Limits(connections=args.connections, idle=args.idle),
    )
    storage = StorageSettings(
        durability=Durability(args.durability),
        memory_quota=None if args.memory is None else size(args.memory),
    )
    with ExitStack() as opening:

        def ready(at: object) -> None:
            opening.close()
            out.show(at, text=str(at))

        opening.enter_context(out.progress("opening the bucket"))
        serve(settings, storage, data=args.data, name=args.bucket, partitions=args.partitions, ready=ready)
    return ExitCode.OK


UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def size(text: str) -> int:
    """`512M` in bytes."""
    from upper.server.settings import BadSettings

    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in UNITS else ""
    try:
        return int(float(number.removesuffix(unit)) * UNITS[unit])
    except (ValueError, OverflowError):
        raise BadSettings(f"{text!r} is not a size; write it like 512M or 4G") from None

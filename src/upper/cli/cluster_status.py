"""`upper cluster status`: the cluster as its agreement store or one of its nodes describes it."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from upper.cli.common import URL
from upper.cli.output import ExitCode, Output
from upper.cli.store_options import store_opener

if TYPE_CHECKING:
    from upper.client.sockets import ConnectOptions
    from upper.cluster.members import ClusterState

ASK = 2.0  # seconds that nodes have to report about their copies
COLUMNS = ("name", "address", "alive", "active", "replica", "zone", "lease_age")


def status(args: Namespace, out: Output) -> ExitCode:
    from upper.cluster.status import summary

    read, access = _source(args)
    while True:
        document = _document(read(), access)
        if out.as_json:
            out.show(document)
        else:
            rows = [{name: _shown(node[name]) for name in COLUMNS} for node in document["nodes"]]
            if args.watch and out.on_screen:
                out.raw(b"\x1b[2J\x1b[H")
            out.show(rows, empty="no node has joined")
            for line in summary(document):
                out.say(line)
        if not args.watch:
            gone = any(not one["available"] for one in document["partitions"])
            return ExitCode.DIFFERENT if gone else ExitCode.OK
        time.sleep(1.0)


def _shown(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "" if value is None else value


def _source(args: Namespace) -> tuple[Callable[[], ClusterState], ConnectOptions]:
    """How to read the state, and how to connect to nodes."""
    from upper.cluster.members import read_state

    if URL.match(args.store):
        access = access_of(args, "")
        return lambda: _state_of_a_node(access), access
    store = store_opener(args, args.store)()
    return lambda: read_state(store), access_of(args, "default")


def access_of(args: Namespace, bucket: str) -> ConnectOptions:
    """How this command connects to nodes: by the URL, or by the addresses in the agreement store."""
    from upper.cli.common import url_of
    from upper.client.sockets import ConnectOptions, tls_context
    from upper.client.url import address_of

    url = args.store if URL.match(args.store) else f"upr://127.0.0.1/{bucket}"
    address = address_of(url_of(Namespace(url=url, user=args.user, password_file=args.password_file)))
    return ConnectOptions(address, tls_context(address, None), "upper cluster")


def _state_of_a_node(access: ConnectOptions) -> ClusterState:
    from upper.cluster.members import state_from_json
    from upper.cluster.reports import statistics
    from upper.errors import ClusterError, Unreachable

    problem: Unreachable | None = None
    for node in access.address.nodes:
        try:
            rows = statistics(node, access, "cluster-state", deadline=time.monotonic() + 10)
        except Unreachable as error:
            problem = error
            continue
        if "state" not in rows:
            raise ClusterError(
                f"{node} is not part of a cluster; start it with `upper serve --join` if it should be"
            )
        return state_from_json(rows["state"])
    raise problem or Unreachable("the URL names no node that answers")


def _document(state: ClusterState, access: ConnectOptions) -> dict[str, Any]:
    from upper.cluster.reports import ask_nodes
    from upper.cluster.status import described

    asked = {node: state.members[node].address for node in state.alive if node in state.members}
    reports = ask_nodes(asked, access, seconds=ASK) if state.bucket_map is not None else {}
    return described(state, reports)

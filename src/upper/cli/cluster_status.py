"""`upper cluster status`: the cluster as its agreement store or one of its nodes describes it."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from upper.cli.common import URL
from upper.cli.output import ExitCode, Output
from upper.cli.store_options import store_opener

if TYPE_CHECKING:
    from upper.client.sockets import ConnectOptions
    from upper.cluster.members import ClusterState
    from upper.cluster.reports import NodeReports

ASK = 2.0  # seconds that nodes have to report about their copies
COLUMNS = ("name", "address", "alive", "active", "replica", "zone", "lease_age")


def status(args: Namespace, out: Output) -> ExitCode:
    from upper.cluster.status import summary

    read = _source(args)
    while True:
        document = _document(args, read())
        if out.as_json:
            out.show(document)
        else:
            rows = [{name: _shown(node[name]) for name in COLUMNS} for node in document["nodes"]]
            if args.watch and out.on_screen:
                out.raw(b"\x1b[2J\x1b[H")
            out.show(rows, empty="no node has joined")
            for line in summary(document):
                out.print_line(line)
        if not args.watch:
            gone = any(not one["available"] for one in document["partitions"])
            return ExitCode.DIFFERENT if gone else ExitCode.OK
        time.sleep(1.0)


def _shown(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "" if value is None else value


def _source(args: Namespace) -> Callable[[], ClusterState]:
    """How to read the state."""
    from upper.cluster.members import read_state

    if URL.match(args.store):
        access = access_of(args)
        return lambda: _state_of_a_node(access)
    store = store_opener(args, args.store)()
    return lambda: read_state(store)


def reports_of(args: Namespace, state: ClusterState, *, seconds: float) -> NodeReports:
    """What the live nodes report about their copies."""
    from upper.cluster.reports import NodeReports, ask_nodes

    if state.bucket_map is None:
        return NodeReports()
    live = {node: state.members[node] for node in state.alive if node in state.members}
    access = access_of(args, state.bucket_map.settings.name, tls=any(one.tls for one in live.values()))
    return ask_nodes({node: one.address for node, one in live.items()}, access, seconds=seconds)


def access_of(args: Namespace, bucket: str = "", *, tls: bool = False) -> ConnectOptions:
    """How this command connects to nodes: by the URL, or by what the agreement store has about them."""
    from upper.cli.common import url_of
    from upper.client.sockets import ConnectOptions, tls_context
    from upper.client.url import address_of

    url = args.store if URL.match(args.store) else f"upr{'s' * tls}://127.0.0.1/{bucket}"
    address = address_of(url_of(Namespace(url=url, user=args.user, password_file=args.password_file)))
    if args.cluster_ca is not None:
        address = replace(address, settings={**address.settings, "ca": str(args.cluster_ca)})
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


def _document(args: Namespace, state: ClusterState) -> dict[str, Any]:
    from upper.cluster.status import described

    return described(state, reports_of(args, state, seconds=ASK))

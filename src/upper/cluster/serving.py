"""A node of a cluster, from its settings to its end.

The order keeps other nodes safe from a node that is not ready: it opens its bucket, claims its copies, and
only then counts as alive. Where no bucket exists yet it counts as alive at once, so that one can be placed on
it. When it stops it first refuses requests, then ends its lease, then closes the bucket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Set
from contextlib import suppress
from functools import partial
from pathlib import Path

from upper.client.sockets import ConnectOptions, tls_context
from upper.client.url import Address
from upper.cluster.agreement import AgreementStore
from upper.cluster.bucket_map import BucketMap, NodeId
from upper.cluster.controller import Controller, ControllerSettings, ProgressOf
from upper.cluster.coordinator import Coordinator
from upper.cluster.copies import NodeCopies
from upper.cluster.identity import JoinSettings, NodeIdentity, check_security
from upper.cluster.lease import LeaseSettings
from upper.cluster.members import ClusterState, MemberRecord
from upper.cluster.node_actions import NodeActions
from upper.cluster.replica_link import ReplicaLinks
from upper.cluster.reports import ask_nodes
from upper.cluster.shown_map import ShownMap
from upper.errors import AuthenticationFailed, ClusterError, NotAllowed
from upper.model.values import State
from upper.server.auth import CLUSTER_USER, read_secret
from upper.server.listen import Endpoints, port_of
from upper.server.main import Ready, described, prepare, run, stop, stop_signals
from upper.server.node import Node
from upper.server.settings import ServerSettings
from upper.storage import BucketStore, StorageSettings

LOGIN = 1.0  # seconds that nodes have to accept the login of one that joins
ASK = 0.3  # seconds that nodes have to report their progress before a failover


class Stopped(Exception):
    """A signal ended the node while it waited."""


def serve_member(
    settings: ServerSettings,
    storage: StorageSettings,
    join: JoinSettings,
    open_store: Callable[[], AgreementStore],
    *,
    data: Path,
    lease: LeaseSettings,
    control: ControllerSettings,
    ready: Callable[[Ready], None],
    waiting: Callable[[str], None],
) -> None:
    """Serve as a node of a cluster until a signal. `waiting` gets a sentence while there is no bucket."""
    check_security(settings)
    settings, endpoints = prepare(settings, data)
    try:
        identity = NodeIdentity(data)
        rest = None if endpoints.rest is None else port_of(endpoints.rest)
        member = identity.member(join, settings, port_of(endpoints.main), rest)
    except BaseException:
        endpoints.close()
        raise

    async def main() -> None:
        stopping = stop_signals()
        coordinator = Coordinator(member, open_store, asyncio.get_running_loop(), lease)
        node = ClusterNode(settings, storage, join, coordinator, endpoints, data, control)
        try:
            with suppress(Stopped):
                await _unless(stopping, coordinator.join(partial(_check_login, settings, join, member)))
                if coordinator.state.bucket_map is None:
                    coordinator.keep_lease()
                    waiting(
                        f"{member.name} has joined and waits for a bucket; "
                        "create one with `upper cluster create`"
                    )
                    await _unless(stopping, coordinator.bucket_exists())
                await node.start()
                await _unless(stopping, coordinator.claimed())
                coordinator.keep_lease()
                await _unless(stopping, coordinator.serves())
                ready(described(node.node, data))
                await _unless(stopping, coordinator.fails())
        finally:
            await coordinator.stop()
            await node.stop()
            identity.release()

    run(main())


async def _unless(stopping: asyncio.Event, awaited: Awaitable[None]) -> None:
    """Wait for something; raise `Stopped` if a signal comes first."""
    signalled, wanted = asyncio.ensure_future(stopping.wait()), asyncio.ensure_future(awaited)
    await asyncio.wait({signalled, wanted}, return_when=asyncio.FIRST_COMPLETED)
    if wanted.done():
        signalled.cancel()
        wanted.result()
        return
    wanted.cancel()
    raise Stopped


class ClusterNode:
    """A node and its part in the cluster."""

    node: Node

    def __init__(
        self,
        settings: ServerSettings,
        storage: StorageSettings,
        join: JoinSettings,
        coordinator: Coordinator,
        endpoints: Endpoints,
        data: Path,
        control: ControllerSettings,
    ) -> None:
        self._settings, self._storage, self._join = settings, storage, join
        self._coordinator, self._endpoints, self._data = coordinator, endpoints, data
        self._control = control
        self._links: ReplicaLinks | None = None

    async def start(self) -> None:
        """Open the bucket of the cluster, listen, and follow the map."""
        bucket_map = self._coordinator.state.bucket_map
        assert bucket_map is not None
        bucket = BucketStore.open(
            self._data,
            self._storage,
            name=bucket_map.settings.name,
            partitions=bucket_map.settings.partitions,
            state=State.DEAD,
            uuid=bucket_map.uuid,
        )
        loop, member = asyncio.get_running_loop(), self._coordinator.member
        try:
            tls = self._settings.tls is not None
            shown = ShownMap(self._coordinator, lambda: copies.progress(), tls=tls)
            node = Node(bucket, self._settings, loop, self._endpoints, shown)
            access = peer_access(self._settings, self._join, bucket.name, member.name)
            links = ReplicaLinks(node, member.id, access)
            actions = NodeActions(node, links)
            held = [store.id for store in bucket.partitions if store.state is not State.DEAD]
            damaged = held if bucket.opening.branched else []
            copies = NodeCopies(member.id, actions, held=held, damaged=damaged)
            links.may_roll_back = copies.may_roll_back

            def followed() -> BucketMap | None:
                return None if copies.view is None else copies.view.bucket_map

            actions.begin(copies.active, followed)
            assert node.replication is not None
            node.replication.pace.rate = self._copy_rate
            await node.start()
        except BaseException:
            bucket.close()
            raise
        self.node, self._links = node, links

        def controller(store: AgreementStore) -> Controller:
            def ask(state: ClusterState, nodes: Set[NodeId]) -> ProgressOf:
                asked = {each: state.members[each].address for each in nodes if each in state.members}
                return ask_nodes(asked, access, seconds=ASK).progress

            return Controller(member.id, store, ask, time.monotonic, self._control)

        self._coordinator.drive(copies, controller, actions.lease)

    def _copy_rate(self) -> int | None:
        running = self._coordinator.state.rebalance
        return None if running is None else running.rate

    async def stop(self) -> None:
        if self._links is None:
            self._endpoints.close()
            return
        self._links.close()
        await stop(self.node)


def _check_login(
    settings: ServerSettings, join: JoinSettings, member: MemberRecord, state: ClusterState
) -> None:
    """Refuse to join where a live node rejects the login of this one, and none accepts it.

    It would hold copies that never get in sync, and a rebalance would wait for them. Nodes accept logins once
    there is a bucket.
    """
    if state.bucket_map is None:
        return
    others = {
        node: state.members[node] for node in state.alive if node in state.members and node != member.id
    }
    access = peer_access(settings, join, state.bucket_map.settings.name, member.name)
    asked = ask_nodes({node: other.address for node, other in others.items()}, access, seconds=LOGIN)
    for node, error in asked.failures.items():
        if isinstance(error, AuthenticationFailed | NotAllowed) and not asked.by_node:
            raise ClusterError(
                f"{others[node].name} at {others[node].address} rejects the login of this node; "
                "start it with the --users and --cluster-secret of the other nodes"
            )


def peer_access(settings: ServerSettings, join: JoinSettings, bucket: str, name: str) -> ConnectOptions:
    """How this node logs in to the other nodes of its cluster."""
    secret = settings.cluster_secret
    options = {"tls": "off" if settings.tls is None else "on"}
    if join.authority is not None:
        options["ca"] = str(join.authority)
    address = Address(
        "upr",
        (),
        bucket,
        user=None if secret is None else CLUSTER_USER,
        password=None if secret is None else partial(read_secret, secret),
        settings=options,
    )
    return ConnectOptions(address, tls_context(address, None), f"node {name}")

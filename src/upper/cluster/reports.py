"""Reports of live nodes about their copies, requested over the protocol, within a bounded time.

The copies of a node that does not answer in time count as having no progress.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from upper.client.calls import Exchange, Packets
from upper.client.refusals import refusal
from upper.client.sockets import ConnectionPool, ConnectOptions
from upper.client.url import NodeAddress, parse_node
from upper.cluster.bucket_map import Epoch, NodeId
from upper.cluster.failover import Progress
from upper.errors import RemoteProtocolError, UpperError
from upper.model.values import Partition, Seqno
from upper.wire.codes import Opcode, Status
from upper.wire.packet import REQUEST, pack

AT_ONCE = 32  # nodes that are asked at the same time


@dataclass(frozen=True)
class NodeReport:
    """What one node reports about itself."""

    copies: Mapping[Partition, Progress]
    lease_age: float  # seconds since the last renewal of its lease was sent


@dataclass(frozen=True)
class NodeReports:
    """The reports of nodes, and why each of the others sent none."""

    by_node: Mapping[NodeId, NodeReport] = field(default_factory=dict)
    failures: Mapping[NodeId, UpperError] = field(default_factory=dict)

    @property
    def progress(self) -> dict[tuple[Partition, NodeId], Progress]:
        """How far each copy is that a node reported."""
        return {
            (partition, node): at
            for node, report in self.by_node.items()
            for partition, at in report.copies.items()
        }


def ask_nodes(addresses: Mapping[NodeId, str], access: ConnectOptions, *, seconds: float) -> NodeReports:
    """The report of every node that answers within `seconds`."""
    if not addresses:
        return NodeReports()
    deadline = time.monotonic() + seconds
    with ThreadPoolExecutor(min(AT_ONCE, len(addresses))) as threads:
        asked = {
            node: threads.submit(_ask, parse_node(address), access, deadline)
            for node, address in addresses.items()
        }
    found = {node: future.result() for node, future in asked.items()}
    return NodeReports(
        {node: one for node, one in found.items() if isinstance(one, NodeReport)},
        {node: one for node, one in found.items() if isinstance(one, UpperError)},
    )


def _ask(node: NodeAddress, access: ConnectOptions, deadline: float) -> NodeReport | UpperError:
    try:
        rows = statistics(node, access, "cluster-copies", deadline=deadline)
        copies = {
            Partition(int(number)): (Epoch(epoch), Seqno(seqno))
            for number, (epoch, seqno) in json.loads(rows["copies"]).items()
        }
        return NodeReport(copies, float(rows["lease_age"]))
    except UpperError as error:
        return error
    except (KeyError, ValueError, TypeError):
        return RemoteProtocolError(f"{node} sent a report that this version does not understand; upgrade it")


def statistics(node: NodeAddress, access: ConnectOptions, group: str, *, deadline: float) -> dict[str, str]:
    """A STAT group of one node. `deadline` is of the monotonic clock."""
    pool = ConnectionPool(access)
    try:
        packet = pack(REQUEST, Opcode.STAT, key=group.encode())
        replies = pool.exchange(Exchange({node: Packets(packet)}), deadline)
    finally:
        pool.close()
    if node in replies.failures:
        raise replies.failures[node]
    lines = replies.answers[node]
    if lines[-1].status in (Status.KEY_NOT_FOUND, Status.UNKNOWN_COMMAND):
        raise RemoteProtocolError(f"{node} has no statistics {group!r}; upgrade it")
    if lines[-1].status:
        raise refusal(lines[-1])
    return {line.key.decode(): line.value.decode() for line in lines if not line.final}

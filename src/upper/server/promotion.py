"""Promotion, rollback and deletion of a partition, as an administrator or a failover drill requests them.

A promotion without a step back is a batch of the journal like any other. One with a step back, and a
deletion, replace the partition's file; that runs beside the loop, and only this partition takes no changes
meanwhile. Its streams end in the turn in which its history is exchanged. Each function returns once the
outcome is durable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from upper.history.partition_state import Ownership
from upper.model.values import ZERO, BranchId, Seqno

if TYPE_CHECKING:
    from upper.server.node import Node
    from upper.storage import PartitionStore

log = logging.getLogger(__name__)


async def plan(node: Node, store: PartitionStore, to: Seqno | None) -> Seqno:
    """The seqno at which a promotion would begin the branch; nothing is changed."""
    if to is None or to >= store.complete:
        return store.complete
    return await node.bucket.rollbacks.plan(store, to)


async def promote(node: Node, store: PartitionStore, to: Seqno | None, *, branch: BranchId) -> Seqno:
    """Begin a branch at the last seqno, or first go back; returns the last seqno after that."""
    store.open_to_changes()
    if to is not None and to < store.high:
        await _rewrite(node, store, to, Ownership.ACTIVE, branch)
    else:
        node.exchange(store, lambda: store.promote(branch))
        await node.bucket.saved()
    log.warning("partition %d: promoted by hand at %d", store.id, store.high)
    return Seqno(store.high)


async def delete(node: Node, store: PartitionStore, *, branch: BranchId) -> None:
    """Delete the data of a dead copy. It stays dead, and later data belongs to another history."""
    await _rewrite(node, store, ZERO, Ownership.DEAD, branch)
    log.warning("partition %d: its data was deleted", store.id)


async def _rewrite(
    node: Node, store: PartitionStore, to: Seqno, ownership: Ownership, branch: BranchId
) -> None:
    def exchange(swap: Callable[[], None]) -> None:
        node.exchange(store, swap)

    await node.bucket.rollbacks.start(store, to, ownership=ownership, branch=branch, exchange=exchange)

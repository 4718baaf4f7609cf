"""How far the replicas of active copies are, in plain Python: what every batch and acknowledgement touches.

An active node writes a batch with hundreds of partitions, and each replica acknowledges each of them. These
loops do the ordinary part of that for all partitions at once; the decisions about in-sync sets are elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from upper.kernel.packets import Buffer
from upper.kernel.plain_run import Table
from upper.record.layout import ACKNOWLEDGED


class CopyProgress:
    """What the kernel keeps of an active copy: seqnos on disks, and the replicas that are waited for."""

    __slots__ = ("_held", "_silent_since", "durable", "epoch", "replicated", "waited_for")

    def __init__(self) -> None:
        self.durable: Any = 0  # last seqno on the local disk
        self.replicated: Any = 0  # last seqno on the disks of all replicas that are waited for
        self.epoch: Any = 0
        self.waited_for: frozenset[Any] = frozenset()
        self._held: dict[Any, Any] = {}
        self._silent_since: dict[Any, float] = {}

    def held_by(self, node: Any) -> Any:
        """The last seqno on the disk of a replica, as far as it has acknowledged; -1: not at all."""
        return self._held.get(node, -1)

    def hold(self, node: Any, seqno: int) -> None:
        """A replica has everything up to `seqno` on its disk."""
        self._held[node] = seqno

    def silent_since(self, node: Any) -> float | None:
        """Since when a replica is behind without progress; None: it is not, or that is not known yet."""
        return self._silent_since.get(node)

    def set_silent(self, node: Any, since: float | None) -> None:
        if since is None:
            self._silent_since.pop(node, None)
        else:
            self._silent_since[node] = since

    def forget(self, held: bool, silent: bool) -> None:
        """Forget what replicas have acknowledged, or since when they are silent."""
        if held:
            self._held.clear()
        if silent:
            self._silent_since.clear()

    def tracked(self) -> list[Any]:
        """The nodes that have acknowledged anything, or are silent."""
        return list(self._held | self._silent_since)


def wrote(
    reached: Iterable[tuple[Table, int]], copies: Mapping[Any, Any], now: float
) -> list[tuple[Table, int]]:
    """Partitions have reached these seqnos on the local disk; those of them that are active copies here."""
    found = []
    for entry in reached:
        table, high = entry
        copy = copies.get(table.id)
        if copy is None:
            continue
        found.append(entry)
        if high > copy.durable:
            copy.durable = high
            if not copy.waited_for:
                copy.replicated = high
        for node in copy.waited_for:
            if copy.silent_since(node) is None:
                copy.set_silent(node, now)
    return found


def covered(held: list[tuple[Table, int]], copies: Mapping[Any, Any]) -> bool:
    """Whether all of these partitions are active copies, with watermarks at or above these seqnos."""
    for table, seqno in held:
        copy = copies.get(table.id)
        if copy is None or (copy.replicated < seqno and copy.watermark < seqno):
            return False
    return True


def acknowledge(
    pairs: Buffer, copies: Mapping[Any, Any], node: Any, epochs: Mapping[int, Any], now: float
) -> list[tuple[int, int]]:
    """A replica has these seqnos on its disk. Returns the pairs that are not an ordinary acknowledgement:

    those of partitions that are not active here, of another epoch, and of a replica that is not waited for.
    """
    left = []
    if len(pairs) % ACKNOWLEDGED.size:
        raise ValueError(f"{len(pairs)} bytes are not pairs of {ACKNOWLEDGED.size}")
    for partition, seqno in ACKNOWLEDGED.iter_unpack(pairs):
        copy = copies.get(partition)
        if copy is None or epochs.get(partition) != copy.epoch or node not in copy.waited_for:
            left.append((partition, seqno))
            continue
        has = copy.held_by(node)
        if seqno > has:
            has = min(seqno, copy.durable)
            copy.hold(node, has)
            reached = min(max(copy.held_by(each), 0) for each in copy.waited_for)
            if reached > copy.replicated:
                copy.replicated = reached
        copy.set_silent(node, now if has < copy.durable else None)
    return left

"""Listing keys with a stream: every key of a partition once, as of the moment at which its stream opened.

The stream is keys-only, filtered by prefix, and ends at the high seqno of its opening. A partition's keys
are held until it is complete, because a later snapshot may delete one; so partitions are read in groups. A
rollback returns to seqno 0: the lost changes may have replaced older versions of keys that would not be
sent again.
"""

from __future__ import annotations

from collections.abc import Iterator

from upper.client.calls import Text
from upper.client.events import Deletion, Event, Expiration, Flush, Mutation, Rollback
from upper.client.plan import ChangesOptions
from upper.model.values import Partition
from upper.wire.session import DIALECTS
from upper.wire.upr import UPR

PARTITIONS = 64  # that are read together


def groups(partitions: int) -> Iterator[range]:
    for first in range(0, partitions, PARTITIONS):
        yield range(first, min(first + PARTITIONS, partitions))


def scan_dialect(name: str) -> str:
    """The dialect that lists keys: that of the URL, unless it lacks filters and flags."""
    dialect = DIALECTS[name]
    return name if dialect.settings and dialect.stream_flags else UPR.name


class KeyScan:
    """The keys of some partitions."""

    def __init__(self, partitions: range, prefix: Text) -> None:
        self.options: ChangesOptions = {
            "until": "now",
            "partitions": partitions,
            "keys_only": True,
            "key_prefix": prefix or None,
            "on_rollback": self._roll_back,
        }
        self._expirations: dict[Partition, dict[bytes, int]] = {Partition(p): {} for p in partitions}

    def take(self, event: Event) -> None:
        found = self._expirations[event.partition]
        match event:
            case Mutation():
                found[event.key] = event.expiration
            case Deletion() | Expiration():
                found.pop(event.key, None)
            case Flush():
                found.clear()
            case _:
                pass

    def _roll_back(self, event: Rollback) -> int:
        self._expirations[event.partition].clear()
        return 0

    def keys(self, now: float) -> Iterator[bytes]:
        """Those that have not expired."""
        for found in self._expirations.values():
            yield from (key for key, expiration in found.items() if not expiration or expiration > now)

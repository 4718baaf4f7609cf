"""The lease of a node: granted, attached to the key that shows that its process is alive, and renewed.

A renewal counts from when it was sent: the store ends the lease at the earliest that much later. A lease that
has ended is replaced by another one. When the node stops, or was removed from the cluster, the lease is ended
at once, so that other nodes need not wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from upper.cluster.agreement import ABSENT, AgreementStore, LeaseId, Unavailable
from upper.cluster.bucket_map import NodeId
from upper.cluster.members import ALIVE
from upper.errors import ClusterError

log = logging.getLogger("upper.cluster")

RETRY = 0.1  # seconds before another attempt


@dataclass(frozen=True, kw_only=True)
class LeaseSettings:
    """Times in seconds."""

    lease: float = 3.0
    margin: float = 0.5  # of the lease that is not used, for clocks that differ

    def __post_init__(self) -> None:
        if not 0 < self.margin < self.lease:
            raise ValueError(f"a lease of {self.lease} s leaves no time to serve; use at least 1 s")


class LeaseKeeper:
    """Keeps the lease of one node, in a thread of its own; the functions it is given are called there."""

    def __init__(
        self,
        node: NodeId,
        process: str,
        settings: LeaseSettings,
        *,
        renewed: Callable[[float, LeaseId], None],  # when the renewal was sent
        trouble: Callable[[str], None],
    ) -> None:
        self._key, self._process, self._settings = ALIVE + node, process, settings
        self._renewed, self._trouble = renewed, trouble
        self._ending = threading.Event()

    def end(self) -> None:
        """End the lease, and the thread with it."""
        self._ending.set()

    def run(self, store: AgreementStore) -> None:
        lease: LeaseId | None = None
        while not self._ending.is_set():
            sent = time.monotonic()
            try:
                if lease is None:
                    lease = self._begin(store)
                elif not store.renew(lease):
                    lease = None
                    continue
            except Unavailable as error:
                self._trouble(str(error))
                self._ending.wait(RETRY)
                continue
            except ClusterError:  # the lease ended between its grant and its use
                continue
            self._renewed(sent, lease)
            self._ending.wait(max(0.0, self._settings.lease / 3 - (time.monotonic() - sent)))
        if lease is not None:
            try:
                store.revoke(lease)
            except ClusterError:
                log.info("the lease could not be revoked; it ends by itself")

    def _begin(self, store: AgreementStore) -> LeaseId:
        """A new lease, with the key that shows that this process is alive attached to it."""
        lease = store.grant(self._settings.lease)
        while True:
            found, _ = store.read(self._key)
            revision = found[self._key].revision if self._key in found else ABSENT
            if store.put_if(self._key, self._process.encode(), revision=revision, lease=lease) is not None:
                return lease

"""Agreement between nodes: a small store with compare-and-swap, leases and notification.

Two implementations pass the same tests: `etcd` for several machines, `embedded` (one SQLite file) for
several nodes on one machine. All calls block; a node calls them from threads.

A call that raises `Unavailable` may or may not have taken effect. Callers read again before they conclude
anything; `cluster.in_sync` states what that means for proposals.
"""

from __future__ import annotations

from typing import NamedTuple, NewType, Protocol

from upper.errors import ClusterError

LeaseId = NewType("LeaseId", int)
ABSENT = 0  # the revision of a key that does not exist


class Unavailable(ClusterError):
    """The agreement store did not answer in time. The outcome of the call is unknown."""


class Versioned(NamedTuple):
    """A value, and the revision of the store at which it was last written."""

    value: bytes
    revision: int


class AgreementStore(Protocol):
    """The interface of a store. Revisions grow with every change of the store."""

    def read(self, prefix: str) -> tuple[dict[str, Versioned], int]:
        """Every key that begins with `prefix`, and the revision at which this was true. Linearizable."""

    def put_if(self, key: str, value: bytes, *, revision: int, lease: LeaseId | None = None) -> int | None:
        """Write if the key still has `revision` (`ABSENT`: it does not exist).

        Returns the new revision, or None if the key has another one. A key with a lease disappears when the
        lease ends.
        """

    def delete_if(self, key: str, *, revision: int) -> bool:
        """Delete if the key still has `revision`."""

    def grant(self, seconds: float) -> LeaseId:
        """A lease that ends unless it is renewed within `seconds`."""

    def renew(self, lease: LeaseId) -> bool:
        """Renew a lease; False if it has ended."""

    def revoke(self, lease: LeaseId) -> None:
        """End a lease now, with its keys."""

    def wait(self, prefix: str, *, after: int, seconds: float) -> bool:
        """Wait until a key below `prefix` changes after revision `after`; False if none did within `seconds`.

        May return True without a change, for instance when the history since `after` is gone: read again.
        """

    def close(self) -> None:
        """Release connections and files. A call that waits in another thread ends."""

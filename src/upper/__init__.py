"""upper: a partitioned key-value store with resumable, rollback-aware change streams.

`__all__` is the public API: a name in it changes only with an entry in the changelog; any other name may
change at any time. Names are loaded on first use, so `import upper` is fast and needs only what is
installed.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # what type checkers take for true; to import `typing` takes longer than all else here
if TYPE_CHECKING:
    from upper import aio
    from upper.client.bucket import Bucket, connect
    from upper.client.calls import Copy, Item, Metadata, Promoted, Stored, WriteCopies
    from upper.client.checkpoint import Checkpoint
    from upper.client.events import (
        Change,
        Deletion,
        Event,
        Expiration,
        Flush,
        Mutation,
        Rollback,
        SnapshotEnd,
        StateChange,
    )
    from upper.client.feed import Feed
    from upper.client.positions import Positions
    from upper.errors import UpperError
    from upper.model.values import (
        BranchId,
        FailoverLog,
        Partition,
        Position,
        Seqno,
        Snapshot,
        Version,
        partition_of,
    )
    from upper.version import VERSION as __version__

# The module of each name, and its name there.
_MODULES = {
    "__version__": ("upper.version", "VERSION"),
    "UpperError": ("upper.errors", "UpperError"),
    # values
    "Partition": ("upper.model.values", "Partition"),
    "BranchId": ("upper.model.values", "BranchId"),
    "Seqno": ("upper.model.values", "Seqno"),
    "Snapshot": ("upper.model.values", "Snapshot"),
    "Position": ("upper.model.values", "Position"),
    "Version": ("upper.model.values", "Version"),
    "FailoverLog": ("upper.model.values", "FailoverLog"),
    "partition_of": ("upper.model.values", "partition_of"),
    # the bucket, blocking and with asyncio
    "connect": ("upper.client.bucket", "connect"),
    "aio": ("upper", "aio"),
    "Bucket": ("upper.client.bucket", "Bucket"),
    "Item": ("upper.client.calls", "Item"),
    "Metadata": ("upper.client.calls", "Metadata"),
    "Stored": ("upper.client.calls", "Stored"),
    "WriteCopies": ("upper.client.calls", "WriteCopies"),
    "Promoted": ("upper.client.calls", "Promoted"),
    "Copy": ("upper.client.calls", "Copy"),
    # events of a change stream
    "Feed": ("upper.client.feed", "Feed"),
    "Event": ("upper.client.events", "Event"),
    "Change": ("upper.client.events", "Change"),
    "Mutation": ("upper.client.events", "Mutation"),
    "Deletion": ("upper.client.events", "Deletion"),
    "Expiration": ("upper.client.events", "Expiration"),
    "Flush": ("upper.client.events", "Flush"),
    "Rollback": ("upper.client.events", "Rollback"),
    "SnapshotEnd": ("upper.client.events", "SnapshotEnd"),
    "StateChange": ("upper.client.events", "StateChange"),
    # positions
    "Positions": ("upper.client.positions", "Positions"),
    "Checkpoint": ("upper.client.checkpoint", "Checkpoint"),
}

__all__ = [
    "__version__",
    "UpperError",
    "Partition",
    "BranchId",
    "Seqno",
    "Snapshot",
    "Position",
    "Version",
    "FailoverLog",
    "partition_of",
    "connect",
    "aio",
    "Bucket",
    "Item",
    "Metadata",
    "Stored",
    "WriteCopies",
    "Promoted",
    "Copy",
    "Feed",
    "Event",
    "Change",
    "Mutation",
    "Deletion",
    "Expiration",
    "Flush",
    "Rollback",
    "SnapshotEnd",
    "StateChange",
    "Positions",
    "Checkpoint",
]


if not TYPE_CHECKING:  # with this function a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"upper has no public name {name!r}; its names are in upper.__all__")
        module, there = _MODULES[name]
        # A submodule is imported by name; an attribute of the package would be looked up here again.
        value = (
            import_module(f"upper.{there}") if module == "upper" else getattr(import_module(module), there)
        )
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""upper: a partitioned key-value server whose changes can be followed, left and taken up again.

This is the public surface, and the whole of it: what `__all__` lists stays, or changes with a line in
the changelog; what it does not list may change at any time. Names are fetched from their rooms when they
are first used, so that `import upper` costs nothing and needs nothing that is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from upper import aio
    from upper.client.bucket import connect
    from upper.client.checkpoint import Checkpoint
    from upper.client.commands import Copy
    from upper.client.events import (
        Deletion,
        Expiration,
        Flush,
        Mutation,
        Rollback,
        SnapshotEnd,
        StateChange,
    )
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

# name -> the module that has it, and its name there
_HOMES = {
    "__version__": ("upper.version", "VERSION"),
    "UpperError": ("upper.errors", "UpperError"),
    # words
    "Partition": ("upper.model.values", "Partition"),
    "BranchId": ("upper.model.values", "BranchId"),
    "Seqno": ("upper.model.values", "Seqno"),
    "Snapshot": ("upper.model.values", "Snapshot"),
    "Position": ("upper.model.values", "Position"),
    "Version": ("upper.model.values", "Version"),
    "FailoverLog": ("upper.model.values", "FailoverLog"),
    "partition_of": ("upper.model.values", "partition_of"),
    # the bucket, for programs that block and for those that do not
    "connect": ("upper.client.bucket", "connect"),
    "aio": ("upper", "aio"),
    "Copy": ("upper.client.commands", "Copy"),
    # what a follower sees
    "Mutation": ("upper.client.events", "Mutation"),
    "Deletion": ("upper.client.events", "Deletion"),
    "Expiration": ("upper.client.events", "Expiration"),
    "Flush": ("upper.client.events", "Flush"),
    "Rollback": ("upper.client.events", "Rollback"),
    "SnapshotEnd": ("upper.client.events", "SnapshotEnd"),
    "StateChange": ("upper.client.events", "StateChange"),
    # where it stands
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
    "Copy",
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


if not TYPE_CHECKING:  # a type checker that saw this would believe in any name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"upper has no public name {name!r}; its names are in upper.__all__")
        module, there = _HOMES[name]
        # A part of this package is a module of its own; asking the package for it would end up here again.
        value = (
            import_module(f"upper.{there}") if module == "upper" else getattr(import_module(module), there)
        )
        globals()[name] = value  # asked once
        return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""The handlers of every key-value command, a file for each family. Importing this fills the table."""

from upper.server.commands import (
    counters,
    keys,
    meta,
    observe,
    partitions,
    session,
    store,
    subdocument,
)

__all__ = [
    "counters",
    "keys",
    "meta",
    "observe",
    "partitions",
    "session",
    "store",
    "subdocument",
]

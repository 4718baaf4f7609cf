"""Persistent storage of a bucket: a journal, partitions as ordered maps in memory, and partition files.

`BucketStore.open(directory)` is the entry point. Nothing here uses the network; docs/storage.md describes the
format.
"""

from upper.storage.bucket import BucketStore
from upper.storage.changes import Changes
from upper.storage.disk import Disk
from upper.storage.opening import OpeningReport
from upper.storage.partition import Mode, PartitionStore, WriteResult
from upper.storage.records import StoredItem
from upper.storage.release import Commit
from upper.storage.settings import Durability, StorageSettings
from upper.storage.state import fresh_branch

__all__ = [
    "BucketStore",
    "Changes",
    "Commit",
    "Disk",
    "Durability",
    "StoredItem",
    "Mode",
    "OpeningReport",
    "PartitionStore",
    "StorageSettings",
    "WriteResult",
    "fresh_branch",
]

"""What survives a restart: a journal of packets, one ordered map a partition, files that replace the journal.

`Bucket.open(directory)` is the way in. Nothing here opens a socket; docs/storage.md describes the format.
"""

from upper.storage.bucket import Bucket, Commit
from upper.storage.changes import Changes
from upper.storage.disk import Disk
from upper.storage.opening import Opening, fresh_branch
from upper.storage.partition import Mode, PartitionStore, Written
from upper.storage.records import Item
from upper.storage.settings import Durability, StorageSettings

__all__ = [
    "Bucket",
    "Changes",
    "Commit",
    "Disk",
    "Durability",
    "Item",
    "Mode",
    "Opening",
    "PartitionStore",
    "StorageSettings",
    "Written",
    "fresh_branch",
]

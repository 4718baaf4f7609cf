"""A copy of one partition in real storage, on a disk that loses what was not synced when its power fails.

Every operation is done in the model (`LightCopy`) and in a `PartitionStore`, and the storage decides: what a
crash leaves, and how far a rollback goes. It must hold what the model allows.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from random import Random

from tests.cluster.simulation.light_copy import LightCopy, Saved
from tests.disks import abandon
from tests.storage.test_power import PowerCut, Volatile
from upper.cluster.replica_stream import common_seqno
from upper.model.values import BranchId, FailoverLog, Seqno, Snapshot, State
from upper.storage import BucketStore, PartitionStore, StorageSettings

SETTINGS = StorageSettings(compact=False, segment_size=4096, disk_floor=16 << 10)
NEVER = 1 << 40  # calls before the power fails


class StoredCopy(LightCopy):
    """One copy, in a bucket of one partition."""

    __slots__ = ("_bucket", "_chance", "_disk", "_lives", "_root", "store")

    def __init__(self, root: Path, chance: Random) -> None:
        self._root, self._chance, self._lives = root, chance, 0
        self._open()
        super().__init__()

    def _open(self) -> None:
        self._disk = Volatile(NEVER, self._place)
        self._bucket = BucketStore.open(
            self._place, SETTINGS, partitions=1, state=State.REPLICA, disk=self._disk
        )
        self.store: PartitionStore = self._bucket.partitions[0]

    @property
    def _place(self) -> Path:
        return self._root / str(self._lives)

    @property
    def log(self) -> FailoverLog | None:
        return self.store.log

    @log.setter
    def log(self, log: FailoverLog | None) -> None:
        if log is not None and log != self.store.log:
            self.store.set_log(log)

    def append(self, *changes: int) -> None:
        for change in changes:
            self.store.write(b"%d" % change, b"")
        super().append(*changes)

    def receive(self, changes: list[int], records: list[bytes]) -> None:
        first = self.high
        self.store.apply(records, snapshot=Snapshot(first, Seqno(first + len(records))), complete=True)
        super().append(*changes)

    def records(self, start: int, end: int) -> list[bytes]:
        found = [self.store.items.get(b"%d" % change) for change in self.changes[start:end]]
        return [record for record in found if isinstance(record, bytes)]

    def end_batch(self) -> None:
        if self._writing is not None:
            self._bucket.commit()
            self._writing = None
            self.saved = Saved(len(self.changes), self.log, self.epoch)
            self._agree(len(self.changes))

    def crash(self, *, batch_survives: bool) -> None:
        """The power fails in the middle of the batch that is being written, or in between."""
        with suppress(PowerCut):
            if self._writing is not None:
                self._disk.calls = NEVER if batch_survives else self._chance.randrange(6)
                self._bucket.commit()
        self._writing = None
        abandon(self._bucket)
        before = self._place
        self._lives += 1
        self._disk.left(before, self._place, self._chance)
        self._open()
        self._agree(self.saved.high)
        self._cut(self.store.high)
        self.saved = Saved(len(self.changes), self.log, self.saved.epoch)
        self.epoch = self.saved.epoch

    def lose(self, changes: int) -> None:
        self._back(Seqno(max(0, self.saved.high - changes)))

    def promote(self, branch: BranchId) -> None:
        if all(version.branch != branch for version in self.store.log):
            self.store.promote(branch)

    def shared_with(self, log: FailoverLog) -> Seqno:
        return min(common_seqno(self.store.log, log), self.high)

    def roll_back(self, to: Seqno) -> None:
        self._back(to)

    def _back(self, to: Seqno) -> None:
        reached = self.store.rollback(to)
        assert reached <= to
        self._cut(reached)
        self.saved = Saved(len(self.changes), self.log, self.epoch)
        self._agree(reached)

    def _agree(self, least: int) -> None:
        """The storage holds a part of what was written, and at least this much of it."""
        held = [int(key) for key in self.store.items]
        assert least <= len(held) == self.store.high <= len(self.changes), "the storage lost changes"
        assert held == self.changes[: len(held)], "the storage holds other changes"

    def close(self) -> None:
        if not self._bucket.closed:
            abandon(self._bucket)

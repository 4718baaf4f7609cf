"""One partition: its items in memory, the operations of clients, its history and the changes after a seqno.

`items` is a map of the kernel (`kernel.RecordMap`), key to entry in the order of seqnos. An entry is a
record, or the location of one that left memory. Deletions stay as tombstones, which are never moved out.

Every change becomes a record that is appended to the bucket's open batch. Memory has it at once. `written`
is the last seqno on the local disk, which replicas may have; `durable` is the last one that responses and
consumers may see. Nothing here writes to the journal itself. The operations of a replica are in
`partition_copy.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from upper import kernel
from upper.errors import (
    InvalidArguments,
    KeyExists,
    KeyNotFound,
    Locked,
    TemporaryFailure,
)
from upper.history.partition_state import Access, Ownership, StateCue, transition
from upper.model.values import (
    MAX_SEQNO,
    BranchId,
    Cas,
    FailoverLog,
    Seqno,
    State,
)
from upper.record.layout import AT_OPCODE, MAX_CAS, MAX_KEY
from upper.record.location import MAX_OFFSET, length_at, location
from upper.storage import records
from upper.storage.changes import Changes
from upper.storage.files import File
from upper.storage.partition_copy import PartitionCopy
from upper.storage.records import DELETION, EXPIRATION, MUTATION, StoredItem
from upper.storage.state import fresh_branch

log = logging.getLogger("upper.storage")

# Past this seqno a partition leaves the kernel's fast path, which does not check the last seqno.
FAST_SEQNOS = MAX_SEQNO - (1 << 24)


class Mode(Enum):
    """What a write expects to find."""

    SET = "set"  # anything
    ADD = "add"  # nothing
    REPLACE = "replace"  # an item


class WriteResult(NamedTuple):
    """What a change was given."""

    cas: Cas
    seqno: Seqno


class PartitionStore(PartitionCopy):
    __slots__ = ()

    # ── Reading ───────────────────────────────────────────────────────────────────────────────────

    def read(self, key: bytes) -> StoredItem | None:
        """The item, or None. An expired item is deleted first."""
        record = self._live(key)
        if record is None:
            return None
        return records.item_of(record)

    def read_meta(self, key: bytes) -> StoredItem | None:
        """The same for tombstones too: `deleted` distinguishes them."""
        record = self._live(key)
        if record is None and (entry := self.items.get(key)) is not None:
            record = self._fetch(entry)
        return None if record is None else records.item_of(record)

    def length(self, key: bytes) -> int:
        """Bytes of the record under a key, in memory or not; 0 if there is none."""
        entry = self.items.get(key) or b""
        return len(entry) if isinstance(entry, bytes) else length_at(entry)

    def changes_after(self, seqno: Seqno) -> Changes:
        """Each key that changed after `seqno`, once, in order, as of now: later writes do not touch it."""
        self._readable()
        return Changes(self.bucket.reader, self.items.after(seqno), end=Seqno(self.high))

    def locked(self, item: StoredItem) -> bool:
        return bool(item.lock_time) and item.lock_time > self.bucket.clock.lock_seconds()

    # ── Writing ───────────────────────────────────────────────────────────────────────────────────

    def write(
        self,
        key: bytes,
        value: bytes,
        *,
        flags: int = 0,
        expiration: int = 0,
        cas: int = 0,
        mode: Mode = Mode.SET,
        data_type: int = 0,
        lock_time: int = 0,
    ) -> WriteResult:
        """Store a value. `expiration` and `lock_time` are seconds since the epoch, 0 for never.

        With a CAS the item must exist and have it; a locked item requires the CAS of its lock.
        """
        self._writable(key)
        old = self._live(key)
        self._admit(key, old, cas)
        if mode is Mode.ADD and old is not None:
            raise KeyExists("the key exists already; use set or replace")
        if mode is Mode.REPLACE and old is None:
            raise KeyNotFound("there is nothing to replace under this key; use set or add")
        return self._mutate(
            key, value, flags=flags, expiration=expiration, data_type=data_type, lock_time=lock_time
        )

    def delete(self, key: bytes, *, cas: int = 0) -> WriteResult:
        self._writable(key)
        old = self._live(key)
        if old is None:
            raise KeyNotFound("there is no such key to delete")
        self._admit(key, old, cas)
        return self._delete(key, DELETION)

    def touch(self, key: bytes, expiration: int) -> StoredItem:
        """Give an item another expiration; returns the new item."""
        self._writable(key)
        item = self._unlocked(key)
        self._mutate(key, item.value, flags=item.flags, expiration=expiration, data_type=item.data_type)
        return records.item_of(self._fetch(self.items[key]))

    def lock(self, key: bytes, until: int) -> StoredItem:
        """Lock an item until a second of the wall clock; a write needs the CAS of the answer."""
        self._writable(key)
        item = self._unlocked(key)
        self._mutate(
            key, item.value, flags=item.flags, expiration=item.expiration, data_type=item.data_type,
            lock_time=until,
        )  # fmt: skip
        return records.item_of(self._fetch(self.items[key]))

    def unlock(self, key: bytes, cas: int) -> WriteResult:
        self._writable(key)
        record = self._live(key)
        if record is None:
            raise KeyNotFound("there is no such key to unlock")
        item = records.item_of(record)
        if not self.locked(item):
            raise TemporaryFailure("the key is not locked; there is nothing to unlock")
        if item.cas != cas:
            raise Locked("the key is locked with another CAS; unlock it with the one that locking gave")
        return self._mutate(
            key, item.value, flags=item.flags, expiration=item.expiration, data_type=item.data_type
        )

    def write_meta(
        self,
        key: bytes,
        value: bytes,
        *,
        revision: int,
        new_cas: int,
        flags: int = 0,
        expiration: int = 0,
        data_type: int = 0,
        lock_time: int = 0,
        deleted: bool = False,
        expired: bool = False,
        cas: int = 0,
        force: bool = False,
        last_write_wins: bool = False,
    ) -> WriteResult:
        """Store what was written elsewhere, with its own revision and CAS, under a seqno of this partition.

        Unless forced, the newer of the two wins: higher revision, then CAS, then expiration, then flags; with
        `last_write_wins` the CAS, which is a time, is compared before the revision. A forced write replaces a
        locked item too: the lock was copied with it, and ends with what is copied next. A forced write with a
        CAS replaces just the version that has it, also a tombstone.
        """
        self._writable(key)
        entry = self.items.get(key)
        old = None if entry is None else self._fetch(entry)
        live = None if old is None or old[AT_OPCODE] != MUTATION else old
        if force and cas and old is not None and live is None:
            if records.meta_of(old)[0] != cas:
                raise KeyExists("the key has changed since that CAS was read; read it again")
        elif cas or not force:
            self._admit(key, live, cas)
        if old is not None and not force:
            old_cas, _, old_revision = records.meta_of(old)
            old_flags, old_expiration, _ = records.tail_of(old)
            order = (new_cas, revision) if last_write_wins else (revision, new_cas)
            old_order = (old_cas, old_revision) if last_write_wins else (old_revision, old_cas)
            theirs = (*order, 0, 0) if deleted else (*order, expiration, flags)
            if theirs <= (*old_order, old_expiration, old_flags):
                raise KeyExists("this node has a newer version of the key, which stays")
        self.bucket.clock.advance_past(new_cas)
        seqno = self._next()
        if deleted:
            opcode = EXPIRATION if expired else DELETION
            record = records.deletion(
                self.id, key, seqno=seqno, revision=revision, cas=new_cas, opcode=opcode
            )
        else:
            record = records.mutation(
                self.id, key, value, seqno=seqno, revision=revision, cas=new_cas,
                flags=flags, expiration=expiration, lock_time=lock_time, data_type=data_type,
            )  # fmt: skip
            if expiration:
                self.bucket.expiry.add(expiration, self.id, key)
        self.items.put(record)
        self._add_to_batch(record)
        return WriteResult(Cas(new_cas), Seqno(seqno))

    def flush(self) -> WriteResult:
        """Delete every item, and all tombstones."""
        self._writable(b"")
        seqno = self._next()
        cas = self.bucket.clock.tick()
        self._flushed(seqno)
        self._add_to_batch(records.flush(self.id, cas))
        return WriteResult(Cas(cas), Seqno(seqno))

    def expire(self, key: bytes) -> bool:
        """Delete an expired item; False if it has not expired."""
        self._readable()
        entry = self.items.get(key)
        expiration = 0 if entry is None else records.tail_of(self._fetch(entry))[1]
        if not expiration:
            return False
        now = self.bucket.clock.seconds()
        if expiration > now:  # it was touched since
            self.bucket.expiry.add(expiration, self.id, key)
            return False
        if not self.takes_changes:
            # The active copy decides. Should this become the active one before it has, look again.
            self.bucket.expiry.add(now + 60, self.id, key)
            return False
        self._delete(key, EXPIRATION)
        return True

    # ── History ───────────────────────────────────────────────────────────────────────────────────

    def set_state(self, state: State) -> None:
        """Go to one of the protocol's states; begins a branch where the table of states requires one."""
        self.change_state(StateCue(state.value))

    def change_state(self, cue: StateCue) -> None:
        """Take the transition that the table of states has for this; refused where it has none.

        A copy in the middle of a snapshot lacks changes: where it becomes active, a branch begins too.
        """
        self.open_to_changes()
        after, branch = transition(self.ownership, cue)
        if branch or (after is Ownership.ACTIVE and self.incoming is not None):
            log.warning("partition %d: was %s, and is active as a new branch", self.id, self.ownership)
            self.promote(fresh_branch())
        else:
            self._own(after)

    def _own(self, ownership: Ownership) -> None:
        self.ownership = ownership
        self._state(records.state_fact(self.id, ownership))
        self.bucket.served(self)

    def set_log(self, versions: FailoverLog) -> None:
        """Take over the failover log of the active copy."""
        self.open_to_changes()
        self.log = versions
        self._state(records.log_fact(self.id, versions))

    def promote(self, fresh: BranchId) -> FailoverLog:
        """Become active without proof of having everything: a branch begins at the last complete snapshot."""
        self.set_log(self.log.promoted(self.complete, fresh=fresh))
        self.end_snapshot()
        self._own(Ownership.ACTIVE)
        log.info("partition %d: active from %d on as a new branch", self.id, self.log.versions[0].seqno)
        return self.log

    def rollback(self, to: Seqno) -> Seqno:
        """Go back to the newest complete snapshot at or below `to` that can be rebuilt, else to zero.

        Returns the high seqno afterwards. Blocks until it is on disk; a node uses
        `BucketStore.rollbacks.start`. For a replica, which continues the branches of the active copy.
        """
        if self.high <= to and self.incoming is None:
            self.open_to_changes()
            self.bucket.commit()
            return Seqno(self.high)
        return self.bucket.rollbacks.run(self, to, ownership=self.ownership, branch=None)

    # ── Inside ────────────────────────────────────────────────────────────────────────────────────

    def _live(self, key: bytes) -> bytes | None:
        self._readable()
        entry = self.items.get(key)
        if entry is None:
            return None
        record = self._fetch(entry)
        if record[AT_OPCODE] != MUTATION:
            return None
        if self._expired(record):
            if self.takes_changes and self.bucket.failed is None and self.high < MAX_SEQNO:
                self._delete(key, EXPIRATION)
            return None
        return record

    def _fetch(self, entry: kernel.Entry) -> bytes:
        return entry if isinstance(entry, bytes) else self.bucket.files.fetch(entry)

    def _expired(self, record: bytes) -> bool:
        if record[AT_OPCODE] != MUTATION:
            return False
        expiration = records.tail_of(record)[1]
        return expiration != 0 and expiration <= self.bucket.clock.seconds()

    def _admit(self, key: bytes, old: bytes | None, cas: int) -> None:
        """Refuse a write whose CAS or lock does not fit."""
        if old is None:
            if cas:
                raise KeyNotFound("there is no such key, so its CAS cannot match")
            return
        old_cas = records.meta_of(old)[0]
        lock_time = records.tail_of(old)[2]
        if lock_time and lock_time > self.bucket.clock.lock_seconds():
            if cas != old_cas:
                raise Locked("the key is locked; wait for the lock to end or use its CAS")
        elif cas and cas != old_cas:
            raise KeyExists("the key has changed since that CAS was read; read it again")

    def _unlocked(self, key: bytes) -> StoredItem:
        record = self._live(key)
        if record is None:
            raise KeyNotFound("there is no such key")
        item = records.item_of(record)
        if self.locked(item):
            raise Locked("the key is locked; wait for the lock to end or use its CAS")
        return item

    def _mutate(
        self, key: bytes, value: bytes, *, flags: int, expiration: int, data_type: int, lock_time: int = 0
    ) -> WriteResult:
        # Whatever may fail comes before the seqno is taken: a seqno without a record would stop every stream.
        revision, cas, seqno = self._revision(key), self.bucket.clock.tick(), self._next()
        record = records.mutation(
            self.id, key, value, seqno=seqno, revision=revision, cas=cas,
            flags=flags, expiration=expiration, lock_time=lock_time, data_type=data_type,
        )  # fmt: skip
        self.items.put(record)
        if expiration:
            self.bucket.expiry.add(expiration, self.id, key)
        self._add_to_batch(record)
        return WriteResult(Cas(cas), Seqno(seqno))

    def _delete(self, key: bytes, opcode: int) -> WriteResult:
        # Whatever may fail comes before the seqno is taken: a seqno without a record would stop every stream.
        revision, cas, seqno = self._revision(key), self.bucket.clock.tick(), self._next()
        record = records.deletion(self.id, key, seqno=seqno, revision=revision, cas=cas, opcode=opcode)
        self.items.put(record)
        self._add_to_batch(record)
        return WriteResult(Cas(cas), Seqno(seqno))

    def _revision(self, key: bytes) -> int:
        entry = self.items.get(key)
        # A revision from elsewhere may be the last there is; the kernel counts on from 0 then, and so do we.
        return 1 if entry is None else records.meta_of(self._fetch(entry))[2] + 1 & MAX_CAS

    def _next(self) -> int:
        if self.high >= MAX_SEQNO:
            raise self._exhausted()
        self.high += 1
        return self.high

    def open_to_clients(self) -> None:
        """Reject a client's change while the cluster does not let this copy take any."""
        self.open_to_changes()
        match self.access:
            case Access.READ_ONLY:
                raise TemporaryFailure(
                    f"partition {self.id} has fewer in-sync copies than the bucket's minimum and takes no "
                    "changes; bring its replicas back, or lower the minimum"
                )
            case Access.WAITING | Access.CLOSED:
                raise TemporaryFailure(f"partition {self.id} takes no changes at present; try again")

    def _writable(self, key: bytes) -> None:
        self.open_to_clients()
        if len(key) > MAX_KEY:
            raise InvalidArguments(f"a key has at most {MAX_KEY} bytes, not {len(key)}")


def evict(stores: Sequence[PartitionStore], batch: Iterable[bytes], file: File, at: int) -> int:
    """Move the values of a batch, which is in a file at this offset, out of memory; returns their bytes."""
    evicted = 0
    for record in batch:
        size = len(record)
        if record[AT_OPCODE] == MUTATION and at <= MAX_OFFSET:
            store, seqno = stores[records.partition_of_record(record)], records.seqno_of(record)
            place = location(seqno, file.slot, at, size)
            # A partition that is being compacted keeps its entries: the job compares them later.
            if not store.compacting and store.items.move_out(records.key_of(record), seqno, place):
                evicted += size
        at += size
    return evicted

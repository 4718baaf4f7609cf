"""One partition: its items in memory, what may be done to them, and what changed after a seqno.

`items` is one dict, key to entry, whose order is the order of seqnos: an overwrite takes the old entry out
and puts the new one in at the end. An entry is a record, or the location of one that left memory.
Deletions stay as tombstones, which are never moved out.

Every change becomes a record that is appended to the bucket's open batch; memory shows it at once, and
nobody may be told before the batch is on disk (`durable`). Nothing here touches the journal itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from upper import kernel
from upper.errors import (
    Corrupt,
    InvalidArguments,
    KeyExists,
    KeyNotFound,
    LocalProtocolError,
    Locked,
    SeqnoExhausted,
    TemporaryFailure,
)
from upper.model.values import (
    MAX_SEQNO,
    BranchId,
    Cas,
    FailoverLog,
    Seqno,
    State,
)
from upper.storage import records
from upper.storage.changes import Changes
from upper.storage.records import DELETION, EXPIRATION, FLUSH, MUTATION, Item
from upper.storage.state import PartitionState

log = logging.getLogger("upper.storage")

MAX_KEY = 250
# Past this, a partition leaves the fast path of the kernel, which does not count to the end.
FAST_SEQNOS = MAX_SEQNO - (1 << 24)


class Mode(Enum):
    """What a write expects to find."""

    SET = "set"  # anything
    ADD = "add"  # nothing
    REPLACE = "replace"  # an item


class Written(NamedTuple):
    """What a change was given."""

    cas: Cas
    seqno: Seqno


class PartitionStore(PartitionState):
    __slots__ = ()

    # ── Reading ───────────────────────────────────────────────────────────────────────────────────

    def read(self, key: bytes) -> Item | None:
        """The item as it stands, or None. An item whose time has come is deleted on the way."""
        record = self._live(key)
        if record is None:
            return None
        return records.item_of(record)

    def read_meta(self, key: bytes) -> Item | None:
        """The same for tombstones too: `deleted` tells them apart."""
        record = self._live(key)
        if record is None and (entry := self.items.get(key)) is not None:
            record = self._fetch(entry)
        return None if record is None else records.item_of(record)

    def record(self, key: bytes) -> bytes | None:
        """The record of a live item, as it would be streamed."""
        return self._live(key)

    def changes_after(self, seqno: Seqno) -> Changes:
        """Each key that changed after `seqno`, once, in order, as of now: later writes do not touch it."""
        self._readable()
        entries = kernel.after(self.items, seqno)
        return Changes(self.bucket.files, entries, end=Seqno(self.high), evicted=bool(self.evicted))

    def locked(self, item: Item) -> bool:
        return item.lock_time > self.bucket.clock.seconds()

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
    ) -> Written:
        """Store a value. `expiration` and `lock_time` are seconds since the epoch, 0 for never.

        With a CAS the item must exist and have it; a locked item takes no other than its lock's.
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

    def delete(self, key: bytes, *, cas: int = 0) -> Written:
        self._writable(key)
        old = self._live(key)
        if old is None:
            raise KeyNotFound("there is no such key to delete")
        self._admit(key, old, cas)
        return self._bury(key, DELETION)

    def touch(self, key: bytes, expiration: int) -> Item:
        """Give an item another expiration; returns the item as it stands then."""
        self._writable(key)
        item = self._unlocked(key)
        self._mutate(key, item.value, flags=item.flags, expiration=expiration, data_type=item.data_type)
        return records.item_of(self._fetch(self.items[key]))

    def lock(self, key: bytes, until: int) -> Item:
        """Lock an item until a second of the wall clock; whoever has the CAS of the answer may write."""
        self._writable(key)
        item = self._unlocked(key)
        self._mutate(
            key, item.value, flags=item.flags, expiration=item.expiration, data_type=item.data_type,
            lock_time=until,
        )  # fmt: skip
        return records.item_of(self._fetch(self.items[key]))

    def unlock(self, key: bytes, cas: int) -> Written:
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
        deleted: bool = False,
        cas: int = 0,
        force: bool = False,
    ) -> Written:
        """Store what was written elsewhere, with its own revision and CAS, under a seqno of this partition.

        Unless forced, the newer of the two wins: higher revision, then CAS, then expiration, then flags.
        """
        self._writable(key)
        entry = self.items.get(key)
        old = None if entry is None else self._fetch(entry)
        live = None if old is None or old[1] != MUTATION else old
        self._admit(key, live, cas)
        if old is not None and not force:
            old_cas, _, old_revision = records.meta_of(old)
            old_flags, old_expiration, _ = records.tail_of(old)
            theirs = (revision, new_cas, 0, 0) if deleted else (revision, new_cas, expiration, flags)
            if theirs <= (old_revision, old_cas, old_expiration, old_flags):
                raise KeyExists("this node has a newer version of the key, which stays")
        self.bucket.clock.saw(new_cas)
        seqno = self._next()
        if deleted:
            record = records.deletion(self.id, key, seqno=seqno, revision=revision, cas=new_cas)
        else:
            record = records.mutation(
                self.id, key, value, seqno=seqno, revision=revision, cas=new_cas,
                flags=flags, expiration=expiration, data_type=data_type,
            )  # fmt: skip
            if expiration:
                self.bucket.expiry.add(expiration, self.id, key)
        self._put(key, record)
        self._hand_in(record)
        return Written(Cas(new_cas), Seqno(seqno))

    def flush(self) -> Written:
        """Every item goes at once, and so does the memory of what was deleted."""
        self._writable(b"")
        seqno = self._next()
        cas = self.bucket.clock.tick()
        self._flushed(seqno)
        self._hand_in(records.flush(self.id, cas))
        return Written(Cas(cas), Seqno(seqno))

    def expire(self, key: bytes) -> bool:
        """Delete an item whose time has come; False if it has not. For the sweeper, which asks once a key."""
        self._readable()
        entry = self.items.get(key)
        expiration = 0 if entry is None else records.tail_of(self._fetch(entry))[1]
        if not expiration:
            return False
        now = self.bucket.clock.seconds()
        if expiration > now:  # it was touched since
            self.bucket.expiry.add(expiration, self.id, key)
            return False
        if self.state is not State.ACTIVE:
            # The active copy decides. Should this become the active one before it has, look again.
            self.bucket.expiry.add(now + 60, self.id, key)
            return False
        self._bury(key, EXPIRATION)
        return True

    # ── A replica's writing ───────────────────────────────────────────────────────────────────────

    def begin_snapshot(self, end: Seqno | None = None) -> None:
        """What follows is consistent only when `end_snapshot` comes."""
        self.bucket.writable()
        if self.incoming is None:
            self._complete = self.high
        self.incoming = end or 0
        self._state(records.snapshot_start(self.id, self.incoming))

    def end_snapshot(self) -> None:
        if self.incoming is not None:
            self.bucket.writable()
            self._snapshot_ended()
            self._state(records.snapshot_end(self.id))

    def advance(self, to: Seqno) -> None:
        """The active copy's history went on to here, and what was there is gone: no change says so."""
        self.bucket.writable()
        self._readable()
        self._follows(to)
        self.high = to
        self._state(records.seqno_advanced(self.id, to))

    def apply(self, changes: Iterable[bytes]) -> None:
        """Changes and flushes as they came from the active copy: their seqnos, revisions and CAS stay."""
        self.bucket.writable()
        self._readable()
        for change in changes:
            record = records.settled(change, self.id)
            if record[1] == FLUSH:
                if self.high >= MAX_SEQNO:
                    raise self._exhausted()
                self._flushed(self.high + 1)
            else:
                cas, seqno, _ = records.meta_of(record)
                self._follows(seqno)
                self.high = seqno
                self.bucket.clock.saw(cas)
                key = records.key_of(record)
                self._put(key, record)
                if record[1] == MUTATION and (expiration := records.tail_of(record)[1]):
                    self.bucket.expiry.add(expiration, self.id, key)
            self._hand_in(record)

    # ── History ───────────────────────────────────────────────────────────────────────────────────

    def set_state(self, state: State) -> None:
        """Change the state without a new branch: a clean takeover, or a step away from being active."""
        self.bucket.writable()
        self.state = state
        self._state(records.state_fact(self.id, state))
        self.bucket.served(self)

    def set_log(self, versions: FailoverLog) -> None:
        """Take over the failover log of the active copy."""
        self.bucket.writable()
        self.log = versions
        self._state(records.log_fact(self.id, versions))

    def promote(self, fresh: BranchId) -> FailoverLog:
        """Become active without proof of having everything: a branch begins at the last complete snapshot."""
        self.set_log(self.log.promoted(self.complete, fresh=fresh))
        self.end_snapshot()
        self.set_state(State.ACTIVE)
        log.info("partition %d: active from %d on as a new branch", self.id, self.log.versions[0].seqno)
        return self.log

    def rollback(self, to: Seqno, *, fresh: BranchId | None = None) -> Seqno:
        """Go back to the newest complete snapshot at or below `to` that can be rebuilt, else to zero.

        Returns where the partition stands now. `fresh` names the branch in case no version of the log
        is left; without it one is made up. Blocks until the disk has it: a crash before that leaves
        the partition as it was, a crash after it as it should be.
        """
        return self.bucket.roll_back(self, to, fresh=fresh)

    # ── Inside ────────────────────────────────────────────────────────────────────────────────────

    def _live(self, key: bytes) -> bytes | None:
        self._readable()
        entry = self.items.get(key)
        if entry is None:
            return None
        record = self._fetch(entry)
        if record[1] != MUTATION:
            return None
        if self._expired(record):
            if self.state is State.ACTIVE and self.bucket.failed is None and self.high < MAX_SEQNO:
                self._bury(key, EXPIRATION)
            return None
        return record

    def _fetch(self, entry: kernel.Entry) -> bytes:
        return entry if isinstance(entry, bytes) else self.bucket.files.fetch(entry)

    def _expired(self, record: bytes) -> bool:
        if record[1] != MUTATION:
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
        if records.tail_of(old)[2] > self.bucket.clock.seconds():
            if cas != old_cas:
                raise Locked("the key is locked; wait for the lock to end or use its CAS")
        elif cas and cas != old_cas:
            raise KeyExists("the key has changed since that CAS was read; read it again")

    def _unlocked(self, key: bytes) -> Item:
        record = self._live(key)
        if record is None:
            raise KeyNotFound("there is no such key")
        item = records.item_of(record)
        if self.locked(item):
            raise Locked("the key is locked; wait for the lock to end or use its CAS")
        return item

    def _mutate(
        self, key: bytes, value: bytes, *, flags: int, expiration: int, data_type: int, lock_time: int = 0
    ) -> Written:
        # Whatever may fail comes before the seqno is taken: a seqno without a record would stop every stream.
        revision, cas, seqno = self._revision(key), self.bucket.clock.tick(), self._next()
        record = records.mutation(
            self.id, key, value, seqno=seqno, revision=revision, cas=cas,
            flags=flags, expiration=expiration, lock_time=lock_time, data_type=data_type,
        )  # fmt: skip
        self._put(key, record)
        if expiration:
            self.bucket.expiry.add(expiration, self.id, key)
        self._hand_in(record)
        return Written(Cas(cas), Seqno(seqno))

    def _bury(self, key: bytes, opcode: int) -> Written:
        # Whatever may fail comes before the seqno is taken: a seqno without a record would stop every stream.
        revision, cas, seqno = self._revision(key), self.bucket.clock.tick(), self._next()
        record = records.deletion(self.id, key, seqno=seqno, revision=revision, cas=cas, opcode=opcode)
        self._put(key, record)
        self._hand_in(record)
        return Written(Cas(cas), Seqno(seqno))

    def _revision(self, key: bytes) -> int:
        entry = self.items.get(key)
        # A revision from elsewhere may be the last there is; the kernel counts on from 0 then, and so do we.
        return 1 if entry is None else records.meta_of(self._fetch(entry))[2] + 1 & records.MAX_U64

    def _next(self) -> int:
        if self.high >= MAX_SEQNO:
            raise self._exhausted()
        self.high += 1
        return self.high

    def _hand_in(self, record: bytes) -> None:
        self.bucket.pending.append(record)
        self.bucket.kick()

    def _state(self, fact: bytes) -> None:
        """A fact goes into the batch, and streams do not see it."""
        self.bucket.facts_pending = True
        self._hand_in(fact)

    def _writable(self, key: bytes) -> None:
        self.bucket.writable()
        self._readable()
        if len(key) > MAX_KEY:
            raise InvalidArguments(f"a key has at most {MAX_KEY} bytes, not {len(key)}")

    def _readable(self) -> None:
        if self.unreadable:
            raise Corrupt(
                f"partition {self.id} could not be read again after the disk failed; restart the node"
            )

    def _follows(self, seqno: int) -> None:
        if not self.high < seqno <= MAX_SEQNO:
            raise LocalProtocolError(
                f"partition {self.id}: seqno {seqno} cannot follow {self.high}; roll back first"
            )

    def _exhausted(self) -> SeqnoExhausted:
        return SeqnoExhausted(
            f"partition {self.id} has used its last seqno, {MAX_SEQNO}; copy its items to a new bucket"
        )

"""The agreement store for several nodes on one machine: one SQLite file that every process opens.

SQLite serialises writers, so each call is one transaction and compare-and-swap needs nothing else. Waiting
polls `PRAGMA data_version`, which changes when another process commits, most often soon after a change: one
is often the answer to another. Leases use the machine's monotonic
clock, which all processes share; a reboot ends every lease, because the clock starts again.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from upper.cluster.agreement import ABSENT, LeaseId, Unavailable, Versioned
from upper.errors import ClusterError

FILE = "agreement.db"
POLL = (0.002, 0.02)  # seconds between two looks at the version of the file: after a change, and later on
BUSY = 5.0  # seconds to wait for another process that writes

SCHEMA = """
create table if not exists facts (
    name text primary key, number integer not null, text text not null default ''
);
create table if not exists leases (
    id integer primary key autoincrement, seconds real not null, ends real not null
);
create table if not exists keys (
    key text primary key, value blob not null, revision integer not null, lease integer
) without rowid;
insert or ignore into facts (name, number) values ('revision', 0), ('boot', 0);
"""


class EmbeddedStore:
    """`AgreementStore` in a directory of this machine."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = directory / FILE
        self._lock = threading.Lock()
        self._closed = threading.Event()
        if not self._path.exists():
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        try:
            self._database = self._open()
            self._database.execute("pragma journal_mode = wal")
            self._database.execute("pragma synchronous = full")
            self._database.executescript(SCHEMA)
        except sqlite3.DatabaseError as error:
            raise ClusterError(f"{self._path} cannot be used as an agreement store: {error}") from error
        with self._writing() as database:
            _end_leases_of_an_earlier_boot(database)

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=BUSY, isolation_level=None, check_same_thread=False)

    def read(self, prefix: str) -> tuple[dict[str, Versioned], int]:
        # Without the lock for writers: a process that is stopped while it reads must not block the others.
        with self._transaction("begin") as database:
            due = self._due(database)
        if due:
            with self._writing() as database:
                _expire(database)
        with self._transaction("begin") as database:
            rows = database.execute(
                "select key, value, revision from keys where key >= ? and key < ?",
                (prefix, prefix + "\U0010ffff"),
            ).fetchall()
            return {key: Versioned(value, revision) for key, value, revision in rows}, _revision(database)

    def put_if(self, key: str, value: bytes, *, revision: int, lease: LeaseId | None = None) -> int | None:
        with self._writing() as database:
            _expire(database)
            if _revision_of(database, key) != revision:
                return None
            if (
                lease is not None
                and not database.execute("select 1 from leases where id = ?", (lease,)).fetchone()
            ):
                raise ClusterError(f"the lease {lease} has ended; grant another")
            after = _advance(database)
            database.execute("insert or replace into keys values (?, ?, ?, ?)", (key, value, after, lease))
            return after

    def delete_if(self, key: str, *, revision: int) -> bool:
        with self._writing() as database:
            _expire(database)
            if revision == ABSENT or _revision_of(database, key) != revision:
                return False
            _advance(database)
            database.execute("delete from keys where key = ?", (key,))
            return True

    def grant(self, seconds: float) -> LeaseId:
        with self._writing() as database:
            found = database.execute(
                "insert into leases (seconds, ends) values (?, ?)", (seconds, time.monotonic() + seconds)
            )
            assert found.lastrowid is not None
            return LeaseId(found.lastrowid)

    def renew(self, lease: LeaseId) -> bool:
        with self._writing() as database:
            _expire(database)
            found = database.execute(
                "update leases set ends = ? + seconds where id = ?", (time.monotonic(), lease)
            )
            return found.rowcount == 1

    def revoke(self, lease: LeaseId) -> None:
        with self._writing() as database:
            _end(database, [lease])

    def wait(self, prefix: str, *, after: int, seconds: float) -> bool:
        ends = time.monotonic() + seconds
        watcher = self._open()
        try:
            seen, pause = None, POLL[0]
            while not self._closed.is_set():
                version = watcher.execute("pragma data_version").fetchone()[0]
                if version != seen:
                    seen = version
                    if _revision(watcher) > after:
                        return True
                elif self._due(watcher):
                    with self._writing() as database:
                        _expire(database)
                if time.monotonic() >= ends:
                    return False
                self._closed.wait(min(pause, max(0.0, ends - time.monotonic())))
                pause = min(2 * pause, POLL[1])
            return False
        except sqlite3.OperationalError as error:
            raise Unavailable(f"the agreement store {self._path} does not answer: {error}") from error
        finally:
            watcher.close()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._database.close()

    def _due(self, database: sqlite3.Connection) -> bool:
        first = database.execute("select min(ends) from leases").fetchone()[0]
        return first is not None and first <= time.monotonic()

    def _writing(self) -> AbstractContextManager[sqlite3.Connection]:
        return self._transaction("begin immediate")

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._database.execute(begin)
            except sqlite3.ProgrammingError as error:
                raise ClusterError("the agreement store is closed") from error
            except sqlite3.OperationalError as error:
                raise Unavailable(f"the agreement store {self._path} does not answer: {error}") from error
            try:
                yield self._database
            except sqlite3.OperationalError as error:
                self._database.execute("rollback")
                raise Unavailable(f"the agreement store {self._path} does not answer: {error}") from error
            except BaseException:
                self._database.execute("rollback")
                raise
            try:
                self._database.execute("commit")
            except sqlite3.OperationalError as error:
                self._database.execute("rollback")
                raise Unavailable(f"the agreement store {self._path} cannot be written: {error}") from error


def _revision(database: sqlite3.Connection) -> int:
    number: int = database.execute("select number from facts where name = 'revision'").fetchone()[0]
    return number


def _revision_of(database: sqlite3.Connection, key: str) -> int:
    row = database.execute("select revision from keys where key = ?", (key,)).fetchone()
    return row[0] if row else ABSENT


def _advance(database: sqlite3.Connection) -> int:
    database.execute("update facts set number = number + 1 where name = 'revision'")
    return _revision(database)


def _expire(database: sqlite3.Connection) -> None:
    rows = database.execute("select id from leases where ends <= ?", (time.monotonic(),)).fetchall()
    _end(database, [lease for (lease,) in rows])


def _end(database: sqlite3.Connection, leases: list[int]) -> None:
    for lease in leases:
        if database.execute("delete from keys where lease = ?", (lease,)).rowcount:
            _advance(database)
        database.execute("delete from leases where id = ?", (lease,))


def _end_leases_of_an_earlier_boot(database: sqlite3.Connection) -> None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    if database.execute("select text from facts where name = 'boot'").fetchone()[0] != boot:
        _end(database, [lease for (lease,) in database.execute("select id from leases").fetchall()])
        database.execute("update facts set text = ? where name = 'boot'", (boot,))

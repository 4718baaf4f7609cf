"""A secondary index in SQLite: find documents by a field, as the bucket has them, whatever happens to it.

Three things make it right, and each is a few lines:

- the positions are in the same transaction as the rows they describe: no second place can disagree;
- every change notes what it replaced, so a rollback can put that back;
- on start, rows past the saved position are taken back first: their snapshot was not complete, and whether
  they come again depends on the bucket.

    python examples/index.py upr://127.0.0.1:11210/default index.db city
    sqlite3 index.db "select key from documents where field = 'Oslo'"
"""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing

import upper

SCHEMA = """
pragma journal_mode = wal;
create table if not exists documents (
    partition integer, key blob, value blob, field text, primary key (partition, key)) without rowid;
create index if not exists by_field on documents (field);
create table if not exists undo (partition integer, seqno integer, key blob, value blob);
create index if not exists by_seqno on undo (partition, seqno);
create table if not exists positions (id integer primary key check (id = 0), value text);
"""


class Index:
    """The tables; also where a follower keeps its place."""

    def __init__(self, path: str, field: str) -> None:
        self.field = field
        self.db = sqlite3.connect(path, isolation_level=None)
        self.db.executescript(SCHEMA)
        self.db.execute("begin")

    # ── Where the follower keeps its place ────────────────────────────────────────────────────────

    def load(self) -> upper.Positions | None:
        row = self.db.execute("select value from positions").fetchone()
        positions = None if row is None else upper.Positions.from_json(json.loads(row[0]))
        for (partition,) in self.db.execute("select distinct partition from undo").fetchall():
            here = positions.get(partition) if positions else None
            self.take_back(partition, here.seqno if here else 0)
        return positions

    def save(self, positions: upper.Positions, /) -> None:
        """Rows and positions, in one commit."""
        text = json.dumps(positions.to_json())
        self.db.execute("insert or replace into positions values (0, ?)", (text,))
        for partition in positions:
            # A rollback goes to one of these places, or to 0, for which no undo is needed.
            ends = positions.known(partition).ends
            if len(ends) > 1:
                self.db.execute("delete from undo where partition = ? and seqno <= ?", (partition, ends[0]))
        self.db.execute("commit")
        self.db.execute("begin")

    # ── Changes ───────────────────────────────────────────────────────────────────────────────────

    def apply(self, event: upper.Mutation | upper.Deletion | upper.Expiration | upper.Flush) -> None:
        if isinstance(event, upper.Flush):
            self.db.execute(
                "insert into undo select partition, ?, key, value from documents where partition = ?",
                (event.seqno, event.partition),
            )
            self.db.execute("delete from documents where partition = ?", (event.partition,))
            return
        before = self.db.execute(
            "select value from documents where partition = ? and key = ?", (event.partition, event.key)
        ).fetchone()
        self.db.execute(
            "insert into undo values (?, ?, ?, ?)",
            (event.partition, event.seqno, event.key, before[0] if before else None),
        )
        self._put(event.partition, event.key, event.value if isinstance(event, upper.Mutation) else None)

    def take_back(self, partition: int, to: int) -> None:
        """The rows of a partition as they were at `to`."""
        if to == 0:
            self.db.execute("delete from documents where partition = ?", (partition,))
        else:
            undo = self.db.execute(
                "select key, value from undo where partition = ? and seqno > ? order by seqno desc",
                (partition, to),
            )
            for key, value in undo.fetchall():
                self._put(partition, key, value)
        self.db.execute("delete from undo where partition = ? and seqno > ?", (partition, to))

    def _put(self, partition: int, key: bytes, value: bytes | None) -> None:
        if value is None:
            self.db.execute("delete from documents where partition = ? and key = ?", (partition, key))
        else:
            row = (partition, key, value, field_of(value, self.field))
            self.db.execute("insert or replace into documents values (?, ?, ?, ?)", row)


def field_of(value: bytes, name: str) -> str | None:
    """A field of a JSON document; nothing of what is no document."""
    try:
        document = json.loads(value)
    except ValueError:
        return None
    found = document.get(name) if isinstance(document, dict) else None
    return None if found is None else str(found)


def follow(index: Index, bucket: upper.Bucket, until: str | None = None) -> None:
    """Keep the index equal to the bucket, from the saved position on, until it is stopped."""
    feed = bucket.changes(
        since=index,
        until=until,
        on_rollback=lambda rollback: index.take_back(rollback.partition, rollback.to),
        checkpoint_every=0.1,
        name="index",
    )
    with feed:
        for event in feed:
            match event:
                case upper.Mutation() | upper.Deletion() | upper.Expiration() | upper.Flush():
                    index.apply(event)
                case upper.Rollback():
                    print(f"partition {event.partition} went back to {event.to}: {event.why}", flush=True)
                case upper.SnapshotEnd() | upper.StateChange():
                    pass


def main(url: str, path: str, field: str, until: str | None = None) -> None:
    index = Index(path, field)
    with upper.connect(url) as bucket, closing(index.db):
        follow(index, bucket, until)


if __name__ == "__main__":
    main(*sys.argv[1:])

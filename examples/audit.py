"""An audit log: one line for each change, none twice and none missing, also when a process is killed.

The log is its own checkpoint. Changes are written when their snapshot is complete; a line with the positions
is written behind them, and synced. On start everything behind the last such line is cut off, and comes again.
Nothing is ever removed: when history branches, a line states which lines before it are undone.

    python examples/audit.py upr://127.0.0.1:11210/default audit.jsonl
"""

from __future__ import annotations

import json
import os
import sys

import upper
from upper.client.events import Event

POSITIONS = b'{"positions":'


class AuditLog:
    """A file of JSON lines; also where a follower keeps its place."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a+b")  # noqa: SIM115  open as long as the program runs
        self._waiting: dict[int, list[bytes]] = {}  # by partition: of a snapshot that is not complete

    def load(self) -> upper.Positions | None:
        """The last place that was kept; what was written behind it is cut off."""
        self._file.seek(0)
        found, end, at = None, 0, 0
        for line in self._file:
            at += len(line)
            if line.startswith(POSITIONS) and line.endswith(b"\n"):
                found, end = line, at
        self._file.truncate(end)
        return None if found is None else upper.Positions.from_json(json.loads(found)["positions"])

    def save(self, positions: upper.Positions, /) -> None:
        self._file.write(POSITIONS + json.dumps(positions.to_json()).encode() + b"}\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def write(self, event: Event) -> None:
        waiting = self._waiting.setdefault(event.partition, [])
        match event:
            case upper.SnapshotEnd():
                self._file.write(b"".join(waiting))
                waiting.clear()
            case upper.Rollback():
                waiting.clear()
                self._file.write(as_line(event, {"lost": list(event.lost), "why": event.why}))
            case upper.Mutation() | upper.Deletion() | upper.Expiration():
                key = event.key.decode(errors="replace")
                waiting.append(
                    as_line(event, {"key": key, "revision": event.revision, "cas": str(event.cas)})
                )
            case upper.Flush():
                waiting.append(as_line(event, {}))
            case upper.StateChange():
                pass


def as_line(event: Event, more: dict[str, object]) -> bytes:
    line = {
        "operation": event.operation,
        "partition": event.partition,
        "seqno": event.seqno,
        "branch": str(event.branch),
        **more,
    }
    return json.dumps(line).encode() + b"\n"


def main(url: str, path: str, until: str | None = None) -> None:
    log = AuditLog(path)
    with upper.connect(url, patience=30) as bucket:
        # Nothing has to be taken back: the line about the rollback is part of the audit.
        feed = bucket.changes(
            since=log, until=until, on_rollback="continue", checkpoint_every=0.05, name="audit"
        )
        with feed:
            for event in feed:
                log.write(event)


if __name__ == "__main__":
    main(*sys.argv[1:])

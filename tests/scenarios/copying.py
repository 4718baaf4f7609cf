"""A follower as a program of its own, to be interrupted: it keeps a copy in SQLite, as the example does.

What it received and what it was given is appended to a file as it happens, so that being killed does not hide
it. A line on its standard input cuts its connections, wherever they are.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from examples.index import Index

import upper
from upper.client.feed import Feed

_NOTE = struct.Struct(">BHQQI")
CHANGE, RECEIVED, ROLLBACK, INSIDE = range(4)


class Note(NamedTuple):
    kind: int
    partition: int
    seqno: int
    cas: int
    size: int


def notes(path: Path) -> Iterator[Note]:
    data = path.read_bytes()
    return (Note(*fields) for fields in _NOTE.iter_unpack(data[: len(data) // _NOTE.size * _NOTE.size]))


def cut_on_demand(feed: Feed[upper.client.events.Event], out: int) -> None:
    for _ in sys.stdin:
        consumers = feed._follower.consumers.values()
        if any(consumer.stream.seqno != consumer.stream.consistent_at for consumer in consumers):
            os.write(out, _NOTE.pack(INSIDE, 0, 0, 0, 0))
        for line in list(feed._connections.values()):
            with suppress(OSError):
                line.socket.shutdown(socket.SHUT_RDWR)


def main(url: str, database: str, meter: str, until: str | None = None) -> None:
    out = os.open(meter, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    index, received = Index(database, "none"), 0
    with upper.connect(url, patience=60) as bucket:
        feed = bucket.changes(
            since=index,
            until=until,
            on_rollback=lambda rollback: index.take_back(rollback.partition, rollback.to),
            checkpoint_every=0.05,
        )
        threading.Thread(target=cut_on_demand, args=(feed, out), daemon=True).start()
        for event in feed:
            if feed.bytes_received > received:
                os.write(out, _NOTE.pack(RECEIVED, 0, 0, 0, feed.bytes_received - received))
                received = feed.bytes_received
            match event:
                case upper.Mutation() | upper.Deletion() | upper.Expiration():
                    index.apply(event)
                    value = event.value if isinstance(event, upper.Mutation) else b""
                    size = 52 + len(event.key) + len(value)
                    os.write(out, _NOTE.pack(CHANGE, event.partition, event.seqno or 0, event.cas, size))
                case upper.Rollback():
                    os.write(out, _NOTE.pack(ROLLBACK, event.partition, event.to, 0, 0))


if __name__ == "__main__":
    main(*sys.argv[1:])

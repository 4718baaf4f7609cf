"""Copies and changes that writes wait for share a connection: copies leave room for changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.replicas import ACTIVE, REPLICA, Member, entry, equal, run, until
from tests.server.inside import Held
from upper.client.backoff import BackoffSettings
from upper.cluster.replica_connection import ReplicaSettings
from upper.model.values import Partition
from upper.server.stream_output import COPIES
from upper.server.stream_session import StreamSession

WINDOW = 4 << 20
ITEMS, SIZE = 600, 10_000  # of a partition: more than the window


def producer(active: Member) -> StreamSession:
    (session,) = (one.stream_session for one in active.node.connections.values() if one.stream_session)
    return session


async def filled(path: Path, disk: Held) -> tuple[Member, Member]:
    """A replica that holds partition 0 in sync; partition 1 is to be copied."""
    active = await Member(path / "a", partitions=2).start()
    await active.lead()
    for number in range(ITEMS):
        for store in active.bucket.partitions:
            store.write(b"key-%d" % number, b"x" * SIZE)
    await until(lambda: all(store.durable == ITEMS for store in active.bucket.partitions))
    settings = ReplicaSettings(window=WINDOW, backoff=BackoffSettings(first=0.01, most=0.1))
    copy = await Member(path / "b", node_id=REPLICA, partitions=2, replica=settings, disk=disk).start()
    copy.follow(active, [0])
    await until(lambda: copy[0].written == ITEMS)
    both = frozenset((ACTIVE, REPLICA))
    active.copies[Partition(0)].observed(replace(entry(), in_sync=both))
    return active, copy


def test_a_change_that_a_write_waits_for_does_not_wait_behind_copies(tmp_path: Path) -> None:
    disk = Held()

    async def main() -> None:
        active, copy = await filled(tmp_path, disk)
        session = producer(active)
        await until(lambda: session.window.under_way < WINDOW // COPIES)
        disk.hold()
        copy.follow(active, [1])
        share, chunk = WINDOW // COPIES, active.node.settings.streams.chunk
        await until(lambda: session.window.under_way >= share)
        active[0].write(b"urgent", b"v")
        active.bucket.start_large_batch()
        await until(lambda: copy[0].high == ITEMS + 1)
        assert session.window.under_way <= share + 2 * chunk, "the rest of the copy waits"
        disk.released.set()
        await equal(active, copy)
        await copy.stop()
        await active.stop()

    run(main)


@pytest.mark.parametrize("share", [0.5, 1 / 32])
def test_a_replica_that_acknowledges_half_of_the_window_at_a_time_is_filled(
    tmp_path: Path, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nodes of earlier versions do: the share of copies would never be acknowledged."""
    monkeypatch.setattr("upper.cluster.replica_connection.ACKNOWLEDGED", share)

    async def main() -> None:
        active, copy = await filled(tmp_path, Held())
        assert (producer(active).finest >= WINDOW // 2) == (share == 0.5)
        copy.follow(active, [1])
        await equal(active, copy)
        await copy.stop()
        await active.stop()

    run(main)

"""A replica equals the active copy: in items, metadata, history and counts, whatever happens to either."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest

from tests.cluster.replicas import ACTIVE, REPLICA, THIRD, Member, difference, entry, equal, run, until
from tests.server.inside import Held
from tests.server.peers import Peer
from upper.cluster.active_copy import ActiveCopy
from upper.cluster.bucket_map import BucketSettings, Epoch, PartitionEntry
from upper.cluster.replica_connection import LinkState, ReplicaSettings
from upper.history.resume import Resume, decide
from upper.model.values import Partition, Position, Seqno, State, partition_of
from upper.server import promotion
from upper.storage import fresh_branch
from upper.wire.codes import Opcode

LATER = int(time.time()) + 1000


def fill(member: Member, count: int = 40, *, text: bytes = b"value") -> None:
    stores = member.bucket.partitions
    for number in range(count):
        stores[number % len(stores)].write(b"key-%d" % number, text, flags=number)


async def two(path: Path, **options: object) -> tuple[Member, Member]:
    active = await Member(path / "a").start()
    await active.lead()
    copy = await Member(path / "b", node_id=REPLICA, **options).start()  # type: ignore[arg-type]
    return active, copy


def test_a_new_replica_gets_everything_and_follows(tmp_path: Path) -> None:
    async def main() -> None:
        active, copy = await two(tmp_path)
        fill(active)
        copy.follow(active)
        await equal(active, copy)
        store = active[1]
        store.write(b"expires", b"x", expiration=LATER, data_type=1)
        store.lock(b"key-1", LATER)
        store.delete(b"key-5")
        store.write_meta(b"foreign", b"m", revision=77, new_cas=12345, flags=9)
        store.write_meta(b"gone", b"", revision=7, new_cas=99, deleted=True, expired=True)
        await equal(active, copy)
        store.flush()
        store.write(b"after", b"flush")
        await equal(active, copy)
        assert copy[1].purged == active[1].purged
        assert copy[1].state is State.REPLICA
        await copy.stop()
        await active.stop()

    run(main)


def test_a_replica_that_was_away_streams_only_what_it_missed(tmp_path: Path) -> None:
    async def main() -> None:
        active, copy = await two(tmp_path)
        fill(active, 400, text=b"x" * 1000)
        copy.follow(active)
        await equal(active, copy)
        await copy.stop()
        for store in active.bucket.partitions:
            store.write(b"missed", b"y" * 50)
        copy = await Member(tmp_path / "b", node_id=REPLICA).start()
        copy.follow(active)
        await equal(active, copy)
        received = copy.node.counters.replica_bytes
        assert 0 < received < 4 * 1000, "four changes of about a hundred bytes, and the answers"
        await copy.stop()
        await active.stop()

    run(main)


def test_a_replica_that_diverged_rolls_back_to_the_common_point_and_logs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        active, copy = await two(tmp_path)
        fill(active)
        copy.follow(active)
        await equal(active, copy)
        point = copy[0].high
        # The copy is promoted, and both sides take writes: two histories from here on.
        await copy.lead([0], epoch=2, branch=fresh_branch())
        copy[0].write(b"only here", b"x")
        active[0].write(b"only there", b"y")
        await active.lead(epoch=3)
        copy.follow(active, epoch=3)
        with caplog.at_level(logging.WARNING):
            await equal(active, copy)
        assert copy[0].read(b"only here") is None
        assert f"partition 0: the copy rolls back {point + 1} → {point}, as node-a requires" in caplog.text
        assert f"the histories diverge at {point}" in caplog.text
        assert copy.node.counters.replica_rollbacks == 1
        await copy.stop()
        await active.stop()

    run(main)


def test_a_replica_that_diverged_rolls_back_once_it_may(tmp_path: Path) -> None:
    async def main() -> None:
        active, copy = await two(tmp_path)
        fill(active)
        copy.follow(active)
        await equal(active, copy)
        asked: list[int] = []
        allowed = asyncio.Event()

        def may_roll_back(partition: Partition) -> bool:
            assert copy[0].read(b"only here") is not None
            asked.append(partition)
            if len(asked) == 3:
                allowed.set()
            return allowed.is_set()

        copy.links.may_roll_back = may_roll_back
        await copy.lead([0], epoch=2, branch=fresh_branch())
        copy[0].write(b"only here", b"x")
        await active.lead(epoch=3)
        copy.follow(active, epoch=3)
        await equal(active, copy)
        assert asked == [0, 0, 0]
        assert copy[0].read(b"only here") is None
        await copy.stop()
        await active.stop()

    asyncio.run(main())


def test_a_promotion_to_the_past_of_the_active_copy_reaches_the_replica(tmp_path: Path) -> None:
    async def main() -> None:
        active, copy = await two(tmp_path)
        fill(active)
        copy.follow(active)
        await equal(active, copy)
        await promotion.promote(active.node, active[2], Seqno(active[2].high - 3), branch=fresh_branch())
        active[2].write(b"next", b"branch")
        await equal(active, copy)
        await copy.stop()
        await active.stop()

    run(main)


def test_a_copy_filled_from_zero_resumes_every_consumer_that_its_source_would(tmp_path: Path) -> None:
    """It has the purge seqno of its source: a failover to it rolls no consumer back."""

    async def main() -> None:
        active, copy = await two(tmp_path)
        fill(active)
        active[0].delete(b"key-0")
        copy.follow(active)
        await equal(active, copy)
        assert [store.purged for store in copy.bucket.partitions] == [0] * 4
        assert len(copy[0].items) == len(active[0].items), "the tombstone is there"
        seen = Position.at(active[0].log.branch, Seqno(2))
        await copy.lead(epoch=2, branch=fresh_branch())
        high, purged = Seqno(copy[0].high), Seqno(copy[0].purged)
        assert decide(seen, copy[0].log, high=high, purged=purged) == Resume(seen)
        await copy.stop()
        await active.stop()

    run(main)


def test_a_stream_of_an_older_epoch_ends_and_what_it_brought_is_not_acknowledged(tmp_path: Path) -> None:
    async def main() -> None:
        active, copy = await two(tmp_path)
        fill(active)
        copy.follow(active)
        await equal(active, copy)
        link, held = copy.links.links[active.id], active.copies[Partition(3)].held
        await until(lambda: held(copy.id) == active[3].high)
        link.unwritten.reached(Partition(3), Seqno(1))  # as if a snapshot had just been received
        copy.links.replicate(Partition(3), entry(2), active.address)
        assert link.unwritten.take(2**60)[1] == b""
        active[3].write(b"k", b"v")
        await until(lambda: active[3].written == active[3].high)
        assert difference(active[3], copy[3]), "the active node is in another epoch"
        await active.lead([3], epoch=2)
        await equal(active, copy)
        await until(lambda: active.copies[Partition(3)].held(copy.id) == active[3].high)
        await copy.stop()
        await active.stop()

    run(main)


def test_a_partition_whose_stream_ends_while_it_is_stopped_interrupts_no_other(tmp_path: Path) -> None:
    """As in a handover: the source ends the stream, and the destination stops it, before the next map."""

    async def main() -> None:
        active, copy = await two(tmp_path)
        fill(active)
        copy.follow(active)
        await equal(active, copy)
        active.copies.pop(Partition(3))
        active.replication.retire(Partition(3))
        copy.links.stop(Partition(3))
        active[0].write(b"later", b"live")
        await until(lambda: not difference(active[0], copy[0]))
        await until(lambda: not copy.links.links[active.id]._ending)
        active[1].write(b"later", b"live")
        await until(lambda: not difference(active[1], copy[1]))
        assert copy.node.counters.replica_connections == 1
        await copy.stop()
        await active.stop()

    run(main)


def test_the_log_of_a_refused_partition_is_a_sentence_without_the_map(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        other = await Member(tmp_path / "a").start()
        copy = await Member(tmp_path / "b", node_id=REPLICA).start()
        with caplog.at_level(logging.INFO):
            copy.follow(other)
            await until(lambda: "does not send it yet" in caplog.text)
        assert "node-a does not send it yet: it is not the active copy there" in caplog.text
        assert "vBucketServerMap" not in caplog.text
        await copy.stop()
        await other.stop()

    run(main)


def test_a_link_opens_again_when_the_active_node_is_back(tmp_path: Path) -> None:
    async def main() -> None:
        active, copy = await two(tmp_path)
        fill(active)
        copy.follow(active)
        await equal(active, copy)
        link, port = copy.links.links[ACTIVE], active.node.port
        await active.crash()
        await until(lambda: link.state is not LinkState.OPEN)
        active = await Member(tmp_path / "a", port=port).start()
        await active.lead()
        fill(active, text=b"again")
        await equal(active, copy)
        assert copy.node.counters.replica_connections >= 2
        await copy.stop()
        await active.stop()

    run(main)


def test_a_partition_that_is_replicated_from_another_node_continues_there(tmp_path: Path) -> None:
    async def main() -> None:
        active, copy = await two(tmp_path)
        third = await Member(tmp_path / "c", node_id=THIRD).start()
        fill(active)
        copy.follow(active)
        third.follow(active)
        await equal(active, copy)
        await equal(active, third)
        await copy.lead(epoch=2, branch=fresh_branch())
        fill(copy, text=b"second epoch")
        third.follow(copy, epoch=2)
        await equal(copy, third)
        assert list(third.links.links) == [copy.id]
        for member in (third, copy, active):
            await member.stop()

    run(main)


def test_a_replica_answers_reads_of_copies_only(tmp_path: Path) -> None:
    async def main() -> None:
        active, copy = await two(tmp_path)
        number = partition_of(b"k", 4)
        active[number].write(b"k", b"v")
        copy.follow(active)
        await equal(active, copy)

        def ask() -> tuple[int, bytes, int]:
            with Peer(("127.0.0.1", copy.node.port)) as peer:
                read = peer.get(b"k", partition=number)
                replica = peer.ask(Opcode.GET_REPLICA, key=b"k", partition=number)
                return replica.status, replica.value, read.status

        assert await asyncio.to_thread(ask) == (0, b"v", 7)
        await copy.stop()
        await active.stop()

    run(main)


def test_statistics_of_both_nodes_show_how_far_a_replica_is(tmp_path: Path) -> None:
    async def main() -> None:
        active, copy = await two(tmp_path)
        fill(active)
        copy.follow(active)
        await equal(active, copy)
        tracked = active.copies.values()
        await until(lambda: all(one.held(copy.id) == one.durable for one in tracked))

        def ask(member: Member) -> dict[str, str]:
            with Peer(("127.0.0.1", member.node.port)) as peer:
                return peer.stats()

        shown, others = await asyncio.to_thread(ask, copy), await asyncio.to_thread(ask, active)
        names = ("replica_streams", "replica_changes", "replica_connections", "replica_bytes_unwritten")
        assert [shown[name] for name in names] == ["4", "40", "1", "0"]
        assert int(shown["replica_bytes"]) > 40 * 60
        assert int(shown["replica_acknowledgements"]) >= 1
        assert others["replication_lag"] == "40", "of the third node in the map, which has nothing"
        assert others["replica_streams"] == "0"
        for number in range(4):
            copy.links.stop(Partition(number))
        assert (await asyncio.to_thread(ask, copy))["replica_streams"] == "0"
        await copy.stop()
        await active.stop()

    run(main)


def test_the_window_bounds_what_a_replica_with_a_slow_disk_has_received(tmp_path: Path) -> None:
    async def main() -> None:
        disk, window = Held(), 256 << 10
        active, copy = await two(tmp_path, disk=disk, replica=ReplicaSettings(window=window))
        copy.follow(active)
        await equal(active, copy)
        await copy.bucket.saved()
        link = copy.links.links[ACTIVE]
        disk.hold()
        fill(active, 400, text=b"x" * 10_000)
        sessions = [connection.stream_session for connection in active.node.connections.values()]
        (session,) = [one for one in sessions if one is not None and one.streams]
        under_way = session.window
        await until(lambda: under_way.full and link.unwritten.size + link._acks.owed >= under_way.under_way)
        assert window // 2 <= link.unwritten.size <= 2 * window
        held = {number: tracker.held(REPLICA) for number, tracker in active.copies.items()}
        assert set(held.values()) == {0}, "nothing that was written since is on its disk"
        disk.released.set()
        await equal(active, copy)
        await until(lambda: all(active.copies[n].held(REPLICA) == active[n].high for n in held))
        await until(lambda: link.unwritten.size == 0)  # the end of a snapshot may come after its changes
        await copy.stop()
        await active.stop()

    run(main)


def test_the_pace_of_copies_does_not_hold_back_a_replica_that_writes_wait_for(tmp_path: Path) -> None:
    waited_for = PartitionEntry(Epoch(1), ACTIVE, (REPLICA,), frozenset((ACTIVE, REPLICA)))

    async def main() -> None:
        active, copy = await two(tmp_path)
        fill(active)
        await active.bucket.saved()
        for number in (1, 3):  # the queue has both kinds in turn
            written = Seqno(active[number].written)
            active.copies[Partition(number)] = ActiveCopy(ACTIVE, waited_for, written, BucketSettings())
        pace, limit = active.replication.pace, [1]
        pace.rate = lambda: limit[0] or None
        pace.sent(10_000)  # at one byte per second nothing more may be sent for hours
        copy.follow(active)
        await until(lambda: all(active.copies[Partition(n)].watermark == active[n].high for n in (1, 3)))
        assert copy[0].high == copy[2].high == 0, "these are copies that no write waits for"
        active[1].write(b"meanwhile", b"x")
        await until(lambda: active.copies[Partition(1)].watermark == active[1].high)
        assert copy[0].high == copy[2].high == 0
        limit[0] = 0
        await equal(active, copy)
        await copy.stop()
        await active.stop()

    run(main)

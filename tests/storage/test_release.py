"""The queue between the local disk and the release of batches: order, levels, withdrawal, failure."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection

import pytest

from tests.disks import Faulty
from tests.storage.conftest import Open
from upper import kernel
from upper.errors import NotWritable
from upper.history.partition_state import Ownership
from upper.model.values import Seqno, State
from upper.storage import (
    BucketStore,
    Commit,
    Durability,
    PartitionStore,
    StorageSettings,
    records,
    release,
)

pytestmark = pytest.mark.usefixtures("either_kernel")


class Watermarks:
    """A gate that opens up to seqnos that the test sets, for the partitions that it names."""

    def __init__(self, *partitions: int) -> None:
        self.marks = dict.fromkeys(partitions, 0)

    def held(self, reached: Collection[tuple[PartitionStore, int]]) -> list[tuple[PartitionStore, int]]:
        return [entry for entry in reached if entry[0].id in self.marks]

    def opens(self, held: Collection[tuple[PartitionStore, int]]) -> bool:
        return all(self.marks[store.id] >= seqno for store, seqno in held)


def quiet(durability: Durability) -> StorageSettings:
    return StorageSettings(compact=False, sweep_every=3600.0, durability=durability)


@pytest.mark.parametrize("durability", Durability)
def test_batches_wait_for_the_gate_and_are_released_in_order(opened: Open, durability: Durability) -> None:
    bucket = opened(quiet(durability))
    gate = Watermarks(0, 1)
    written: list[int] = []
    released: list[tuple[int, list[int]]] = []
    bucket.releases.install(gate)
    bucket.subscribe(lambda commit: written.append(commit.ticket), written=True)
    bucket.subscribe(
        lambda commit: released.append((commit.ticket, [store.durable for store in bucket.partitions[:2]]))
    )
    zero, one = bucket.partitions[:2]
    first = bucket.ticket
    for store in (zero, one, zero):
        store.write(b"k", b"v")
        bucket.commit()
    assert written == [first, first + 1, first + 2]
    assert (zero.written, one.written) == (2, 1)
    assert (zero.durable, one.durable, released) == (0, 0, [])
    gate.marks[1] = 1
    bucket.releases.release()
    assert released == [], "the batch before it still waits"
    gate.marks[0] = 1
    bucket.releases.release()
    assert released == [(first, [1, 0]), (first + 1, [1, 1])]
    gate.marks[0] = 2
    bucket.releases.release()
    assert released[2:] == [(first + 2, [2, 1])]


def test_partitions_that_the_gate_does_not_name_delay_nothing_and_fill_no_queue(opened: Open) -> None:
    bucket = opened()
    gate = Watermarks(0)
    released: list[Commit] = []
    bucket.releases.install(gate)
    bucket.subscribe(released.append)
    bucket.partitions[1].write(b"k", b"v")
    bucket.commit()
    assert [commit.ticket for commit in released] == [bucket.done]
    bucket.partitions[0].write(b"k", b"v")
    bucket.commit()
    for _ in range(20):
        bucket.partitions[1].write(b"k", b"v")
        bucket.commit()
    assert len(released) == 1
    assert len(bucket.releases) == 2, "the batch that waits, and one for all that follow it"
    assert bucket.partitions[1].durable == 21
    gate.marks[0] = 1
    bucket.releases.release()
    assert released[-1].ticket == bucket.done


def test_a_history_that_ends_here_is_withdrawn_and_its_changes_stay_unconfirmed(opened: Open) -> None:
    bucket = opened()
    gate = Watermarks(0, 1)
    released: list[Commit] = []
    bucket.releases.install(gate)
    bucket.subscribe(released.append)
    bucket.partitions[0].write(b"lost", b"v")
    bucket.partitions[1].write(b"kept", b"v")
    bucket.commit()
    gate.marks[1] = 1
    assert bucket.releases.withdraw(bucket.partitions[0]) == bucket.done
    bucket.releases.release()
    (commit,) = released
    assert commit.error is None
    assert len(commit.records) == 1
    assert (bucket.partitions[0].durable, bucket.partitions[1].durable) == (0, 1)


def test_a_partition_that_is_handed_over_fails_no_response_to_what_every_copy_has(opened: Open) -> None:
    bucket = opened()
    zero, one = bucket.partitions[:2]
    gate = Watermarks(0, 1)
    released: list[Commit] = []
    bucket.releases.install(gate)
    bucket.subscribe(released.append)
    for _ in range(2):
        zero.write(b"moves", b"v")
        one.write(b"stays", b"v")
        bucket.commit()
    gate.marks[0] = 1
    assert bucket.releases.withdraw(zero) == bucket.done, "the first batch is released"
    assert (zero.durable, released) == (1, [])
    gate.marks[1] = 2
    bucket.releases.release()
    assert [len(commit.records) for commit in released] == [1, 1], "its streams have ended"
    assert (zero.durable, one.durable) == (1, 2)


def test_a_history_that_ends_before_its_batch_is_on_disk_stays_unconfirmed(opened: Open) -> None:
    bucket = opened()
    gate = Watermarks(0, 1)
    bucket.releases.install(gate)
    for value in (b"1", b"2"):
        bucket.partitions[0].write(b"k", value)
        if value == b"1":
            bucket.commit()
    gate.marks[0] = 1
    assert bucket.releases.withdraw(bucket.partitions[0]) == bucket.ticket
    assert bucket.releases.withdraw(bucket.partitions[1]) == bucket.ticket + 1, "it has no change"


def test_a_rollback_takes_unreleased_changes_out_of_the_queue(opened: Open) -> None:
    bucket = opened()
    store = bucket.partitions[0]
    store.write(b"k", b"v")
    bucket.commit()
    gate = Watermarks(0)
    bucket.releases.install(gate)
    store.write(b"unreleased", b"v")
    bucket.commit()
    assert (store.written, store.durable) == (2, 1)
    store.rollback(Seqno(1))
    assert (store.high, store.written, store.durable) == (1, 1, 1)
    gate.marks[0] = 2
    bucket.releases.release()
    assert store.durable == 1
    assert len(bucket.releases) == 0


def test_a_failed_batch_is_reported_after_the_batches_that_wait_before_it(opened: Open) -> None:
    disk = Faulty("fdatasync")
    bucket = opened(quiet(Durability.DISK), disk=disk)
    gate = Watermarks(0)
    written: list[tuple[int, bool]] = []
    released: list[tuple[int, bool]] = []
    bucket.releases.install(gate)
    bucket.subscribe(lambda commit: written.append((commit.ticket, commit.error is None)), written=True)
    bucket.subscribe(lambda commit: released.append((commit.ticket, commit.error is None)))
    store = bucket.partitions[0]
    store.write(b"good", b"v")
    bucket.commit()
    good = bucket.done
    disk.armed = True
    store.write(b"bad", b"v")
    with pytest.raises(NotWritable):
        bucket.commit()
    assert written == [(good, True), (good + 1, False)]
    assert released == []
    assert (store.high, store.written, store.durable) == (1, 1, 0), "reading it again exposes nothing"
    gate.marks[0] = 1
    bucket.releases.release()
    assert released == [(good, True), (good + 1, False)]
    assert store.durable == 1


def test_waiting_for_the_disk_does_not_wait_for_the_release(opened: Open) -> None:
    bucket = opened()
    bucket.releases.install(Watermarks(0))

    async def wait() -> None:
        bucket.attach(asyncio.get_running_loop())
        bucket.partitions[0].write(b"k", b"v")
        await asyncio.wait_for(bucket.saved(), 30)
        assert bucket.partitions[0].durable == 0
        bucket.close()

    asyncio.run(wait())


async def turns() -> None:
    """Let the loop run everything that is due now, and what that makes due."""
    for _ in range(5):
        await asyncio.sleep(0)


def wait_for_replicas(bucket: BucketStore, gate: Watermarks, *, changes: int) -> None:
    """Store this many changes of partition 0 that the gate does not let pass."""
    bucket.partitions[1].set_state(State.REPLICA)
    bucket.releases.install(gate)
    for number in range(changes):
        bucket.partitions[0].write(b"%d" % number, b"v")
    bucket.commit()
    bucket.attach(asyncio.get_running_loop())
    assert bucket.releases.waiting == changes
    assert not bucket.pending


def test_a_batch_grows_while_more_changes_wait_for_replicas(opened: Open) -> None:
    """Until there are as many in it, or those are released."""
    bucket, gate = opened(), Watermarks(0)
    store = bucket.partitions[0]

    async def write() -> None:
        wait_for_replicas(bucket, gate, changes=100)
        first = bucket.ticket
        for number in range(99):
            store.write(b"%d" % number, b"w")
        await turns()
        assert (bucket.ticket, len(bucket.pending)) == (first, 99)
        gate.marks[0] = 100
        bucket.releases.release()
        async with asyncio.timeout(30):
            while bucket.ticket == first:  # noqa: ASYNC110  it waits a moment for the clients of the others
                await asyncio.sleep(0)
        await asyncio.wait_for(bucket.saved(first), 30)
        assert bucket.releases.waiting == 99
        for number in range(99):
            store.write(b"%d" % number, b"x")
        await turns()
        assert bucket.ticket == first + 2, "as many as wait"
        bucket.close()

    asyncio.run(write())


def apply_change(bucket: BucketStore) -> None:
    change = kernel.join([records.mutation(1, b"k", b"v", seqno=1, revision=1, cas=1)], 1)
    bucket.apply(change, 0, bucket.partitions, bytearray((0, kernel.INSIDE)), bytearray())


def wait_for_disk(bucket: BucketStore) -> None:
    bucket.partitions[0].write(b"k", b"w")
    bucket.saved().cancel()


def roll_back_another(bucket: BucketStore) -> None:
    bucket.partitions[0].write(b"k", b"w")
    bucket.rollbacks._new(bucket.partitions[1], Seqno(0), Ownership.DEAD, None)


def change_state(bucket: BucketStore) -> None:
    bucket.partitions[1].set_state(State.DEAD)


def write_keys(store: PartitionStore, count: int) -> None:
    for number in range(count):
        store.write(b"%d" % number, b"w")


@pytest.mark.parametrize(("already", "enough"), [(0, 80), (10, 90)])
def test_a_batch_waits_for_the_next_changes_of_clients_whose_changes_were_released(
    opened: Open, monkeypatch: pytest.MonkeyPatch, already: int, enough: int
) -> None:
    monkeypatch.setattr(release, "PATIENCE", 3600.0)
    bucket, gate = opened(), Watermarks(0)
    store = bucket.partitions[0]

    async def write() -> None:
        wait_for_replicas(bucket, gate, changes=100)
        first = bucket.ticket
        write_keys(store, already)
        gate.marks[0] = 100
        bucket.releases.release()
        write_keys(store, enough - already - 1)
        await turns()
        assert (bucket.ticket, len(bucket.pending)) == (first, enough - 1)
        write_keys(store, 1)
        await turns()
        assert bucket.ticket == first + 1
        bucket.close()

    asyncio.run(write())


def test_a_batch_does_not_wait_for_a_few_clients_nor_without_replicas(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "PATIENCE", 3600.0)
    bucket, gate = opened(), Watermarks(0)
    store = bucket.partitions[0]

    async def write() -> None:
        wait_for_replicas(bucket, gate, changes=63)
        gate.marks[0] = 2**60  # from here on no batch waits for replicas
        bucket.releases.release()
        for size in (1, 200, 1):
            first = bucket.ticket
            write_keys(store, size)
            await turns()
            assert bucket.ticket == first + 1
            await asyncio.wait_for(bucket.saved(first), 30)
        bucket.close()

    asyncio.run(write())


def test_fewer_batches_wait_for_clients_that_do_not_send_again() -> None:
    requests = release.NextRequests()
    waited = []
    for ticket in range(1, 200):
        if requests.released(100, ticket, 0):
            waited.append(ticket)
            assert requests.missing(ticket, 79)
            requests.over(ticket, ticket, 79)
            assert not requests.missing(ticket, 79)
    assert waited == [1, 3, 7, 15, 31, 63, 127, 191]


def test_batches_wait_again_once_clients_send_again() -> None:
    requests = release.NextRequests()
    for ticket in (1, 2, 3):
        if requests.released(100, ticket, 0):
            requests.over(ticket, ticket, 0)
    tickets = iter(range(4, 100))
    while not requests.released(100, ticket := next(tickets), 0):
        pass
    requests.over(ticket, ticket + 1, 0)  # it has begun in the meantime
    assert requests.released(100, ticket + 1, 0)
    requests.over(ticket + 1, ticket + 1, 90)  # enough arrived, and the disk is busy
    assert requests.released(100, ticket + 2, 0)


def test_a_second_release_does_not_shorten_the_wait_for_the_first() -> None:
    requests = release.NextRequests()
    assert requests.released(1000, 1, 0)
    assert not requests.released(100, 1, 10), "one wait for each batch"
    assert requests.missing(1, 799)
    assert not requests.missing(1, 800)
    assert not requests.missing(2, 0)


@pytest.mark.parametrize("seed", range(20))
def test_no_batch_waits_for_clients_without_an_end(seed: int) -> None:
    """Whatever is released while a batch is open or its predecessor is on its way to the disk."""
    chance, requests = random.Random(seed), release.NextRequests()
    ticket, pending, waited = 1, 0, 0
    timers: list[int] = []
    for _ in range(5_000):
        match chance.randrange(4):
            case 0:
                if requests.released(chance.choice((10, 100, 300)), ticket, pending):
                    timers.append(ticket)
            case 1 if timers:
                requests.over(timers.pop(0), ticket, pending)
            case 2:
                pending += chance.choice((1, 50, 200))
            case 3 if not requests.missing(ticket, pending):
                ticket, pending = ticket + 1, 0
        if requests.missing(ticket, pending):
            waited += 1
            assert ticket in timers
    assert waited


def test_a_batch_whose_clients_have_sent_does_not_wait_for_ever_after_another_release(opened: Open) -> None:
    bucket, gate = opened(), Watermarks(0)
    store = bucket.partitions[0]

    async def write() -> None:
        wait_for_replicas(bucket, gate, changes=100)
        first = bucket.ticket
        write_keys(store, 300)
        await asyncio.wait_for(bucket.saved(first), 30)
        assert bucket.releases.waiting == 400
        second = bucket.ticket
        gate.marks[0] = 100
        bucket.releases.release()
        write_keys(store, 80)  # as many as are waited for; 300 are still held up
        await asyncio.sleep(2 * release.PATIENCE)  # longer than that wait takes
        assert bucket.ticket == second
        gate.marks[0] = 400
        bucket.releases.release()
        async with asyncio.timeout(30):
            while bucket.ticket == second:  # noqa: ASYNC110
                await asyncio.sleep(0)
        bucket.close()

    asyncio.run(write())


@pytest.mark.parametrize("released", [False, True], ids=["waiting", "released"])
@pytest.mark.parametrize("change", [apply_change, wait_for_disk, roll_back_another, change_state])
def test_what_another_node_or_a_rollback_waits_for_does_not_wait_for_replicas(
    opened: Open, monkeypatch: pytest.MonkeyPatch, change: Callable[[BucketStore], None], released: bool
) -> None:
    """Two nodes that wait for each other's changes would otherwise both wait for ever."""
    monkeypatch.setattr(release, "PATIENCE", 3600.0)
    bucket, gate = opened(), Watermarks(0)

    async def write() -> None:
        wait_for_replicas(bucket, gate, changes=100)
        first = bucket.ticket
        if released:
            gate.marks[0] = 100
            bucket.releases.release()
        change(bucket)
        await turns()
        assert bucket.ticket == first + 1
        bucket.close()

    asyncio.run(write())


def test_in_memory_mode_changes_that_the_disk_refused_wait_for_the_gate_too(opened: Open) -> None:
    disk = Faulty("write")
    bucket = opened(quiet(Durability.MEMORY), disk=disk)
    gate = Watermarks(0)
    released: list[Commit] = []
    bucket.releases.install(gate)
    bucket.subscribe(released.append)
    store = bucket.partitions[0]

    def write_more(commit: Commit) -> None:
        """While the first batch is on its way to the disk."""
        if store.high == 1:
            store.write(b"second", b"v")

    bucket.subscribe(write_more, written=True)
    disk.armed = True
    store.write(b"first", b"v")
    with pytest.raises(NotWritable):
        bucket.commit()
    assert (store.high, store.written, store.durable) == (2, 2, 0)
    assert released == []
    gate.marks[0] = 2
    bucket.releases.release()
    assert [len(commit.records) for commit in released] == [1, 1]
    assert store.durable == 2

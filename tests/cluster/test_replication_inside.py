"""A replica that stops inside a snapshot resumes there, unless the history has branched since."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.replicas import ACTIVE, REPLICA, Member, equal, run, until
from upper.cluster.replica_connection import ReplicaSettings
from upper.model.values import Partition, Seqno
from upper.server import promotion
from upper.storage import fresh_branch

SLOW = ReplicaSettings(window=64 << 10)  # the active node waits for the replica's disk again and again
ITEMS = 1500
SIZE = ITEMS * 1000


async def begun(path: Path) -> tuple[Member, Member]:
    """An active node, and a replica that has received a part of a large snapshot."""
    active = await Member(path / "a", partitions=1).start()
    await active.lead()
    for number in range(ITEMS):
        active[0].write(b"key-%d" % number, b"x" * 1000)
    await until(lambda: active[0].durable == ITEMS)
    copy = await Member(path / "b", node_id=REPLICA, partitions=1, replica=SLOW).start()
    copy.follow(active)
    await until(lambda: copy[0].incoming is not None and copy[0].written)
    return active, copy


async def ended(active: Member, copy: Member) -> None:
    await equal(active, copy)
    assert (copy[0].incoming, copy[0].complete) == (None, active[0].high)
    await copy.stop()
    again = await Member(copy.bucket.directory, node_id=REPLICA, partitions=1).start()
    assert (again[0].high, again[0].complete, again[0].incoming) == (active[0].high, active[0].high, None)
    await again.stop()
    await active.stop()


@pytest.mark.parametrize("changes", [1, 3], ids=["one change more", "three changes more"])
def test_a_connection_that_breaks_inside_a_snapshot_resumes_there(tmp_path: Path, changes: int) -> None:
    async def main() -> None:
        active, copy = await begun(tmp_path)
        link = copy.links.links[ACTIVE]
        link._failed(ConnectionResetError("the test cut it"))
        assert 0 < copy[0].high < ITEMS
        for number in range(changes):
            active[0].write(b"key-%d" % (ITEMS - 1 - number), b"changed")
        await equal(active, copy)
        assert copy.node.counters.replica_bytes < 1.5 * SIZE, "what it had was not sent again"
        assert copy.node.counters.replica_rollbacks == 0
        await ended(active, copy)

    run(main)


def test_a_replica_that_was_killed_inside_a_snapshot_resumes_there(tmp_path: Path) -> None:
    async def main() -> None:
        active, copy = await begun(tmp_path)
        await copy.crash()
        copy = await Member(tmp_path / "b", node_id=REPLICA, partitions=1).start()
        had = copy[0].high
        assert copy[0].incoming is not None
        assert copy[0].complete == 0
        assert had > 0
        copy.follow(active)
        await equal(active, copy)
        assert copy.node.counters.replica_bytes < (ITEMS - had) * 1100 + 2000
        assert copy[0].purged == 0
        await ended(active, copy)

    run(main)


@pytest.mark.parametrize("back", [0, 5])
def test_a_branch_takes_a_replica_inside_a_snapshot_back_to_its_start(tmp_path: Path, back: int) -> None:
    """The snapshot may have had only the newer version of a key that the branch does not have."""

    async def main() -> None:
        active, copy = await begun(tmp_path)
        copy.links.links[ACTIVE]._failed(ConnectionResetError("the test cut it"))
        to = Seqno(active[0].high - back) if back else None
        await promotion.promote(active.node, active[0], to, branch=fresh_branch())
        active[0].write(b"of the branch", b"x")
        await equal(active, copy)
        assert copy.node.counters.replica_rollbacks == 1
        await ended(active, copy)

    run(main)


@pytest.mark.parametrize("left", [0, 1, 3])
def test_a_rest_that_arrives_as_one_snapshot_ends_the_one_that_was_open(tmp_path: Path, left: int) -> None:
    async def main() -> None:
        active = await Member(tmp_path / "a", partitions=1).start()
        await active.lead()
        for number in range(10):
            active[0].write(b"key-%d" % number, b"value")
        await until(lambda: active[0].written == 10)  # a replica has nothing that the active copy may lose
        copy = await Member(tmp_path / "b", node_id=REPLICA, partitions=1).start()
        copy.replication.retire(Partition(0))
        copy[0].set_log(active[0].log)
        copy[0].begin_snapshot(purged=Seqno(0))
        copy[0].apply([bytes(entry) for entry in list(active[0].items.values())[: 10 - left]])
        copy.follow(active)
        await ended(active, copy)

    run(main)

"""Random changes, failures and restarts: in the end the replica is what the active copy is.

The seed is printed by a failure; UPPER_REPLICATION_SEED repeats its choices (not the interleaving).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

import pytest

from tests.cluster.replicas import REPLICA, Member, equal, run
from upper.errors import UpperError
from upper.model.values import Seqno
from upper.server import promotion
from upper.storage import StorageSettings, fresh_branch

KEYS = [b"key-%d" % number for number in range(30)]
SEEDS = [int(os.environ["UPPER_REPLICATION_SEED"])] if "UPPER_REPLICATION_SEED" in os.environ else range(6)
SMALL = StorageSettings(segment_size=4096, memory_quota=20_000)


class World:
    """An active node and its replica, and what happens to them."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.chance = path, random.Random(seed)
        self.active: Member
        self.copy: Member

    async def start(self) -> None:
        self.active = await Member(self.path / "a", storage=SMALL).start()
        await self.active.lead()
        self.copy = await self._copy()

    async def _copy(self) -> Member:
        copy = await Member(self.path / "b", node_id=REPLICA, storage=SMALL).start()
        copy.follow(self.active)
        return copy

    async def step(self) -> None:
        choice = self.chance.random()
        if choice < 0.03:
            await self._restart_active()
        elif choice < 0.07:
            await self.copy.crash()
            self.copy = await self._copy()
        elif choice < 0.08:
            await self.copy.stop()
            self.copy = await self._copy()
        elif choice < 0.12:
            await self._promote()
        elif choice < 0.15:
            self.active.bucket.compact()
        elif choice < 0.17:
            for link in self.copy.links.links.values():
                link._failed(ConnectionResetError("the test cut it"))
        else:
            for _ in range(self.chance.choice((1, 1, 5, 60))):
                self._change()
        if self.chance.random() < 0.7:
            await asyncio.sleep(self.chance.choice((0, 0, 0.001, 0.01)))

    async def _restart_active(self) -> None:
        port = self.active.node.port
        await (self.active.crash() if self.chance.random() < 0.5 else self.active.stop())
        self.active = await Member(self.path / "a", port=port, storage=SMALL).start()
        await self.active.lead()

    async def _promote(self) -> None:
        store = self.chance.choice(self.active.bucket.partitions)
        to = None if self.chance.random() < 0.4 else Seqno(max(0, store.high - self.chance.randrange(20)))
        await promotion.promote(self.active.node, store, to, branch=fresh_branch())

    def _change(self) -> None:
        chance = self.chance
        store, key = chance.choice(self.active.bucket.partitions), chance.choice(KEYS)
        now = int(time.time())
        try:
            match chance.randrange(24):
                case 0:
                    store.flush()
                case 1:
                    store.lock(key, now + 100)
                case 2:
                    store.touch(key, now + chance.choice((-1, 1, 1000)))
                case 3:
                    store.write(key, b"expires", expiration=now + chance.choice((-1, 0, 1000)))
                    store.read(key)
                case 4:
                    new_cas, revision = chance.getrandbits(60), chance.randrange(1, 100)
                    store.write_meta(key, b"m", revision=revision, new_cas=new_cas, lock_time=now + 50)
                case 5:
                    expired, cas = chance.random() < 0.5, time.time_ns()  # an old one may be purged
                    store.write_meta(key, b"", revision=99, new_cas=cas, deleted=True, expired=expired)
                case 6 | 7 | 8 | 9:
                    store.delete(key)
                case 10:
                    store.write(key, b"x" * chance.randrange(9000), flags=chance.getrandbits(32))
                case _:
                    value = b"v" * chance.randrange(200)
                    store.write(key, value, data_type=chance.randrange(2))
        except UpperError:
            pass  # a missing key, a lock, an older revision: nothing changed


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_replica_that_lives_through_anything_ends_equal(tmp_path: Path, seed: int) -> None:
    async def main() -> None:
        world = World(tmp_path, seed)
        await world.start()
        for _ in range(120):
            await world.step()
        await equal(world.active, world.copy)
        await world.copy.crash()
        world.copy = await world._copy()
        await equal(world.active, world.copy)
        await world.copy.stop()
        await world.active.stop()

    run(main)

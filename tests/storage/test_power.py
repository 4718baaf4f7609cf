"""The power fails at any point: what was synced is there, and any part of the rest may be.

`Volatile` is a disk that remembers what has been synced: contents by file, names by directory. A power
failure leaves that, and a random part of everything else: all of it, a part, zeros, nothing. So a sync that
is missing, or comes too late, loses something here, which a killed process never shows. UPPER_POWER_SEEDS
sets how many runs are tried.
"""

from __future__ import annotations

import os
import random
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.disks import Watched, abandon
from tests.storage.conftest import Wall
from upper.history.partition_state import Ownership
from upper.model.values import BranchId, Seqno
from upper.storage import BucketStore, StorageSettings, journal
from upper.storage.check import check
from upper.storage.frames import SECTOR

SEEDS = int(os.environ.get("UPPER_POWER_SEEDS", "60"))
pytestmark = pytest.mark.usefixtures("either_kernel")
SETTINGS = StorageSettings(compact=False, segment_size=1024, disk_floor=16 << 10, purge_age=20)
ROOMY = replace(SETTINGS, segment_size=8 << 10, disk_floor=128 << 10)  # with more zeros ahead of the batches
Contents = list[dict[bytes, bytes] | None]  # None: whatever a partition held earlier
Histories = dict[tuple[int, int, int], dict[bytes, bytes]]  # partition, branch, seqno: what that means


class PowerCut(BaseException):
    """Nothing that runs after this reaches the disk."""


class Volatile(Watched):
    def __init__(self, calls: int, root: Path) -> None:
        there = [path for path in root.rglob("*") if path.is_file()]
        self.calls = calls  # how many more there are
        self._files = {path: number for number, path in enumerate(there)}  # what each name means now
        self._synced_names = dict(self._files)
        self._synced = {number: path.read_bytes() for path, number in self._files.items()}
        self._paths: dict[int, Path] = {}  # by descriptor
        self._made = len(there)
        self.directories: set[Path] = set()  # that were synced

    def identity(self, path: Path, *, changed: bool) -> str:
        return "the same disk"  # whose contents `left` writes to another directory

    def _count(self) -> None:
        if not self.calls:
            raise PowerCut
        self.calls -= 1

    def open(self, path: Path, flags: int) -> int:
        self._count()
        if flags & os.O_CREAT and path not in self._files:
            self._made += 1
            self._files[path] = self._made
        fd = super().open(path, flags)
        self._paths[fd] = path
        return fd

    def write(self, fd: int, data: bytes | memoryview) -> int:
        self._count()
        return super().write(fd, data)

    def truncate(self, fd: int, size: int) -> None:
        self._count()
        super().truncate(fd, size)

    def fdatasync(self, fd: int) -> None:
        self._count()
        path = self._paths[fd]
        self._synced[self._files[path]] = path.read_bytes()

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)
        self._files[target] = self._files.pop(source)
        self._paths.update({fd: target for fd, path in self._paths.items() if path == source})

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)
        self._files.pop(path, None)

    def sync_directory(self, path: Path) -> None:
        self._count()
        self.directories.add(path)
        here = {name: file for name, file in self._files.items() if name.parent == path}
        gone = [name for name in self._synced_names if name.parent == path and name not in here]
        for name in gone:
            del self._synced_names[name]
        self._synced_names |= here

    def left(self, root: Path, target: Path, chance: random.Random) -> None:
        """What is there when the power is back, in another directory."""
        for part in ("journal", "partitions"):
            (target / part).mkdir(parents=True)
        for name in sorted({*self._synced_names, *self._files}):
            synced, now = self._synced_names.get(name), self._files.get(name)
            file = synced if synced == now else chance.choice((synced, now))
            if file is None:
                continue
            content = self._synced.get(file, b"")
            if file == now and name.exists():
                content = self._maybe_more(content, name.read_bytes(), chance)
            (target / name.relative_to(root)).write_bytes(content)

    @staticmethod
    def _maybe_more(synced: bytes, written: bytes, chance: random.Random) -> bytes:
        match chance.randrange(5):
            case 4:  # sectors in any order, over what was there or over zeros
                size = chance.choice((len(synced), len(written)))
                found = bytearray(max(size, len(synced), len(written)))
                found[: len(synced)] = synced
                for at in range(0, len(written), SECTOR):
                    if chance.random() < 0.5:
                        piece = written[at : at + SECTOR]
                        found[at : at + len(piece)] = piece
                return bytes(found[:size])
            case 0:
                return written
            case 1 if written.startswith(synced):
                return written[: chance.randint(len(synced), len(written))]
            case 2 if written.startswith(synced):  # made longer before its bytes arrived
                return synced + bytes(len(written) - len(synced))
            case _:
                return synced


def contents(bucket: BucketStore) -> Contents:
    return [
        {key: item.value for key in list(store.items) if (item := store.read(key)) is not None}
        for store in bucket.partitions
    ]


def agree(bucket: BucketStore, histories: Histories) -> None:
    """A branch and a seqno always mean the same contents: a consumer that stands there may resume."""
    for store, held in zip(bucket.partitions, contents(bucket), strict=True):
        assert held is not None
        meant = histories.setdefault((store.id, store.log.branch, store.high), held)
        assert meant == held, f"partition {store.id} went another way under the same branch"


def live(
    bucket: BucketStore, chance: random.Random, wall: Wall, reported: list[Contents], histories: Histories
) -> None:
    """Whatever happens to a bucket. `reported`: what was acknowledged last, and what may be by now."""
    while True:
        wall.now += chance.random()
        store = chance.choice(bucket.partitions)
        match chance.randrange(12):
            case 0:
                store.flush()
            case 1 if store.high > 4:
                # Before its file has its name a rollback has not happened, afterwards it has.
                reported.append(
                    [
                        None if one is store else held
                        for one, held in zip(bucket.partitions, reported[0], strict=True)
                    ]
                )
                bucket.rollbacks.run(
                    store,
                    Seqno(store.high - chance.randrange(3)),
                    ownership=Ownership.ACTIVE,
                    branch=BranchId(chance.getrandbits(40) + 2),
                )
                reported[:] = [contents(bucket)]
            case 2:
                reported[1:] = [contents(bucket)]
                bucket.compact()
            case _:
                for _ in range(chance.randint(1, 5)):
                    key = b"k%d" % chance.randrange(12)
                    if chance.random() < 0.2 and store.read(key) is not None:
                        store.delete(key)
                    else:
                        value = bytes(chance.randint(1, 1500)) if chance.random() < 0.1 else b""
                        store.write(key, b"%d" % chance.randrange(1000) * chance.randint(1, 40) + value)
        reported[1:] = [contents(bucket)]
        bucket.commit()
        reported[:] = [contents(bucket)]
        agree(bucket, histories)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_was_acknowledged_is_there_when_the_power_is_back(
    tmp_path: Path, wall: Wall, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    if seed % 2:  # the zeros of the next segment are written while the present one is filled
        monkeypatch.setattr(journal, "CHUNK", 512)
    reported: list[Contents] = [[{}, {}]]
    histories: Histories = {}
    for cut in range(3):
        root, back = tmp_path / str(cut), tmp_path / str(cut + 1)
        disk = Volatile(chance.choice((chance.randint(1, 40), chance.randint(40, 400))), root)
        with suppress(PowerCut), ExitStack() as afterwards:
            settings = chance.choice((SETTINGS, ROOMY))
            bucket = BucketStore.open(root, settings, partitions=2, disk=disk, time_ns=wall)
            afterwards.callback(abandon, bucket)
            assert not bucket.opening.branched
            found = contents(bucket)
            assert any(
                all(wanted in (None, held) for held, wanted in zip(found, one, strict=True))
                for one in reported
            ), "something acknowledged is missing, or something is there that was never written"
            reported = [found]
            agree(bucket, histories)
            live(bucket, chance, wall, reported, histories)
        disk.left(root, back, chance)
        if (back / "bucket.json").exists():
            assert list(check(back)) == []
        else:
            assert reported == [[{}, {}]], "a bucket is gone of which something was acknowledged"


def test_a_directory_that_was_made_is_there_too(tmp_path: Path) -> None:
    disk = Volatile(1000, tmp_path)
    BucketStore.open(tmp_path / "new" / "data", SETTINGS, partitions=2, disk=disk).close()
    assert {tmp_path, tmp_path / "new"} <= disk.directories

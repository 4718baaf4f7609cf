"""Buckets in temporary directories, a clock that tests own, and both kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests.disks import abandon
from upper import kernel
from upper.storage import BucketStore, StorageSettings

QUIET = StorageSettings(compact=False)
FUNCTIONS = (
    "CommitGroups",
    "Log",
    "apply",
    "join",
    "latest",
    "reach",
    "replay",
    "run",
    "scan",
    "touched",
    "weigh",
    "writer",
)


class Wall:
    """A wall clock that moves only when a test moves it."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> int:
        return int(self.now * 1_000_000_000)


Open = Callable[..., BucketStore]


def twin(name: str) -> ModuleType:
    """One of the two kernels."""
    return import_module("upper.kernel.plain" if name == "plain" else "upper.kernel._compiled")


@pytest.fixture(params=["plain", "compiled"])
def either_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs once with each twin."""
    name: str = request.param
    try:
        chosen = twin(name)
    except ImportError:
        pytest.skip("the kernel was not compiled here")
    if name == "compiled" and kernel.Table is not chosen.Table:
        pytest.skip("partitions are made by the plain kernel here")
    for function in FUNCTIONS:
        monkeypatch.setattr(kernel, function, getattr(chosen, function))
    return name


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def opened(directory: Path, wall: Wall) -> Iterator[Open]:
    """`opened(...)`: the bucket of this test, opened (again); whatever is open at the end is closed."""
    buckets: list[BucketStore] = []

    def open_it(settings: StorageSettings = QUIET, **options: object) -> BucketStore:
        for bucket in buckets:
            bucket.close()
        options.setdefault("time_ns", wall)
        if not (directory / "bucket.json").exists():
            options.setdefault("partitions", 4)
        bucket = BucketStore.open(directory, settings, **options)  # type: ignore[arg-type]
        buckets.append(bucket)
        return bucket

    yield open_it
    for bucket in buckets:
        if not bucket.closed:
            abandon(bucket)


def fill(bucket: BucketStore, batches: int = 6) -> None:
    for batch in range(batches):
        for store in bucket.partitions:
            store.write(b"k%d" % batch, b"value %d of %d" % (batch, store.id))
        bucket.commit()


def contents(bucket: BucketStore) -> list[dict[bytes, bytes]]:
    return [
        {key: item.value for key in list(store.items) if (item := store.read(key)) is not None}
        for store in bucket.partitions
    ]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)

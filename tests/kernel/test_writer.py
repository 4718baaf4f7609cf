"""The kernel's writer: what lies in the file is the frame that `frames` would have made, and it is synced."""

from __future__ import annotations

import errno
import os
import resource
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.packets import change, changes
from upper.kernel import Log, Writer, plain
from upper.storage.frames import SECTOR, frame, journal_frame, open_frame

compiled = pytest.importorskip(
    "upper.kernel._compiled", reason="the compiled kernel was not built here; `make kernel` shows why"
)

RECORD = change(b"key", b"value")
LARGE = [change(b"large", bytes([size % 251]) * size) for size in (8191, 8192, 8193, 100_000)]
ZEROS = [change(b"zeros", b"0" * (size % 7) + bytes(size)) for size in (1, 500, 513, 2000, 9000)]


def log(*records: bytes) -> Log:
    """The compiled kernel writes its own logs."""
    made: Log = compiled.Log(records)
    return made


@pytest.fixture
def writer() -> Iterator[Writer]:
    made: Writer = compiled.writer()
    yield made
    made.close()


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        yield fd
    finally:
        os.close(fd)


def rings(writer: Writer, within: float = 0) -> bool:
    return bool(select.select([writer.fileno()], [], [], within)[0])


@pytest.mark.parametrize("waits", [False, True])
def test_a_batch_that_was_finished_does_not_ring_any_more(writer: Writer, waits: bool) -> None:
    with open(os.devnull, "wb") as null:  # written at once: `finish` is often called before the byte is sent
        for number in range(3000):
            writer.begin(null.fileno(), open_frame(number, 1), log(RECORD))
            assert not waits or rings(writer, 10)
            with pytest.raises(OSError, match="Invalid argument"):  # the device cannot be synced
                writer.finish()
            assert not rings(writer)


def test_the_time_of_a_batch_is_that_of_the_disk_whenever_the_batch_is_collected(
    writer: Writer, tmp_path: Path
) -> None:
    with opened(tmp_path / "log") as fd:
        began = time.perf_counter()
        for number in (1, 2):
            writer.begin(fd, open_frame(number, 1), log(*[RECORD] * 10_000))
        writer.rest()
        both = time.perf_counter() - began
        times = [writer.finish(), writer.finish()]
    assert all(each > 0 for each in times)
    assert sum(times) <= both


def test_without_a_compiler_there_is_none() -> None:
    assert plain.writer() is None


@given(
    st.lists(changes() | st.sampled_from(LARGE + ZEROS), max_size=40),
    st.integers(0, 2**48 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2 * SECTOR),
)
def test_it_writes_the_frame_that_readers_expect(
    tmp_path_factory: pytest.TempPathFactory, batch: list[bytes], number: int, clock: int, at: int
) -> None:
    path = tmp_path_factory.mktemp("writer") / "log"
    expected = journal_frame(number, clock, b"".join(batch), at)
    writer: Writer = compiled.writer()
    with opened(path) as fd:
        for _ in range(2):
            assert writer.begin(fd, open_frame(number, clock), log(*batch), at=at) == len(expected)
            writer.finish()
    writer.close()
    assert path.read_bytes() == expected * 2


def test_zeros_go_behind_a_frame_and_the_next_frame_replaces_them(writer: Writer, tmp_path: Path) -> None:
    frames = [frame(number, 0, RECORD * number) for number in range(1, 4)]
    fd = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    try:
        for number, zeros in ((1, 200_000), (2, 0), (3, 5)):
            writer.begin(fd, open_frame(number, 0), log(*[RECORD] * number), zeros)
            writer.finish()
            assert os.lseek(fd, 0, os.SEEK_CUR) == len(b"".join(frames[:number]))
    finally:
        os.close(fd)
    data = (tmp_path / "log").read_bytes()
    assert len(data) == len(frames[0]) + 200_000
    assert data.rstrip(b"\0") == b"".join(frames)


def test_zeros_of_the_next_file_follow_a_batch_that_was_written(writer: Writer, tmp_path: Path) -> None:
    path, size = tmp_path / "next", 3_000_000
    with opened(tmp_path / "log") as fd:
        following = os.open(path, os.O_RDWR | os.O_CREAT)
        for number in range(20):
            os.truncate(path, 0)
            os.pwrite(following, b"before", 0)
            writer.begin(fd, open_frame(number, 0), log(RECORD), next=following, start=6, ahead=size)
            writer.finish()
            writer.rest()
            assert path.read_bytes() == b"before" + bytes(size)
            assert os.lseek(following, 0, os.SEEK_CUR) == 0
        os.truncate(path, 0)
        full = os.open("/dev/full", os.O_WRONLY)
        writer.begin(full, open_frame(1, 0), log(RECORD), next=following, start=0, ahead=size)
        with pytest.raises(OSError, match="No space left"):
            writer.finish()
        writer.rest()
        assert not path.stat().st_size
        os.close(full)
        os.close(following)


def test_a_batch_is_written_where_there_is_no_room_for_zeros(writer: Writer, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with opened(tmp_path / "log") as fd:
            writer.begin(fd, open_frame(1, 0), log(RECORD), 5000)
            writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "log").read_bytes().rstrip(b"\0") == frame(1, 0, RECORD)


@given(st.binary(max_size=2000), st.integers(0, 300), st.integers(0, 2**32 - 1))
def test_its_checksum_is_that_of_zlib(data: bytes, start: int, before: int) -> None:
    for part in (data, memoryview(data)[start:], bytearray(data[start:])):
        assert compiled.crc32(part) == crc32(part)
        assert compiled.crc32(part, before) == crc32(part, before)


def test_its_file_becomes_readable_once_for_each_batch(writer: Writer, tmp_path: Path) -> None:
    with opened(tmp_path / "log") as fd:
        for number in range(50):
            assert not rings(writer)
            writer.begin(fd, open_frame(number, 0), log(RECORD))
            assert rings(writer, within=30)
            writer.finish()
        assert not rings(writer)


def test_a_failure_is_reported_once(writer: Writer, tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        writer.begin(full, open_frame(1, 0), log(RECORD))
        assert rings(writer, within=30)
        with pytest.raises(OSError, match="No space left") as caught:
            writer.finish()
        assert caught.value.errno == errno.ENOSPC
    finally:
        os.close(full)
    with opened(tmp_path / "log") as fd:
        writer.begin(fd, open_frame(2, 0), log(RECORD))
        writer.finish()
    assert (tmp_path / "log").read_bytes() == frame(2, 0, RECORD)


def test_a_sync_that_fails_is_reported(writer: Writer) -> None:
    reader, end = os.pipe()
    try:
        writer.begin(end, open_frame(1, 0), log(RECORD))  # a pipe can be written to, and not synced
        with pytest.raises(OSError, match="Invalid argument"):
            writer.finish()
        assert os.read(reader, 1000) == frame(1, 0, RECORD)
    finally:
        os.close(reader)
        os.close(end)


def test_a_write_that_stops_half_way_is_reported(writer: Writer, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with opened(tmp_path / "log") as fd:
            writer.begin(fd, open_frame(1, 0), log(change(b"k", bytes(2000))))
            with pytest.raises(OSError, match="File too large"):
                writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "log").stat().st_size == 1000


def test_one_batch_waits_behind_the_one_that_is_written(writer: Writer, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="nothing to finish"):
        writer.finish()
    with opened(tmp_path / "log") as fd:
        writer.begin(fd, open_frame(1, 0), log())
        writer.begin(fd, open_frame(2, 0), log(RECORD))
        with pytest.raises(RuntimeError, match="one behind it"):
            writer.begin(fd, open_frame(3, 0), log())
        writer.finish()
        writer.begin(fd, open_frame(3, 0), log())
        writer.finish()
        writer.finish()
        with pytest.raises(ValueError, match="32 bytes"):
            writer.begin(fd, b"short", log())
        with pytest.raises(TypeError, match="Log"):
            writer.begin(fd, open_frame(2, 0), [RECORD])  # type: ignore[arg-type]
    assert (tmp_path / "log").read_bytes() == frame(1, 0, b"") + frame(2, 0, RECORD) + frame(3, 0, b"")


@given(st.lists(st.booleans(), max_size=60))
def test_batches_are_written_and_ring_in_order_however_they_are_queued(
    tmp_path_factory: pytest.TempPathFactory, queued: list[bool]
) -> None:
    path = tmp_path_factory.mktemp("writer") / "log"
    writer: Writer = compiled.writer()
    waiting = 0
    with opened(path) as fd:
        for number, stays in enumerate(queued):
            writer.begin(fd, open_frame(number, 0), log(*[RECORD] * (number % 5)))
            waiting += 1
            while waiting > (1 if stays else 0):
                assert rings(writer, 30)
                writer.finish()
                waiting -= 1
                finished = number + 1 - waiting
                written = b"".join(frame(one, 0, RECORD * (one % 5)) for one in range(finished))
                assert path.read_bytes().startswith(written)
        if waiting:
            writer.finish()
        assert not rings(writer)
    writer.close()
    assert path.read_bytes() == b"".join(frame(n, 0, RECORD * (n % 5)) for n in range(len(queued)))


def test_a_batch_behind_one_that_failed_fails_with_it_and_is_not_written(
    writer: Writer, tmp_path: Path
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with opened(tmp_path / "log") as fd:
        for waits in (False, True) * 200:
            writer.begin(full, open_frame(1, 0), log(RECORD))
            writer.begin(fd, open_frame(2, 0), log(RECORD))
            assert not waits or rings(writer, 30)
            for _ in range(2):
                with pytest.raises(OSError, match="No space left"):
                    writer.finish()
            assert not rings(writer)
        assert not (tmp_path / "log").stat().st_size
        writer.begin(fd, open_frame(3, 0), log(RECORD))
        writer.finish()
    os.close(full)
    assert (tmp_path / "log").read_bytes() == frame(3, 0, RECORD)


def test_a_log_that_is_being_written_takes_no_records(writer: Writer, tmp_path: Path) -> None:
    batch = log(RECORD)
    with opened(tmp_path / "log") as fd:
        writer.begin(fd, open_frame(1, 0), batch)
        with pytest.raises(RuntimeError, match="being written"):
            batch.append(RECORD)
        writer.finish()
    assert list(batch) == [RECORD]


def test_closing_waits_for_what_is_under_way(tmp_path: Path) -> None:
    batch = [change(b"%d" % number, os.urandom(1000)) for number in range(20_000)]
    with opened(tmp_path / "log") as fd:
        writer: Writer = compiled.writer()
        writer.begin(fd, open_frame(1, 0), log(*batch))
        writer.close()
        writer.close()
        with pytest.raises(RuntimeError, match="closed"):
            writer.begin(fd, open_frame(2, 0), log())
    assert (tmp_path / "log").read_bytes() == frame(1, 0, b"".join(batch))


def test_deleting_it_ends_its_thread(tmp_path: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/task"))

    before = count()
    with opened(tmp_path / "log") as fd:
        writers: list[Writer] = [compiled.writer() for _ in range(5)]
        for writer in writers:
            writer.begin(fd, open_frame(1, 0), log(RECORD))
        del writer
        assert count() == before + 5
        writers.clear()
    assert count() == before
    assert (tmp_path / "log").read_bytes() == frame(1, 0, RECORD) * 5

"""Directories that are not as they were left: each kind of damage is refused, found and repaired."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.disks import abandon
from tests.storage.conftest import Open, contents, fill, flip
from upper.errors import Corrupt, DirectoryInUse, StorageError, WrongVersion
from upper.storage import BucketStore, StorageSettings, metadata
from upper.storage.check import check, repair
from upper.storage.frames import SECTOR, Ending, Frame, FrameReader

pytestmark = pytest.mark.usefixtures("either_kernel")


# ── Directories that cannot be used ───────────────────────────────────────────────────────────────


def test_a_second_opener_is_refused(opened: Open, directory: Path) -> None:
    opened()
    with pytest.raises(DirectoryInUse, match="another process has"):
        BucketStore.open(directory)


def test_a_directory_of_another_version_is_refused_and_left_alone(opened: Open, directory: Path) -> None:
    opened().close()
    path = directory / "bucket.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    before = {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()}
    with pytest.raises(WrongVersion, match="format 2"):
        BucketStore.open(directory)
    assert {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()} == before


def test_a_bucket_keeps_its_name_and_its_number_of_partitions(opened: Open, directory: Path) -> None:
    opened().close()
    with pytest.raises(StorageError, match="holds the bucket 'default', not 'shop'"):
        BucketStore.open(directory, name="shop")
    with pytest.raises(StorageError, match="has 4 partitions, not 8"):
        BucketStore.open(directory, partitions=8)
    for number in (0, 6):
        with pytest.raises(StorageError, match="power of two"):
            BucketStore.open(directory / "other", partitions=number)


# ── Bytes that changed ────────────────────────────────────────────────────────────────────────────

ROLLING = StorageSettings(compact=False, segment_size=1024)


def damaged(
    opened: Open, *, compacted: bool = False, clean: bool = True
) -> tuple[BucketStore, list[dict[bytes, bytes]]]:
    """A bucket with several segments (and files), closed or abandoned; and what it held."""
    bucket = opened(ROLLING)
    fill(bucket, 30)
    if compacted:
        bucket.compact()
        fill(bucket, 30)
    before = contents(bucket)
    if clean:
        bucket.close()
    else:
        abandon(bucket)
    return bucket, before


def repaired(directory: Path) -> list[str]:
    printed = [str(finding) for finding in repair(directory)]
    assert list(check(directory)) == []
    return printed


def test_a_flipped_byte_in_the_journal_is_refused_found_and_repaired(opened: Open, directory: Path) -> None:
    _, before = damaged(opened)
    segments = sorted((directory / "journal").glob("*.log"))
    assert len(segments) > 4
    flip(segments[2], 700)
    with pytest.raises(Corrupt, match=f"{segments[2].name}.*is damaged.*upper check"):
        opened()
    assert any(segments[2].name in str(finding) for finding in check(directory))
    assert any("is damaged" in sentence for sentence in repaired(directory))
    bucket = opened()
    assert bucket.opening.branched, "acknowledged changes are gone, so consumers must be able to notice"
    for held, kept, store in zip(before, contents(bucket), bucket.partitions, strict=True):
        assert kept.items() <= held.items()
        assert len(kept) < len(held)
        assert store.log.versions[0].seqno == store.high == len(kept)
    fill(bucket)
    before = contents(bucket)
    assert contents(opened()) == before


@pytest.mark.parametrize("which", ["first", "middle", "last"])
def test_a_missing_segment_is_refused_found_and_repaired(opened: Open, directory: Path, which: str) -> None:
    damaged(opened, clean=False)
    segments = sorted((directory / "journal").glob("*.log"))
    segments[{"first": 0, "middle": 2, "last": -1}[which]].unlink()
    with pytest.raises(Corrupt, match="upper check"):
        opened()
    assert list(check(directory)) != []
    repaired(directory)
    bucket = opened()
    assert bucket.opening.branched
    fill(bucket)
    before = contents(bucket)
    assert contents(opened()) == before


def test_a_journal_that_is_gone_is_not_taken_for_a_new_bucket(opened: Open, directory: Path) -> None:
    damaged(opened)
    for segment in (directory / "journal").glob("*.log"):
        segment.unlink()
    with pytest.raises(Corrupt, match="it is gone"):
        opened()


def trimmed(directory: Path) -> Path:
    """The last segment, without the zeros that are written ahead."""
    last = max((directory / "journal").glob("*.log"))
    frames = FrameReader(last.read_bytes())
    assert list(frames)
    os.truncate(last, frames.at)
    return last


@pytest.mark.parametrize("lost", ["first", "middle", "last", "all"])
def test_a_batch_that_lacks_a_sector_was_never_acknowledged(opened: Open, directory: Path, lost: str) -> None:
    bucket = opened(StorageSettings(compact=False))
    fill(bucket)
    before = contents(bucket)
    last = max((directory / "journal").glob("*.log"))
    frames = FrameReader(last.read_bytes())
    assert list(frames)
    for number in range(20):
        bucket.partitions[0].write(b"lost%d" % number, b"v" * 100)
    bucket.commit()
    abandon(bucket)
    data = bytearray(last.read_bytes())
    end = len(data.rstrip(b"\0"))
    assert end < len(data), "there are zeros ahead"
    sectors = [*range(frames.at, frames.at + 1), *range(frames.at - frames.at % SECTOR + SECTOR, end, SECTOR)]
    gone = {"first": sectors[:1], "middle": sectors[2:3], "last": sectors[-1:], "all": sectors}[lost]
    for at in gone:
        size = min(end, at - at % SECTOR + SECTOR) - at
        data[at : at + size] = bytes(size)
    last.write_bytes(data)
    assert list(check(directory)) == [], "a torn end is no fault"
    again = opened()
    assert (again.opening.cut > 0) == (lost != "all")
    assert not again.opening.branched
    assert contents(again) == before
    fill(again)
    before = contents(again)
    assert contents(opened()) == before


VALUES = {"text": b"v" * 700, "zeros": bytes(1600), "zeros at the end": b"v" * 700 + bytes(600)}


def last_batch(opened: Open, directory: Path, value: bytes) -> tuple[bytes, Frame]:
    """The last segment of a node that was killed, and its last batch, which has this value."""
    bucket = opened(StorageSettings(compact=False))
    fill(bucket)
    bucket.partitions[0].write(b"key", value)
    bucket.partitions[1].write(b"other", value)
    bucket.commit()
    abandon(bucket)
    data = max((directory / "journal").glob("*.log")).read_bytes()
    *_, frame = FrameReader(data)
    assert frame.end + 60_000 < len(data), "there are zeros ahead"
    return data, frame


@pytest.mark.parametrize("value", VALUES)
def test_no_flipped_bit_makes_a_complete_batch_incomplete(opened: Open, directory: Path, value: str) -> None:
    data, frame = last_batch(opened, directory, VALUES[value])
    sizes = (frame.end, frame.end + 100, len(data))  # with zeros ahead and without
    for at in range(frame.at, frame.end):
        for bit in range(8) if at < frame.start else (at % 8,):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            for size in sizes:
                reader = FrameReader(bytes(changed[:size]), frame.at)
                assert list(reader) == []
                assert reader.ending is Ending.BROKEN, (at - frame.at, bit, size)


@pytest.mark.parametrize("value", VALUES)
def test_a_batch_with_zeros_that_lacks_a_sector_was_never_acknowledged(
    opened: Open, directory: Path, value: str
) -> None:
    data, frame = last_batch(opened, directory, VALUES[value])
    edges = [frame.at, *range(frame.at - frame.at % SECTOR + SECTOR, frame.end, SECTOR), frame.end]
    for start, end in itertools.pairwise(edges):
        if not any(data[start:end]):
            continue
        torn = data[:start] + bytes(end - start) + data[end:]
        reader = FrameReader(torn, frame.at)
        assert list(reader) == []
        assert reader.ending is Ending.SHORT, (start, end)
    for size in range(frame.at + 1, frame.end):
        reader = FrameReader(data[:size], frame.at)
        assert list(reader) == []
        assert reader.ending is Ending.SHORT, size


@pytest.mark.parametrize("cut", [1, 20, 33, 60])
def test_a_torn_end_is_cut_off_and_nothing_else_happens(opened: Open, directory: Path, cut: int) -> None:
    damaged(opened, clean=False)
    last = trimmed(directory)
    data = last.read_bytes()
    last.write_bytes(data[:-cut])
    assert list(check(directory)) == [], "a torn end is no fault"
    bucket = opened(ROLLING)
    assert bucket.opening.cut > 0
    assert not bucket.opening.branched
    fill(bucket)
    before = contents(bucket)
    assert contents(opened()) == before


@pytest.mark.parametrize("size", [0, 20, 48])
def test_a_segment_whose_header_never_arrived_is_no_fault(opened: Open, directory: Path, size: int) -> None:
    bucket = opened()
    fill(bucket)
    before = contents(bucket)
    abandon(bucket)
    last = max((directory / "journal").glob("*.log"))
    (directory / "journal" / f"{int(last.stem) + 1:08d}.log").write_bytes(bytes(size))
    assert list(check(directory)) == []
    bucket = opened(ROLLING)
    assert contents(bucket) == before
    assert not bucket.opening.branched
    fill(bucket)
    before = contents(bucket)
    assert contents(opened()) == before


def test_a_last_batch_that_is_wrong_may_have_been_acknowledged(opened: Open, directory: Path) -> None:
    damaged(opened, clean=False)
    last = trimmed(directory)
    flip(last, len(last.read_bytes()) - 5)
    bucket = opened()
    assert bucket.opening.cut > 0
    assert bucket.opening.branched


def test_a_journal_cut_after_a_clean_end_is_refused(opened: Open, directory: Path) -> None:
    damaged(opened)
    last = max((directory / "journal").glob("*.log"))
    last.write_bytes(last.read_bytes()[:-30])
    with pytest.raises(Corrupt, match="closing left it at"):
        opened()
    repaired(directory)
    assert opened().opening.branched


@pytest.mark.parametrize("how", ["flipped header", "flipped record", "truncated", "missing"])
def test_a_damaged_partition_file_is_refused_found_and_repaired(
    opened: Open, directory: Path, how: str
) -> None:
    bucket, before = damaged(opened, compacted=True)
    branches = {store.log.branch for store in bucket.partitions}
    (path,) = (directory / "partitions").iterdir()
    match how:
        case "flipped header":
            flip(path, 20)
        case "flipped record":
            flip(path, path.stat().st_size - 10)
        case "truncated":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        case "missing":
            path.unlink()
    with pytest.raises(Corrupt, match="upper check"):
        opened()
    assert list(check(directory)) != []
    assert any("lost" in sentence for sentence in repaired(directory))
    bucket = opened()
    assert bucket.opening.branched
    for held, kept, store in zip(before, contents(bucket), bucket.partitions, strict=True):
        assert kept.items() <= held.items()
        if len(kept) < len(held):
            assert not branches & {version.branch for version in store.log}, (
                "no consumer may resume from here"
            )
    fill(bucket)
    before = contents(bucket)
    assert contents(opened()) == before


@pytest.mark.parametrize("content", [b"{cut off", b"[]", b"{}", b'{"batch": "7", "first": "x"}', None])
@pytest.mark.parametrize("name", ["state.json", "journal.json"])
def test_a_damaged_mark_is_refused_found_and_repaired(
    opened: Open, directory: Path, name: str, content: bytes | None
) -> None:
    _, before = damaged(opened, compacted=True)
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_bytes(content)
    with pytest.raises(Corrupt, match="run `upper check`"):
        opened()
    assert list(check(directory)) != []
    repaired(directory)
    bucket = opened()
    assert bucket.opening.branched, "it is unknown what was acknowledged"
    assert contents(bucket) == before


def each_damaged_character(path: Path) -> Iterator[bytes]:
    """The file with one bit flipped, at one place after the other."""
    data = path.read_bytes()
    for at in range(len(data)):
        yield data[:at] + bytes([data[at] ^ 1 << at % 3]) + data[at + 1 :]


@pytest.mark.parametrize("name", ["state.json", "journal.json", "bucket.json"])
def test_no_damaged_character_of_a_small_file_is_taken_for_another_value(
    opened: Open, directory: Path, name: str
) -> None:
    """A journal that begins at another batch would be shortened, and a bucket of another size misread."""
    damaged(opened, compacted=True)
    fields = read_fields(directory)
    for content in each_damaged_character(directory / name):
        (directory / name).write_bytes(content)
        with suppress(Corrupt, WrongVersion):
            assert read_fields(directory) == fields, content


def read_fields(directory: Path) -> tuple[object, ...]:
    identity = metadata.read_identity(directory)
    return identity, metadata.read_shutdown(directory), metadata.read_journal_start(directory, 4)


def test_small_files_of_earlier_versions_have_no_checksum(opened: Open, directory: Path) -> None:
    _, before = damaged(opened, compacted=True)
    for name in ("state.json", "journal.json", "bucket.json"):
        content = json.loads((directory / name).read_bytes())
        del content[metadata.CHECKSUM]
        # The same file: another one would look like a copy of the directory.
        (directory / name).write_text(json.dumps(content))
    bucket = opened()
    assert not bucket.opening.branched
    assert contents(bucket) == before


@pytest.mark.parametrize("content", [b"{cut off", b"{}", b'{"format": 1}'])
def test_a_bucket_without_its_identity_has_to_be_restored(
    opened: Open, directory: Path, content: bytes
) -> None:
    damaged(opened)
    (directory / "bucket.json").write_bytes(content)
    for look in (opened, lambda: list(check(directory)), lambda: list(repair(directory))):
        with pytest.raises(Corrupt, match="restore it from a copy"):
            look()


def test_repairing_what_is_sound_changes_nothing(opened: Open, directory: Path) -> None:
    _, before = damaged(opened, compacted=True)
    files = {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()}
    assert list(repair(directory)) == []
    assert {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()} == files
    assert contents(opened()) == before


def test_checking_and_repairing_need_little_memory(
    opened: Open, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upper.storage.check.MEMORY", 500)
    _, before = damaged(opened, compacted=True)
    assert list(check(directory)) == []
    last = max((directory / "journal").glob("*.log"))
    last.write_bytes(last.read_bytes()[:-30])
    repaired(directory)
    bucket = opened()
    assert contents(bucket) == before, "the second round wrote the same values again"
    assert [store.high for store in bucket.partitions] == [59] * 4


def test_leftovers_of_a_crashed_compaction_are_deleted(opened: Open, directory: Path) -> None:
    damaged(opened, compacted=True)
    (directory / "partitions" / "00000099.part.new").write_bytes(b"half a file")
    opened()
    assert len(list((directory / "partitions").iterdir())) == 1

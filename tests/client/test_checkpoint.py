"""Saved positions: what is saved is loaded again, and damaged files are rejected."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upper.client.checkpoint import Checkpoint, Store, from_bytes, to_bytes
from upper.client.position_codec import MAX_ENDS, ResumePoints, decode, encode, pack, unpack
from upper.client.positions import Positions
from upper.errors import BadCheckpoint
from upper.history.trail import Trail
from upper.model.values import START, BranchId, FailoverLog, Partition, Position, Seqno, Snapshot, Version

BIG = 2**64 - 1


@st.composite
def knowns(draw: st.DrawFn) -> ResumePoints:
    begins = sorted(draw(st.lists(st.integers(0, 2**48 - 1), min_size=1, max_size=25)), reverse=True)
    branches = draw(st.lists(st.integers(1, BIG), min_size=len(begins), max_size=len(begins), unique=True))
    versions = (Version(BranchId(b), Seqno(s)) for b, s in zip(branches, begins, strict=True))
    ends = sorted(draw(st.sets(st.integers(1, 2**48 - 1), max_size=20)))
    return ResumePoints(FailoverLog(tuple(versions)), tuple(Seqno(end) for end in ends))


positions = st.dictionaries(st.integers(0, 1023).map(Partition), knowns(), max_size=4).map(
    lambda known: Positions(known, bucket="default", of=1024)
)


def some() -> Positions:
    log = FailoverLog((Version(BranchId(BIG), Seqno(7)), Version(BranchId(3), Seqno(0))))
    return Positions({Partition(5): ResumePoints(log, (Seqno(4), Seqno(9)))}, bucket="default", of=16)


@given(positions)
def test_what_is_saved_comes_back(saved: Positions) -> None:
    assert from_bytes(to_bytes(saved)) == saved
    assert Positions.from_json(json.loads(json.dumps(saved.to_json()))) == saved


def test_numbers_travel_as_text() -> None:
    assert some().to_json()["partitions"] == {"5": f"4+5 {BIG}@7 3@0"}


def test_checkpoints_of_version_1_are_still_read() -> None:
    log = [[str(BIG), "7"], ["3", "0"]]
    old = {
        "format": "upper.positions",
        "version": 1,
        "bucket": "default",
        "of": 16,
        "partitions": {"5": {"log": log, "ends": ["4", "9"]}},
    }
    assert Positions.from_json(old) == some()


@given(positions, positions)
def test_a_difference_applied_to_its_base_gives_the_new_positions(old: Positions, new: Positions) -> None:
    base = {p: old.known(p) for p in old}
    whole = base | {p: new.known(p) for p in new}
    difference = encode(whole, base=base)
    assert decode(difference, base=base) == whole
    assert decode(unpack(pack(difference)), base=base) == whole
    assert set(difference) == {str(p) for p in whole if whole[p] != base.get(p)}


def test_a_partition_without_its_log_differs_from_one_that_kept_it() -> None:
    base = {p: some().known(p) for p in some()}
    nothing = {Partition(5): ResumePoints()}
    assert decode(encode(nothing, base=base), base=base) == nothing


def test_1024_positions_pack_into_25_kilobytes_and_a_difference_into_9() -> None:
    draw = Random(1)
    logs = [FailoverLog((Version(BranchId(draw.getrandbits(64)), Seqno(0)),)) for _ in range(1024)]
    here = {Partition(p): ResumePoints(log, (Seqno(draw.randrange(1, 10**7)),)) for p, log in enumerate(logs)}
    later = {p: ResumePoints(at.log, (Seqno(at.ends[0] + draw.randrange(1, 999)),)) for p, at in here.items()}
    assert len(pack(encode(here))) < 25_000
    assert len(pack(encode(later, base=here))) < 9_000


@pytest.mark.parametrize(
    "text", ["", "x", "1 2", "1 2@", "5+0 1@0", "1@0", "0 0@0 ", f"{2**48} 1@0", "-1 1@0", 7]
)
def test_text_that_is_no_position_is_rejected(text: object) -> None:
    with pytest.raises(ValueError):
        decode({"1": text})


@pytest.mark.parametrize("text", ["", "*", "eJw=", pack({"1": "0"})[:-4]])
def test_packed_text_that_is_damaged_is_rejected_without_the_decoders_jargon(text: str) -> None:
    with pytest.raises(ValueError, match="cut off or damaged"):
        unpack(text)


def test_a_position_is_the_newest_end_under_the_newest_branch() -> None:
    assert some()[Partition(5)] == Position.at(BranchId(BIG), Seqno(9))
    assert Positions({Partition(0): START})[Partition(0)] == START


def test_a_place_inside_a_snapshot_is_not_kept() -> None:
    inside = Position(BranchId(1), Seqno(5), Snapshot(Seqno(4), Seqno(9)))
    with pytest.raises(ValueError, match="inside a snapshot"):
        Positions({Partition(0): inside})


def test_a_seqno_without_a_branch_is_refused() -> None:
    with pytest.raises(ValueError, match="seqno 5 has no branch"):
        Positions({Partition(0): Position.at(BranchId(0), Seqno(5))})


def test_what_is_saved_of_a_long_trail_is_bounded_and_ends_where_it_ends() -> None:
    log = FailoverLog((Version(BranchId(1), Seqno(0)),))
    trail = Trail(log, [Seqno(n) for n in range(1, 100)])
    known = ResumePoints.of(trail)
    assert len(known.ends) <= MAX_ENDS
    assert known.position == Position.at(BranchId(1), Seqno(99))


def test_a_file_is_a_store(tmp_path: Path) -> None:
    assert isinstance(Checkpoint(tmp_path / "x"), Store)


def test_a_file_that_never_was_is_the_beginning(tmp_path: Path) -> None:
    assert Checkpoint(tmp_path / "none").load() is None


def test_a_save_replaces_the_last_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "here.json")
    checkpoint.save(Positions({}))
    checkpoint.save(some())
    assert checkpoint.load() == some()
    assert [path.name for path in tmp_path.iterdir()] == ["here.json"]


def test_a_crash_before_the_rename_leaves_the_old_one(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "here.json")
    checkpoint.save(some())
    (tmp_path / "here.json.new").write_bytes(to_bytes(Positions({}))[:10])
    assert checkpoint.load() == some()
    checkpoint.save(Positions({}))
    assert checkpoint.load() == Positions({})


def test_a_link_prepared_beside_the_checkpoint_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("precious")
    (tmp_path / "here.json.new").symlink_to(other)
    checkpoint = Checkpoint(tmp_path / "here.json")
    checkpoint.save(some())
    assert checkpoint.load() == some()
    assert other.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(BadCheckpoint, match="cannot be written"):
        Checkpoint(tmp_path / "x").save(some())


def test_a_directory_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"cannot be written .* the last checkpoint saved is intact"):
        Checkpoint(tmp_path / "no" / "x").save(some())


def test_truncated_at_every_byte_it_is_an_error_or_the_right_answer(tmp_path: Path) -> None:
    whole = to_bytes(some())
    path = tmp_path / "x"
    right = 0
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        try:
            assert Checkpoint(path).load() == some()
            right += 1
        except BadCheckpoint:
            pass
    assert right == 1  # the newline at the end may be missing


def test_with_every_bit_of_every_byte_flipped_it_is_an_error_or_the_right_answer() -> None:
    whole = to_bytes(some())
    for index in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[index] ^= 1 << bit
            try:
                assert from_bytes(bytes(damaged)) == some()
            except BadCheckpoint:
                pass


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "not a checkpoint"),
        (b"hello", "not a checkpoint"),
        (b"[" * 100_000, "not a checkpoint"),
        (b"{}", "not a checkpoint"),
        (b'{"checksum": "0", "positions": {}}', "damaged"),
    ],
)
def test_something_else_is_a_clear_error(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=sentence) as error:
        Checkpoint(path).load()
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 3}, "version 3 .* only up to 2"),
        ({"version": None}, "only up to 2"),
        ({"format": "other"}, "not the positions of a consumer"),
        ({"partitions": None}, "damaged"),
        ({"partitions": {"x": "0"}}, "damaged"),
        ({"partitions": {"99": "1 1@0"}}, "no partition 99"),
        ({"partitions": {"1": "5+0 1@0"}}, "damaged"),
        ({"partitions": {"1": 5}}, "not a position"),
        ({"partitions": {"1": "4"}}, "damaged"),
        ({"version": 1, "partitions": {"1": {"log": [["1", 0]], "ends": []}}}, "not a position"),
        ({"version": 1, "partitions": {"1": {"log": [["1"]], "ends": []}}}, "not a branch and a seqno"),
        ({"version": 1, "partitions": {"1": {"log": [], "ends": ["4"]}}}, "damaged"),
        ({"bucket": 5}, "damaged"),
    ],
)
def test_a_foreign_or_future_one_is_a_clear_error(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadCheckpoint, match=sentence):
        Positions.from_json({**some().to_json(), **change})


def test_newer_places_replace_older_ones_and_leave_the_others() -> None:
    log = FailoverLog((Version(BranchId(1), Seqno(0)),))
    one, two = ResumePoints(log, (Seqno(1),)), ResumePoints(log, (Seqno(2),))
    old = Positions({Partition(1): one, Partition(2): two}, of=4)
    new = old.updated(Positions({Partition(2): ResumePoints(log, (Seqno(2), Seqno(5)))}))
    assert {p: new[p].seqno for p in new} == {1: 1, 2: 5}
    assert new.of == 4

"""Values reject invalid arguments when constructed, and so does the failover log."""

from __future__ import annotations

from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.history.cases import NEW, OLD, PROMOTIONS, Promotion
from upper.model.values import (
    MAX_VERSIONS,
    ZERO,
    BranchId,
    FailoverLog,
    Position,
    Seqno,
    Snapshot,
    Version,
    partition_of,
)


def test_a_snapshot_does_not_run_backwards() -> None:
    with pytest.raises(ValueError, match="cannot reach from 5 to 4"):
        Snapshot(Seqno(5), Seqno(4))
    with pytest.raises(ValueError, match="cannot reach"):
        Snapshot(Seqno(-1), Seqno(4))


@pytest.mark.parametrize("seqno", [4, 11])
def test_a_position_lies_inside_its_snapshot(seqno: int) -> None:
    with pytest.raises(ValueError, match=f"seqno {seqno} lies outside snapshot"):
        Position(OLD, Seqno(seqno), Snapshot(Seqno(5), Seqno(10)))


def test_branches_are_unsigned_64_bits_and_zero_is_none() -> None:
    Position.at(BranchId(0), ZERO)
    Version(BranchId(2**64 - 1), ZERO)
    for branch in (-1, 2**64):
        with pytest.raises(ValueError, match="not a branch id"):
            Position.at(BranchId(branch), ZERO)
    for branch in (0, 2**64):
        with pytest.raises(ValueError, match="not a branch id"):
            Version(BranchId(branch), ZERO)
    with pytest.raises(ValueError, match="not a seqno"):
        Version(OLD, Seqno(2**64))


def test_only_the_end_of_a_snapshot_is_consistent() -> None:
    assert [Position(OLD, Seqno(seqno), Snapshot(Seqno(5), Seqno(7))).consistent for seqno in (5, 6, 7)] == [
        False,
        False,
        True,
    ]


def test_a_failover_log_has_versions_each_once_newest_first() -> None:
    with pytest.raises(ValueError, match="1 to 25"):
        FailoverLog(())
    with pytest.raises(ValueError, match="1 to 25"):
        FailoverLog(tuple(Version(BranchId(n), Seqno(30 - n)) for n in range(1, 27)))
    with pytest.raises(ValueError, match="each branch once"):
        FailoverLog((Version(OLD, ZERO), Version(OLD, ZERO)))
    with pytest.raises(ValueError, match="is newer than"):
        FailoverLog((Version(NEW, Seqno(4)), Version(OLD, Seqno(5))))


@pytest.mark.parametrize("promotion", PROMOTIONS, ids=lambda promotion: promotion.name)
def test_promotion_drops_what_diverged(promotion: Promotion) -> None:
    assert promotion.holds()


def test_a_log_remembers_the_newest_25_versions() -> None:
    log = FailoverLog((Version(BranchId(1), ZERO),))
    for number in range(2, 100):
        log = log.promoted(Seqno(number), fresh=BranchId(number))
    assert len(log) == MAX_VERSIONS
    assert log.branch == 99
    assert log.shared_until(BranchId(75), Seqno(200)) == 76
    assert log.shared_until(BranchId(74), Seqno(200)) is None


@given(st.lists(st.integers(0, 100).map(Seqno), max_size=60))
def test_a_log_holds_through_any_promotions(places: list[Seqno]) -> None:
    log = FailoverLog((Version(BranchId(1), ZERO),))
    for number, place in enumerate(places):
        log = log.promoted(place, fresh=BranchId(number + 2))
        assert 1 <= len(log) <= MAX_VERSIONS
        assert log.shared_until(BranchId(10**6), Seqno(200)) is None
        shared = [log.shared_until(version.branch, Seqno(200)) or ZERO for version in log]
        assert shared == sorted(shared, reverse=True)


def test_keys_live_where_every_client_looks_for_them() -> None:
    assert partition_of(b"", 1024) == 0
    assert partition_of(b"hello", 1024) == (crc32(b"hello") >> 16) & 0x3FF
    assert partition_of(b"hello", 1) == 0

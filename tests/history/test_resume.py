"""The resume decision: its examples, the specification's own, and the search for a common point."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.history.cases import CASES, LOG, MIDDLE, NEW, OLD, STRANGER, Case, log
from upper.history.resume import Resume, RollbackTo, answer, common_point, decide, redeliver
from upper.model.values import NO_END, START, ZERO, BranchId, FailoverLog, Position, Seqno, Snapshot, Version


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_case_of_the_decision_is_answered_as_the_protocol_requires(case: Case) -> None:
    given_answer = answer(
        case.request(),
        LOG,
        high=Seqno(case.high),
        purged=Seqno(case.purged),
        known_at_zero=case.known_at_zero,
    )
    assert case.holds(given_answer), given_answer


def test_the_worked_example_of_the_specification() -> None:
    """Seen up to 434 on DRF394; QER053 began at 426; the consumer can only go back to 418, and does."""
    drf394, qer053 = BranchId(0xD4F394), BranchId(0x9E4053)
    producer = log((qer053, 426), (drf394, 0))
    high = Seqno(500)

    asked = Position.at(drf394, Seqno(434))
    reported = decide(asked, producer, high=high, purged=ZERO)
    assert reported == RollbackTo(Seqno(426), "histories diverge at 426")

    for branch in (qer053, drf394):  # the example names the new branch; the old one is as true of 418
        again = Position.at(branch, Seqno(418))
        assert decide(again, producer, high=high, purged=ZERO) == Resume(again)

    own_places = [Position.at(drf394, Seqno(seqno)) for seqno in (434, 418, 300)]
    assert common_point(own_places, producer, high=high) == Position.at(drf394, Seqno(418))


def test_every_answer_has_a_reason() -> None:
    for case in CASES:
        match answer(
            case.request(),
            LOG,
            high=Seqno(case.high),
            purged=Seqno(case.purged),
            known_at_zero=case.known_at_zero,
        ):
            case Resume():
                pass
            case other:
                assert other.why


# ── A position that the producer keeps ────────────────────────────────────────────────────────────


def inside(branch: BranchId, seqno: int, start: int, end: int) -> Position:
    return Position(branch, Seqno(seqno), Snapshot(Seqno(start), Seqno(end)))


@pytest.mark.parametrize(
    ("sent", "acknowledged", "purged", "expected"),
    [
        (START, START, 0, START),
        (START, START, 90, START),  # it has nothing, so it missed nothing
        (Position.at(NEW, Seqno(90)), Position.at(NEW, Seqno(80)), 80, Position.at(NEW, Seqno(80))),
        (Position.at(NEW, Seqno(90)), Position.at(NEW, Seqno(80)), 81, None),
        (Position.at(NEW, Seqno(90)), START, 0, START),
        (Position.at(NEW, Seqno(90)), START, 1, None),
        (Position.at(STRANGER, Seqno(90)), START, 0, None),
    ],
)
def test_a_kept_position_continues_only_where_nothing_was_missed(
    sent: Position, acknowledged: Position, purged: int, expected: Position | None
) -> None:
    found = redeliver(sent, acknowledged, LOG, high=Seqno(100), purged=Seqno(purged))
    if expected is None:
        assert isinstance(found, RollbackTo)
        assert (found.to, bool(found.why)) == (0, True)
    else:
        assert found == Resume(expected)


def test_a_kept_position_inside_a_snapshot_continues_at_its_start_where_histories_part_in_it() -> None:
    producer = log((NEW, 50), (OLD, 0))
    sent = inside(OLD, 45, 40, 60)
    found = redeliver(sent, sent, producer, high=Seqno(70), purged=ZERO)
    assert found == Resume(Position.at(OLD, Seqno(40)))
    beyond = inside(OLD, 55, 40, 60)  # what it may have is not part of the history
    assert isinstance(redeliver(beyond, sent, producer, high=Seqno(70), purged=ZERO), RollbackTo)


# ── The common point ──────────────────────────────────────────────────────────────────────────────


def test_the_newest_common_place_is_chosen_not_the_first_known_branch() -> None:
    known = [
        Position.at(STRANGER, Seqno(95)),
        Position.at(MIDDLE, Seqno(85)),
        Position.at(OLD, Seqno(45)),
        Position.at(OLD, Seqno(20)),
    ]
    assert common_point(known, LOG, high=Seqno(100)) == known[2]


def test_without_any_common_place_the_beginning_is_chosen() -> None:
    assert common_point([Position.at(STRANGER, Seqno(95))], LOG, high=Seqno(100)) == START
    assert common_point([], LOG, high=Seqno(100)) == START


def test_positions_before_purged_deletions_are_not_common_points() -> None:
    known = [Position.at(NEW, Seqno(60)), Position.at(NEW, Seqno(90))]
    assert common_point(known, LOG, high=Seqno(100), purged=Seqno(70)) == known[1]


# ── What holds of every request ───────────────────────────────────────────────────────────────────

seqnos = st.integers(0, 40).map(Seqno)
branches = st.integers(1, 6).map(BranchId)


@st.composite
def failover_logs(draw: st.DrawFn) -> FailoverLog:
    names = draw(st.lists(branches, min_size=1, max_size=5, unique=True))
    begun = sorted(draw(st.lists(seqnos, min_size=len(names), max_size=len(names))), reverse=True)
    return FailoverLog(tuple(Version(name, seqno) for name, seqno in zip(names, begun, strict=True)))


@st.composite
def positions(draw: st.DrawFn) -> Position:
    start, at, end = sorted(draw(st.tuples(seqnos, seqnos, seqnos)))
    return Position(draw(branches), at, Snapshot(start, end))


@given(positions(), failover_logs(), seqnos, seqnos)
def test_following_rollbacks_always_ends_and_never_goes_forward(
    asked: Position, producer: FailoverLog, high: Seqno, purged: Seqno
) -> None:
    steps = 0
    while isinstance(reported := decide(asked, producer, high=high, purged=purged), RollbackTo):
        assert reported.to < asked.seqno
        asked = Position.at(asked.branch, reported.to)
        steps += 1
        assert steps <= 3
    assert isinstance(reported, Resume)
    assert reported.at == asked


@given(positions(), failover_logs(), seqnos, seqnos)
def test_a_consumer_that_may_resume_may_resume_from_any_earlier_place_that_is_not_purged(
    asked: Position, producer: FailoverLog, high: Seqno, purged: Seqno
) -> None:
    if isinstance(decide(asked, producer, high=high, purged=purged), Resume):
        for earlier in range(purged, asked.seqno):
            place = Position.at(asked.branch, Seqno(earlier))
            assert decide(place, producer, high=high, purged=purged) == Resume(place)


@given(st.lists(positions(), max_size=6), failover_logs(), seqnos, seqnos)
def test_the_common_point_is_accepted_and_no_newer_known_one_is(
    known: list[Position], producer: FailoverLog, high: Seqno, purged: Seqno
) -> None:
    known.sort(key=lambda position: position.seqno, reverse=True)
    best = common_point(known, producer, high=high, purged=purged)
    assert best == START or best in known
    assert isinstance(decide(best, producer, high=high, purged=purged), Resume)
    for position in known:
        if position.seqno > best.seqno:
            assert isinstance(decide(position, producer, high=high, purged=purged), RollbackTo)


def test_a_request_without_end_never_ends() -> None:
    here = Position.at(NEW, Seqno(2**48 - 1))
    assert decide(here, LOG, high=Seqno(2**48 - 1), purged=ZERO, end=NO_END) == Resume(here)

"""The consumer's stream: where it stands, what it claims, how it goes back."""

from __future__ import annotations

import pytest

from upper.errors import LocalProtocolError, RemoteProtocolError
from upper.history.following import (
    NOTHING,
    Clear,
    ConsumerStream,
    Deliver,
    Following,
    GoBack,
    Over,
    Reached,
    RequestStream,
    Stop,
    TakeState,
)
from upper.history.trail import Trail
from upper.model.messages import (
    DeletionMessage,
    EndReason,
    FlushMessage,
    MutationMessage,
    SeqnoAdvanced,
    SetState,
    SnapshotEndMessage,
    SnapshotMarker,
    StreamEnd,
    StreamStart,
)
from upper.model.values import (
    NO_END,
    START,
    BranchId,
    FailoverLog,
    Partition,
    Position,
    Seqno,
    Snapshot,
    State,
    Version,
)

P = Partition(5)
OLD, NEW, OTHER = BranchId(0xA), BranchId(0xB), BranchId(0xC)
V_OLD, V_NEW = Version(OLD, Seqno(0)), Version(NEW, Seqno(426))


def change(seqno: int) -> MutationMessage:
    return MutationMessage(partition=P, key=b"key", seqno=Seqno(seqno))


def marker(start: int | None = None, end: int | None = None) -> SnapshotMarker:
    return SnapshotMarker(
        partition=P,
        start=None if start is None else Seqno(start),
        end=None if end is None else Seqno(end),
    )


def at(seqno: int, branch: BranchId = OLD) -> Position:
    return Position.at(branch, Seqno(seqno))


def inside(seqno: int, start: int, end: int) -> Position:
    return Position(OLD, Seqno(seqno), Snapshot(Seqno(start), Seqno(end)))


def trail(*ends: int, versions: tuple[Version, ...] = (V_OLD,)) -> Trail:
    return Trail(FailoverLog(versions), [Seqno(end) for end in ends])


def streaming(*ends: int, bounds: bool = False) -> ConsumerStream:
    stream = ConsumerStream(trail(*ends) if ends else None, bounds=bounds)
    stream.ask()
    assert stream.accepted((V_OLD,)) == NOTHING
    assert stream.on(StreamStart(partition=P)) == NOTHING
    return stream


END = SnapshotEndMessage(partition=P)


def test_a_newcomer_asks_from_the_beginning() -> None:
    assert ConsumerStream().ask() == (RequestStream(START),)


def test_a_marker_moves_nothing_and_a_change_does() -> None:
    stream = streaming(7)
    assert stream.on(marker()) == NOTHING
    assert stream.claim == stream.position == at(7)
    assert stream.on(change(8)) == (Deliver(change(8)),)
    assert stream.position == at(7)
    assert stream.claim == inside(8, 7, NO_END)
    assert stream.on(END) == (Reached(at(8)),)
    assert stream.claim == stream.position == at(8)


def test_a_snapshot_with_bounds_ends_with_its_last_change() -> None:
    stream = streaming(7, bounds=True)
    stream.on(marker(7, 10))
    stream.on(change(9))
    assert stream.claim == inside(9, 7, 10)
    deletion = DeletionMessage(partition=P, key=b"key", seqno=Seqno(10))
    assert stream.on(deletion) == (Deliver(deletion), Reached(at(10)))


def test_a_history_that_advanced_meanwhile_ends_a_snapshot_too() -> None:
    stream = streaming(7, bounds=True)
    stream.on(marker(7, 10))
    assert stream.on(SeqnoAdvanced(partition=P, seqno=Seqno(10))) == (Reached(at(10)),)


def test_a_run_of_changes_moves_like_its_last_one() -> None:
    stream = streaming(7, bounds=True)
    stream.on(marker(7, 100))
    assert stream.moved(Seqno(60), first=Seqno(8)) == NOTHING
    assert stream.moved(Seqno(100), first=Seqno(61)) == (Reached(at(100)),)


def test_an_empty_snapshot_reaches_nothing() -> None:
    stream = streaming(7)
    stream.on(marker())
    assert stream.on(END) == NOTHING


def test_a_flush_counts_one_on_and_is_consistent() -> None:
    stream = streaming(7)
    assert stream.on(FlushMessage(partition=P)) == (Clear(Seqno(8)), Reached(at(8)))


def test_an_end_leaves_the_position_where_it_is() -> None:
    stream = streaming(7, bounds=True)
    stream.on(marker(7, 10))
    stream.on(change(9))
    ended = StreamEnd(partition=P, reason=EndReason.STATE_CHANGED)
    assert stream.on(ended) == (Over(EndReason.STATE_CHANGED),)
    assert stream.ask() == (RequestStream(inside(9, 7, 10)),)


def test_a_snapshot_of_which_nothing_was_seen_is_forgotten() -> None:
    stream = streaming(7, bounds=True)
    stream.on(marker(7, 10))
    stream.ended()
    assert stream.ask() == (RequestStream(at(7)),)
    stream.accepted((V_OLD,))
    assert stream.on(FlushMessage(partition=P)) == (Clear(Seqno(8)), Reached(at(8)))


def test_a_consumer_that_resumes_inside_a_snapshot_is_consistent_when_the_old_end_is_reached_too() -> None:
    stream = streaming(7, bounds=True)
    stream.on(marker(7, 20))
    stream.on(change(9))
    stream.ended()
    stream.ask()
    stream.accepted((V_OLD,))
    stream.on(marker(9, 15))
    assert stream.on(change(15)) == (Deliver(change(15)),)
    assert stream.claim == inside(15, 7, 20)
    stream.on(marker(15, 20))
    assert stream.on(change(20)) == (Deliver(change(20)), Reached(at(20)))


# ── Rolling back ──────────────────────────────────────────────────────────────────────────────────


def test_the_worked_example_rolls_back_to_a_stored_place() -> None:
    stream = ConsumerStream(trail(300, 418, 434))
    assert stream.ask() == (RequestStream(at(434)),)
    assert stream.rollback_required(Seqno(426)) == (GoBack(at(418)),)
    assert stream.ask() == (RequestStream(at(418)),)
    assert stream.accepted((V_NEW, V_OLD)) == NOTHING
    assert stream.position == at(418, NEW)


def test_a_second_failover_during_the_handshake_is_another_rollback() -> None:
    stream = ConsumerStream(trail(300, 418, 434))
    stream.ask()
    stream.rollback_required(Seqno(426))
    stream.ask()
    assert stream.rollback_required(Seqno(400)) == (GoBack(at(300)),)
    stream.ask()
    assert stream.rollback_required(Seqno(0)) == (GoBack(START),)
    assert stream.ask() == (RequestStream(START),)


def test_a_producer_that_requires_the_present_position_again_and_again_causes_no_endless_loop() -> None:
    stream = ConsumerStream(trail(300, 418))
    stream.ask()
    assert stream.rollback_required(Seqno(418)) == (GoBack(at(300)),)
    stream.ask()
    assert stream.rollback_required(Seqno(999)) == (GoBack(START),)


def test_inside_a_snapshot_its_beginning_is_far_enough() -> None:
    stream = ConsumerStream(trail(7), inside=inside(9, 7, 12), bounds=True)
    stream.ask()
    assert stream.rollback_required(Seqno(7)) == (GoBack(at(7)),)


def test_a_driver_that_can_only_go_further_back_reports_it() -> None:
    stream = ConsumerStream(trail(300, 418, 434))
    stream.ask()
    stream.rollback_required(Seqno(426))
    stream.went_back(Seqno(300))
    assert stream.ask() == (RequestStream(at(300)),)
    with pytest.raises(LocalProtocolError, match="not a place where"):
        stream.went_back(Seqno(299))


def test_with_the_failover_log_the_best_place_is_requested_at_once() -> None:
    stream = ConsumerStream(trail(300, 418, 434))
    log = FailoverLog((V_NEW, V_OLD))
    assert stream.ask(stream.best(log, high=Seqno(500))) == (GoBack(at(418)), RequestStream(at(418)))


def test_a_place_before_the_newest_branch_is_claimed_under_an_older_one_where_only_that_is_known() -> None:
    stream = ConsumerStream(trail(300, 418, versions=(V_NEW, V_OLD)))
    never_saw_new = FailoverLog((Version(OTHER, Seqno(420)), V_OLD))
    assert stream.ask(stream.best(never_saw_new)) == (RequestStream(at(418, OLD)),)


def test_without_bounds_a_claim_inside_a_snapshot_holds_on_the_same_branch_only() -> None:
    for versions, expected in (((V_OLD,), NOTHING), ((V_NEW, V_OLD), (Stop(), GoBack(at(7))))):
        stream = streaming(7)
        stream.on(marker())
        stream.on(change(9))
        stream.ended()
        assert stream.ask() == (RequestStream(inside(9, 7, NO_END)),)
        assert stream.accepted(versions) == expected


def test_without_bounds_knowing_the_log_saves_the_detour() -> None:
    for versions, expected in (
        ((V_OLD,), (RequestStream(inside(9, 7, NO_END)),)),  # it ends on this branch, wherever that is
        ((V_NEW, V_OLD), (GoBack(at(7)), RequestStream(at(7)))),
    ):
        stream = ConsumerStream(trail(7), inside=inside(9, 7, NO_END))
        assert stream.ask(stream.best(FailoverLog(versions), high=Seqno(500))) == expected


def test_a_producer_that_is_behind_needs_no_second_request_either() -> None:
    stream = ConsumerStream(trail(300, 418, 434))
    effects = stream.ask(stream.best(FailoverLog((V_OLD,)), high=Seqno(426)))
    assert effects == (GoBack(at(418)), RequestStream(at(418)))


def test_a_copy_that_is_made_active_is_consistent() -> None:
    stream = ConsumerStream(trail(7), inside=inside(9, 7, NO_END))
    stream.ask()
    stream.accepted((V_OLD,))
    effects = stream.on(SetState(partition=P, state=State.ACTIVE))
    assert effects == (Reached(at(9)), TakeState(State.ACTIVE))


def test_a_copy_in_another_state_or_inside_a_snapshot_is_not_consistent() -> None:
    stream = ConsumerStream(trail(7), inside=inside(9, 7, NO_END))
    stream.ask()
    stream.accepted((V_OLD,))
    assert stream.on(SetState(partition=P, state=State.PENDING)) == (TakeState(State.PENDING),)
    stream.on(marker())
    assert stream.on(SetState(partition=P, state=State.ACTIVE)) == (TakeState(State.ACTIVE),)
    assert stream.position == at(7)


# ── What is refused ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seqno", [7, 3])
def test_seqnos_that_do_not_grow_are_refused(seqno: int) -> None:
    stream = streaming(7)
    stream.on(marker())
    with pytest.raises(RemoteProtocolError, match=f"seqno {seqno} came after 7"):
        stream.on(change(seqno))


def test_changes_outside_a_snapshot_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match='"between snapshots" cannot take "change"'):
        streaming(7).on(change(8))


def test_changes_past_the_end_of_their_snapshot_are_refused() -> None:
    stream = streaming(7, bounds=True)
    stream.on(marker(7, 10))
    with pytest.raises(RemoteProtocolError, match="ends at 10"):
        stream.on(change(11))


def test_a_snapshot_inside_another_is_refused_without_bounds() -> None:
    stream = streaming(7)
    stream.on(marker())
    with pytest.raises(RemoteProtocolError, match="inside another"):
        stream.on(marker())


def test_a_snapshot_before_the_position_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="announced after seqno 7"):
        streaming(7, bounds=True).on(marker(1, 6))


def test_a_flush_inside_a_snapshot_is_refused() -> None:
    stream = streaming(7)
    stream.on(marker())
    stream.on(change(8))
    with pytest.raises(RemoteProtocolError):
        stream.on(FlushMessage(partition=P))


def test_a_flush_before_the_known_end_of_a_snapshot_is_refused_and_one_that_may_be_its_end_is_not() -> None:
    for end, bounds in ((12, True), (NO_END, False)):
        stream = ConsumerStream(trail(7), inside=inside(9, 7, end), bounds=bounds)
        stream.ask()
        stream.accepted((V_OLD,))
        if bounds:
            with pytest.raises(RemoteProtocolError, match="inside a snapshot"):
                stream.on(FlushMessage(partition=P))
        else:
            assert stream.on(FlushMessage(partition=P)) == (Clear(Seqno(10)), Reached(at(10)))


def test_an_empty_snapshot_at_the_position_is_not_refused() -> None:
    stream = streaming(7, bounds=True)
    assert stream.on(marker(7, 7)) == NOTHING
    assert stream.position == at(7)


def test_a_marker_without_the_bounds_of_its_dialect_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="without bounds"):
        streaming(7, bounds=True).on(marker())


def test_a_stream_cannot_be_asked_for_twice() -> None:
    stream = ConsumerStream()
    stream.ask()
    with pytest.raises(LocalProtocolError):
        stream.ask()


def test_a_consumer_that_is_done_or_rolls_back_requests_no_stream_even_after_a_lost_connection() -> None:
    done, rolling = ConsumerStream(trail(300, 418)), ConsumerStream(trail(300, 418))
    done.finished()
    rolling.log_requested()
    rolling.undoing(Seqno(300))
    for stream, phase in ((done, Following.DONE), (rolling, Following.BACK)):
        stream.ended()
        assert stream.phase is phase
        with pytest.raises(LocalProtocolError):
            stream.ask()
    rolling.went_back(Seqno(0))
    assert rolling.ask() == (RequestStream(START),)


def test_an_accepted_stream_without_its_log_is_refused() -> None:
    stream = ConsumerStream()
    stream.ask()
    with pytest.raises(LocalProtocolError, match="request the log"):
        stream.accepted(())


def test_changes_without_seqnos_are_refused() -> None:
    stream = streaming()
    stream.on(marker())
    with pytest.raises(LocalProtocolError, match="TAP"):
        stream.on(MutationMessage(partition=P, key=b"key"))


def test_a_position_inside_a_snapshot_must_begin_where_the_trail_ends() -> None:
    with pytest.raises(ValueError, match="does not begin there"):
        ConsumerStream(trail(7), inside=inside(9, 8, 12))


def test_a_refused_request_leaves_everything_as_it_was() -> None:
    stream = ConsumerStream(trail(7))
    stream.ask()
    assert stream.ended(EndReason.OK) == (Over(EndReason.OK),)
    assert stream.phase is Following.AWAY
    assert stream.position == at(7)

"""The handshake of one partition, message by message."""

from __future__ import annotations

import pytest

from upper.client import events
from upper.client.lane import AskHighs, Drop, Lane, Stage
from upper.client.positions import Known
from upper.errors import RemoteProtocolError
from upper.model.messages import (
    EndReason,
    FailoverLogRequest,
    Mutation,
    SeqnoAdvanced,
    SnapshotEnd,
    SnapshotMarker,
    StreamEnd,
    StreamFlag,
    StreamRequest,
)
from upper.model.values import NO_END, BranchId, FailoverLog, Partition, Seqno, Version

P = Partition(7)
A, B, C = (BranchId(n) for n in (10, 20, 30))


def log(*versions: tuple[BranchId, int]) -> FailoverLog:
    return FailoverLog(tuple(Version(branch, Seqno(seqno)) for branch, seqno in versions))


def known(*ends: int, versions: FailoverLog | None = None) -> Known:
    return Known(versions or log((A, 0)), tuple(Seqno(end) for end in ends))


def change(seqno: int) -> Mutation:
    return Mutation(partition=P, key=b"k", seqno=Seqno(seqno))


def flowing(lane: Lane, versions: FailoverLog) -> None:
    """Bring a lane to where its stream flows."""
    (request,) = lane.open()
    assert isinstance(request, StreamRequest)
    assert lane.on_accepted(versions.versions) == []
    assert lane.stage is Stage.FLOWING


def test_the_request_says_where_we_stand_and_asks_for_the_log() -> None:
    lane = Lane(P, known(5, 9, versions=log((B, 4), (A, 0))), until=Seqno(20))
    (request,) = lane.open()
    assert request == StreamRequest(
        partition=P,
        opaque=P,
        flags=StreamFlag.SEND_LOG,
        start=Seqno(9),
        end=Seqno(20),
        branch=B,
        high_seqno=Seqno(4),
    )


def test_whoever_stands_past_the_end_still_asks_whether_that_is_true() -> None:
    (request,) = Lane(P, known(9), until=Seqno(5)).open()
    assert isinstance(request, StreamRequest)
    assert (request.start, request.end) == (9, 9)
    (endless,) = Lane(P, known(9)).open()
    assert isinstance(endless, StreamRequest)
    assert endless.end == NO_END


def test_a_rollback_leads_to_the_newest_place_of_ones_own_before_it() -> None:
    lane = Lane(P, known(3, 6, 9))
    lane.open()
    (ask,) = lane.on_rollback(Seqno(8))
    assert isinstance(ask, FailoverLogRequest)
    (event,) = lane.on_log(log((B, 8), (A, 0)))
    assert event == events.Rollback(
        partition=P, to=Seqno(6), branch=B, why="histories part at 8", lost=(Seqno(6), Seqno(9))
    )
    assert lane.stage is Stage.BACK
    (request,) = lane.went_back(None, connected=True)
    assert isinstance(request, StreamRequest)
    assert (request.start, request.branch) == (6, A)


def test_the_application_may_go_back_further_and_is_believed() -> None:
    lane = Lane(P, known(3, 6, 9))
    lane.open()
    lane.on_rollback(Seqno(8))
    lane.on_log(log((B, 8), (A, 0)))
    (request,) = lane.went_back(Seqno(3), connected=True)
    assert isinstance(request, StreamRequest)
    assert request.start == 3
    assert lane.known.ends == (3,)


def test_a_second_failover_during_the_handshake_leads_further_back() -> None:
    lane = Lane(P, known(3, 6, 9))
    lane.open()
    lane.on_rollback(Seqno(8))
    lane.on_log(log((B, 8), (A, 0)))
    lane.went_back(None, connected=True)
    (ask,) = lane.on_rollback(Seqno(4))
    assert isinstance(ask, FailoverLogRequest)
    (event,) = lane.on_log(log((C, 4), (A, 0)))
    assert isinstance(event, events.Rollback)
    assert (event.to, event.lost, event.branch) == (3, (3, 6), C)


def test_a_node_that_never_saw_our_newest_branch_may_know_an_older_one() -> None:
    lane = Lane(P, known(3, 6, 9, versions=log((B, 6), (A, 0))))
    lane.open()
    lane.on_rollback(Seqno(0))
    (event,) = lane.on_log(log((C, 7), (A, 0)))
    assert isinstance(event, events.Rollback)
    assert event.to == 6, "up to there both are the first branch"
    (request,) = lane.went_back(None, connected=True)
    assert isinstance(request, StreamRequest)
    assert (request.branch, request.start) == (A, 6)


def test_purged_deletions_lead_to_the_beginning_and_not_in_circles() -> None:
    lane = Lane(P, known(3, 6, 9))
    lane.open()
    lane.on_rollback(Seqno(0))
    (event,) = lane.on_log(log((A, 0)))
    assert isinstance(event, events.Rollback)
    assert event.to == 0
    assert "purged" in event.why


def test_cut_inside_a_snapshot_it_goes_on_there_if_the_branch_is_still_the_same() -> None:
    lane = Lane(P, known(3))
    flowing(lane, log((A, 0)))
    for message in (SnapshotMarker(partition=P), change(5), change(6)):
        lane.on(message)
    lane.cut()
    (ask,) = lane.open()
    assert isinstance(ask, FailoverLogRequest)
    (request,) = lane.on_log(log((A, 0)))
    assert isinstance(request, StreamRequest)
    assert request.start == 6
    lane.on_accepted(log((A, 0)).versions)
    lane.on(SnapshotMarker(partition=P))
    lane.on(change(8))
    (end,) = lane.on(SnapshotEnd(partition=P))
    assert isinstance(end, events.SnapshotEnd)
    assert lane.known.ends == (3, 8), "only where a snapshot ended is a place to keep"


def test_cut_inside_a_snapshot_it_goes_back_if_the_branch_is_another() -> None:
    lane = Lane(P, known(3))
    flowing(lane, log((A, 0)))
    lane.on(SnapshotMarker(partition=P))
    lane.on(change(5))
    lane.cut()
    lane.open()
    (event,) = lane.on_log(log((B, 9), (A, 0)))
    assert isinstance(event, events.Rollback)
    assert (event.to, event.lost) == (3, (3, 5))


def test_a_branch_between_the_log_and_the_stream_is_noticed_and_the_connection_dropped() -> None:
    lane = Lane(P, known(3))
    flowing(lane, log((A, 0)))
    lane.on(SnapshotMarker(partition=P))
    lane.on(change(5))
    lane.cut()
    lane.open()
    lane.on_log(log((A, 0)))
    drop, event = lane.on_accepted(log((B, 9), (A, 0)).versions)
    assert isinstance(drop, Drop)
    assert isinstance(event, events.Rollback)
    assert event.to == 3
    lane.cut()
    assert lane.open() == [], "not before the application has gone back"
    assert lane.went_back(None, connected=False) == []
    (request,) = lane.open()
    assert isinstance(request, StreamRequest)
    assert request.start == 3


def test_a_stream_that_leaves_things_out_says_how_far_it_went_or_we_stand_where_we_stood() -> None:
    """The last snapshot may have been cut, with nothing in it for us: the bucket was never at its end."""
    lane = Lane(P, known(3), until=Seqno(20))
    flowing(lane, log((A, 0)))
    for message in (SnapshotMarker(partition=P), change(5), SeqnoAdvanced(partition=P, seqno=Seqno(12))):
        lane.on(message)
    (end,) = lane.on(SnapshotEnd(partition=P))
    assert isinstance(end, events.SnapshotEnd)
    assert end.seqno == 12
    assert lane.on(StreamEnd(partition=P)) == []
    assert lane.stage is Stage.DONE
    assert lane.known.ends == (3, 12)


def test_an_end_inside_a_snapshot_is_an_end_but_no_place_to_keep() -> None:
    lane = Lane(P, known(3), until=Seqno(5))
    flowing(lane, log((A, 0)))
    lane.on(SnapshotMarker(partition=P))
    lane.on(change(5))
    assert lane.on(StreamEnd(partition=P)) == []
    assert lane.stage is Stage.DONE
    assert lane.known.ends == (3,)


@pytest.mark.parametrize("reason", [EndReason.STATE_CHANGED, EndReason.TOO_SLOW, EndReason.SHUTTING_DOWN])
def test_any_other_end_is_no_end_for_us(reason: EndReason) -> None:
    lane = Lane(P, known(3), until=Seqno(5))
    flowing(lane, log((A, 0)))
    told = lane.on(StreamEnd(partition=P, reason=reason))
    assert lane.stage is Stage.RESTING
    assert [type(event) for event in told] == (
        [events.StateChange] if reason is EndReason.STATE_CHANGED else []
    )


def test_what_cannot_be_is_not_believed() -> None:
    lane = Lane(P, known(3))
    flowing(lane, log((A, 0)))
    with pytest.raises(RemoteProtocolError):
        lane.on(change(5))  # outside any snapshot
    lane.on(SnapshotMarker(partition=P))
    with pytest.raises(RemoteProtocolError):
        lane.on(change(3))  # not after where we stand


def test_without_flags_the_log_stands_on_both_sides_of_the_stream_and_must_be_the_same() -> None:
    lane = Lane(P, known(3), log_apart=True)
    (ask,) = lane.open()
    assert isinstance(ask, FailoverLogRequest)
    request, again = lane.on_log(log((A, 0)))
    assert isinstance(request, StreamRequest)
    assert again == ask
    assert lane.on_accepted(()) == []
    assert lane.on_log(log((A, 0))) == []
    (drop,) = lane.on_log(log((B, 3), (A, 0)))
    assert isinstance(drop, Drop), "the stream may be of either branch"


def test_without_flags_the_end_is_how_far_the_partition_turns_out_to_be() -> None:
    lane = Lane(P, known(3), until=Seqno(20), flags=StreamFlag.UNTIL_NOW, log_apart=True)
    lane.open()
    request, _, highs = lane.on_log(log((A, 0)))
    assert isinstance(request, StreamRequest)
    assert request.end == 20
    assert isinstance(highs, AskHighs)
    lane.on_accepted(())
    assert lane.on_high(Seqno(25)) == [], "it goes on by itself"
    assert lane.on_high(None) == [], "somebody else holds it, and will tell"
    (drop,) = lane.on_high(Seqno(8))
    assert isinstance(drop, Drop)
    lane.cut()
    lane.open()
    request, _, _ = lane.on_log(log((B, 8), (A, 0)))
    assert isinstance(request, StreamRequest)
    assert request.end == 8


def test_an_end_that_was_given_is_waited_for_however_far_the_partition_is() -> None:
    lane = Lane(P, known(3), until=Seqno(20), log_apart=True)
    lane.open()
    assert len(lane.on_log(log((A, 0)))) == 2
    lane.on_accepted(())
    assert lane.on_high(Seqno(8)) == []
    assert lane.until == 20

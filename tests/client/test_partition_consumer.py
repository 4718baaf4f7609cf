"""The handshake of one partition, message by message."""

from __future__ import annotations

import pytest

from upper.client import events
from upper.client.partition_consumer import DropConnection, PartitionConsumer, RequestSeqnos
from upper.client.position_codec import ResumePoints
from upper.errors import RemoteProtocolError
from upper.history.following import Following
from upper.model.messages import (
    EndReason,
    FailoverLogRequest,
    MutationMessage,
    SeqnoAdvanced,
    SnapshotEndMessage,
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


def known(*ends: int, versions: FailoverLog | None = None) -> ResumePoints:
    return ResumePoints(versions or log((A, 0)), tuple(Seqno(end) for end in ends))


def change(seqno: int) -> MutationMessage:
    return MutationMessage(partition=P, key=b"k", seqno=Seqno(seqno))


def flowing(consumer: PartitionConsumer, versions: FailoverLog) -> None:
    """Open the stream."""
    (request,) = consumer.open()
    assert isinstance(request, StreamRequest)
    assert consumer.on_accepted(versions.versions) == []
    assert consumer.stream.phase is Following.BETWEEN


def test_the_request_states_the_position_and_asks_for_the_log() -> None:
    consumer = PartitionConsumer(P, known(5, 9, versions=log((B, 4), (A, 0))), until=Seqno(20))
    (request,) = consumer.open()
    assert request == StreamRequest(
        partition=P,
        opaque=P,
        flags=StreamFlag.SEND_LOG,
        start=Seqno(9),
        end=Seqno(20),
        branch=B,
        high_seqno=Seqno(4),
    )


def test_a_consumer_past_the_end_still_asks_whether_its_position_holds() -> None:
    (request,) = PartitionConsumer(P, known(9), until=Seqno(5)).open()
    assert isinstance(request, StreamRequest)
    assert (request.start, request.end) == (9, 9)
    (endless,) = PartitionConsumer(P, known(9)).open()
    assert isinstance(endless, StreamRequest)
    assert endless.end == NO_END


def test_a_rollback_leads_to_the_newest_place_of_ones_own_before_it() -> None:
    consumer = PartitionConsumer(P, known(3, 6, 9))
    consumer.open()
    (ask,) = consumer.on_rollback(Seqno(8))
    assert isinstance(ask, FailoverLogRequest)
    (event,) = consumer.on_log(log((B, 8), (A, 0)))
    assert event == events.Rollback(
        partition=P, to=Seqno(6), branch=B, why="histories diverge at 8", lost=(Seqno(6), Seqno(9))
    )
    assert consumer.stream.phase is Following.BACK
    (request,) = consumer.went_back(None, connected=True)
    assert isinstance(request, StreamRequest)
    assert (request.start, request.branch) == (6, A)


def test_the_application_may_go_back_further_than_requested() -> None:
    consumer = PartitionConsumer(P, known(3, 6, 9))
    consumer.open()
    consumer.on_rollback(Seqno(8))
    consumer.on_log(log((B, 8), (A, 0)))
    (request,) = consumer.went_back(Seqno(3), connected=True)
    assert isinstance(request, StreamRequest)
    assert request.start == 3
    assert consumer.known.ends == (3,)


def test_a_rollback_survives_a_lost_connection_and_the_log_of_that_connection_does_not() -> None:
    consumer = PartitionConsumer(P, known(3, 6, 9), log_apart=True)
    consumer.open()
    consumer.on_log(log((B, 8), (A, 0)))
    consumer.cut()
    assert consumer.stream.phase is Following.BACK
    assert consumer.open() == [], "the application has not gone back yet"
    (ask,) = consumer.went_back(None, connected=True)
    assert isinstance(ask, FailoverLogRequest), "the new connection may lead to another history"


def test_a_rollback_that_a_lost_connection_required_is_not_applied_to_the_next_one() -> None:
    consumer = PartitionConsumer(P, known(3, 6, 9), log_apart=True)
    consumer.open()
    consumer.on_log(log((A, 0)))
    consumer.on_rollback(Seqno(4))
    consumer.cut()
    consumer.open()
    request, _ = consumer.on_log(log((A, 0)))
    assert isinstance(request, StreamRequest)
    assert request.start == 9


def test_answers_to_no_request_are_protocol_errors_of_the_node() -> None:
    consumer = PartitionConsumer(P, known(3))
    flowing(consumer, log((A, 0)))
    with pytest.raises(RemoteProtocolError, match='"between snapshots" cannot take "failover log requested"'):
        consumer.on_rollback(Seqno(2))
    consumer.cut()
    with pytest.raises(RemoteProtocolError, match='"away" cannot take "accepted"'):
        consumer.on_accepted(())


def test_a_second_failover_during_the_handshake_leads_further_back() -> None:
    consumer = PartitionConsumer(P, known(3, 6, 9))
    consumer.open()
    consumer.on_rollback(Seqno(8))
    consumer.on_log(log((B, 8), (A, 0)))
    consumer.went_back(None, connected=True)
    (ask,) = consumer.on_rollback(Seqno(4))
    assert isinstance(ask, FailoverLogRequest)
    (event,) = consumer.on_log(log((C, 4), (A, 0)))
    assert isinstance(event, events.Rollback)
    assert (event.to, event.lost, event.branch) == (3, (3, 6), C)


def test_a_node_without_the_newest_branch_of_a_consumer_may_have_an_older_one() -> None:
    consumer = PartitionConsumer(P, known(3, 6, 9, versions=log((B, 6), (A, 0))))
    consumer.open()
    consumer.on_rollback(Seqno(0))
    (event,) = consumer.on_log(log((C, 7), (A, 0)))
    assert isinstance(event, events.Rollback)
    assert event.to == 6, "up to there both are the first branch"
    (request,) = consumer.went_back(None, connected=True)
    assert isinstance(request, StreamRequest)
    assert (request.branch, request.start) == (A, 6)


def test_purged_deletions_lead_to_the_beginning_and_not_in_circles() -> None:
    consumer = PartitionConsumer(P, known(3, 6, 9))
    consumer.open()
    consumer.on_rollback(Seqno(0))
    (event,) = consumer.on_log(log((A, 0)))
    assert isinstance(event, events.Rollback)
    assert event.to == 0
    assert "purged" in event.why


def test_cut_inside_a_snapshot_it_goes_on_there_if_the_branch_is_still_the_same() -> None:
    consumer = PartitionConsumer(P, known(3))
    flowing(consumer, log((A, 0)))
    for message in (SnapshotMarker(partition=P), change(5), change(6)):
        consumer.on(message)
    consumer.cut()
    (ask,) = consumer.open()
    assert isinstance(ask, FailoverLogRequest)
    (request,) = consumer.on_log(log((A, 0)))
    assert isinstance(request, StreamRequest)
    assert request.start == 6
    consumer.on_accepted(log((A, 0)).versions)
    consumer.on(SnapshotMarker(partition=P))
    consumer.on(change(8))
    (end,) = consumer.on(SnapshotEndMessage(partition=P))
    assert isinstance(end, events.SnapshotEnd)
    assert consumer.known.ends == (3, 8), "only where a snapshot ended is a place to keep"


def test_cut_inside_a_snapshot_it_goes_back_if_the_branch_is_another() -> None:
    consumer = PartitionConsumer(P, known(3))
    flowing(consumer, log((A, 0)))
    consumer.on(SnapshotMarker(partition=P))
    consumer.on(change(5))
    consumer.cut()
    consumer.open()
    (event,) = consumer.on_log(log((B, 9), (A, 0)))
    assert isinstance(event, events.Rollback)
    assert (event.to, event.lost) == (3, (3, 5))


def test_a_branch_between_the_log_and_the_stream_is_noticed_and_the_connection_dropped() -> None:
    consumer = PartitionConsumer(P, known(3))
    flowing(consumer, log((A, 0)))
    consumer.on(SnapshotMarker(partition=P))
    consumer.on(change(5))
    consumer.cut()
    consumer.open()
    consumer.on_log(log((A, 0)))
    drop, event = consumer.on_accepted(log((B, 9), (A, 0)).versions)
    assert isinstance(drop, DropConnection)
    assert isinstance(event, events.Rollback)
    assert event.to == 3
    consumer.cut()
    assert consumer.open() == [], "not before the application has gone back"
    assert consumer.went_back(None, connected=False) == []
    (request,) = consumer.open()
    assert isinstance(request, StreamRequest)
    assert request.start == 3


def test_a_filtered_stream_reports_how_far_it_went_or_the_position_stays() -> None:
    """The last snapshot may have been cut, with nothing in it for us: the bucket was never at its end."""
    consumer = PartitionConsumer(P, known(3), until=Seqno(20))
    flowing(consumer, log((A, 0)))
    for message in (SnapshotMarker(partition=P), change(5), SeqnoAdvanced(partition=P, seqno=Seqno(12))):
        consumer.on(message)
    (end,) = consumer.on(SnapshotEndMessage(partition=P))
    assert isinstance(end, events.SnapshotEnd)
    assert end.seqno == 12
    assert consumer.on(StreamEnd(partition=P)) == []
    assert consumer.stream.phase is Following.DONE
    assert consumer.known.ends == (3, 12)


def test_an_end_inside_a_snapshot_is_an_end_but_no_place_to_keep() -> None:
    consumer = PartitionConsumer(P, known(3), until=Seqno(5))
    flowing(consumer, log((A, 0)))
    consumer.on(SnapshotMarker(partition=P))
    consumer.on(change(5))
    assert consumer.on(StreamEnd(partition=P)) == []
    assert consumer.stream.phase is Following.DONE
    assert consumer.known.ends == (3,)


@pytest.mark.parametrize("reason", [EndReason.STATE_CHANGED, EndReason.TOO_SLOW, EndReason.SHUTTING_DOWN])
def test_any_other_end_of_a_stream_does_not_end_the_consumer(reason: EndReason) -> None:
    consumer = PartitionConsumer(P, known(3), until=Seqno(5))
    flowing(consumer, log((A, 0)))
    reported = consumer.on(StreamEnd(partition=P, reason=reason))
    assert consumer.stream.phase is Following.AWAY
    assert [type(event) for event in reported] == (
        [events.StateChange] if reason is EndReason.STATE_CHANGED else []
    )


def test_a_change_outside_a_snapshot_or_before_the_position_is_rejected() -> None:
    consumer = PartitionConsumer(P, known(3))
    flowing(consumer, log((A, 0)))
    with pytest.raises(RemoteProtocolError):
        consumer.on(change(5))  # outside any snapshot
    consumer.on(SnapshotMarker(partition=P))
    with pytest.raises(RemoteProtocolError):
        consumer.on(change(3))  # not after where we stand


def test_without_flags_the_log_stands_on_both_sides_of_the_stream_and_must_be_the_same() -> None:
    consumer = PartitionConsumer(P, known(3), log_apart=True)
    (ask,) = consumer.open()
    assert isinstance(ask, FailoverLogRequest)
    request, again = consumer.on_log(log((A, 0)))
    assert isinstance(request, StreamRequest)
    assert again == ask
    assert consumer.on_accepted(()) == []
    assert consumer.on_log(log((A, 0))) == []
    (drop,) = consumer.on_log(log((B, 3), (A, 0)))
    assert isinstance(drop, DropConnection), "the stream may be of either branch"


def test_without_flags_the_end_is_how_far_the_partition_turns_out_to_be() -> None:
    consumer = PartitionConsumer(P, known(3), until=Seqno(20), flags=StreamFlag.UNTIL_NOW, log_apart=True)
    consumer.open()
    request, _, highs = consumer.on_log(log((A, 0)))
    assert isinstance(request, StreamRequest)
    assert request.end == 20
    assert isinstance(highs, RequestSeqnos)
    consumer.on_accepted(())
    assert consumer.on_high(Seqno(25)) == [], "it goes on by itself"
    assert consumer.on_high(None) == [], "another node holds it, and will answer"
    (drop,) = consumer.on_high(Seqno(8))
    assert isinstance(drop, DropConnection)
    consumer.cut()
    consumer.open()
    request, _, _ = consumer.on_log(log((B, 8), (A, 0)))
    assert isinstance(request, StreamRequest)
    assert request.end == 8


def test_an_end_that_was_given_is_waited_for_however_far_the_partition_is() -> None:
    consumer = PartitionConsumer(P, known(3), until=Seqno(20), log_apart=True)
    consumer.open()
    assert len(consumer.on_log(log((A, 0)))) == 2
    consumer.on_accepted(())
    assert consumer.on_high(Seqno(8)) == []
    assert consumer.until == 20

"""The producer's stream: what forms a snapshot, when it leaves, and how it ends."""

from __future__ import annotations

import pytest

from upper.errors import LocalProtocolError
from upper.history.producing import (
    NEXT,
    NOTHING,
    CloseSnapshot,
    CloseWrites,
    End,
    Forward,
    ProducerStream,
    Reopen,
    Retire,
    Send,
    SendFlush,
    Sending,
    SendState,
    Start,
    Take,
)
from upper.model.messages import EndReason, StreamFlag
from upper.model.values import NO_END, ZERO, Seqno, State

CLOSED = CloseSnapshot()


def s(number: int) -> Seqno:
    return Seqno(number)


def opened(
    start: int = 0,
    *,
    high: int = 10,
    end: int = NO_END,
    flags: StreamFlag = StreamFlag.NONE,
    filtered: bool = False,
    exact: bool = False,
) -> ProducerStream:
    stream = ProducerStream(s(start), high=s(high), end=s(end), flags=flags, filtered=filtered, exact=exact)
    assert stream.open() == (Start(), Take(s(start)))
    return stream


def live(start: int = 10, *, filtered: bool = False, exact: bool = False) -> ProducerStream:
    stream = opened(start, high=start, filtered=filtered, exact=exact)
    assert stream.taken(s(start), durable=s(start), purged=ZERO) == NOTHING
    assert stream.phase is Sending.LIVE
    return stream


def test_a_backfill_is_one_snapshot_up_to_the_high_seqno_and_then_the_stream_is_live() -> None:
    stream = opened(4)
    assert stream.taken(s(10), durable=s(10), purged=ZERO) == (Send(s(4), s(10), s(10)),)
    assert stream.done(s(10)) == (CLOSED,)
    assert stream.phase is Sending.LIVE
    assert stream.committed(s(11), s(13)) == (Forward(s(10), s(13), s(13)),)
    assert (stream.sent, stream.announced) == (13, 13)


def test_a_snapshot_that_is_not_durable_waits_until_it_is() -> None:
    stream = opened()
    assert stream.taken(s(10), durable=s(7), purged=ZERO) == NOTHING
    assert stream.phase is Sending.WAITING
    assert stream.committed(s(8), s(9)) == NOTHING
    assert stream.committed(s(10), s(12)) == (Send(s(0), s(10), s(10)),)
    assert stream.done(s(10)) == (
        CLOSED,
        Take(s(10)),
    )  # 11 and 12 were committed meanwhile


def test_what_is_committed_while_a_snapshot_leaves_is_read_from_the_store_afterwards() -> None:
    stream = opened()
    stream.taken(s(10), durable=s(10), purged=ZERO)
    assert stream.committed(s(11), s(12)) == NOTHING
    assert stream.done(s(10)) == (
        CLOSED,
        Take(s(10)),
    )
    assert stream.taken(s(12), durable=s(12), purged=ZERO) == (Send(s(10), s(12), s(12)),)


def test_a_commit_that_was_already_sent_is_not_sent_again() -> None:
    stream = opened()
    stream.taken(s(10), durable=s(8), purged=ZERO)
    stream.committed(s(9), s(10))
    stream.done(s(10))
    assert stream.phase is Sending.LIVE
    assert stream.committed(s(9), s(10)) == NOTHING
    assert stream.committed(s(10), s(11)) == (Take(s(10)),)  # half of it is new: the store decides which


def test_without_room_a_commit_is_not_queued_but_read_later() -> None:
    stream = live()
    assert stream.committed(s(11), s(11), room=False) == NOTHING
    assert stream.phase is Sending.BEHIND
    assert stream.committed(s(12), s(14)) == NOTHING
    assert stream.room() == (Take(s(10)),)
    assert stream.taken(s(14), durable=s(14), purged=ZERO) == (Send(s(10), s(14), s(14)),)
    assert stream.room() == NOTHING


def test_a_stream_that_was_in_step_continues_behind_what_it_was_sent_there() -> None:
    stream = live()
    stream.join()
    stream.leave(s(15))
    assert stream.phase is Sending.LIVE
    assert stream.committed(s(14), s(15)) == NOTHING
    assert stream.committed(s(16), s(17)) == (Forward(s(15), s(17), s(17)),)


def test_only_a_live_stream_joins_others_in_step() -> None:
    with pytest.raises(LocalProtocolError):
        opened().join()
    with pytest.raises(LocalProtocolError):
        live().leave(s(15))


# ── Ends ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_stream_that_ends_where_it_begins_ends_at_once() -> None:
    stream = ProducerStream(s(7), high=s(10), end=s(7))
    assert stream.open() == (Start(), End(EndReason.OK))


def test_a_stream_until_now_ends_at_the_high_seqno_of_its_request() -> None:
    stream = opened(high=10, flags=StreamFlag.UNTIL_NOW)
    assert stream.taken(s(10), durable=s(10), purged=ZERO) == (Send(s(0), s(10), s(10)),)
    assert stream.done(s(10)) == (
        CLOSED,
        End(EndReason.OK),
    )


def test_until_now_and_an_earlier_end_take_the_earlier() -> None:
    assert ProducerStream(s(0), high=s(10), end=s(4), flags=StreamFlag.UNTIL_NOW).until == 4
    assert ProducerStream(s(0), high=s(10), end=s(40), flags=StreamFlag.UNTIL_NOW).until == 10


def test_nothing_past_the_end_is_sent_and_a_cut_snapshot_does_not_close() -> None:
    stream = opened(end=6)
    assert stream.taken(s(10), durable=s(10), purged=ZERO) == (Send(s(0), s(10), s(6), closes=False),)
    assert stream.done(s(5)) == (End(EndReason.OK),)


def test_a_cut_that_lost_nothing_closes() -> None:
    stream = opened(end=6)
    effects = stream.taken(s(10), durable=s(10), purged=ZERO, cut_is_whole=True)
    assert effects == (Send(s(0), s(6), s(6)),)
    assert stream.done(s(6)) == (
        CLOSED,
        End(EndReason.OK),
    )


def test_whole_snapshots_go_past_the_end_and_close() -> None:
    stream = opened(end=6, flags=StreamFlag.WHOLE_SNAPSHOTS)
    assert stream.taken(s(10), durable=s(10), purged=ZERO) == (Send(s(0), s(10), s(10)),)
    assert stream.done(s(10)) == (
        CLOSED,
        End(EndReason.OK),
    )


def test_a_live_commit_is_cut_exactly_at_the_end() -> None:
    stream = opened(end=12)
    stream.taken(s(10), durable=s(10), purged=ZERO)
    stream.done(s(10))
    assert stream.committed(s(11), s(15)) == (Forward(s(10), s(12), s(12)), End(EndReason.OK))


def test_a_live_commit_goes_past_the_end_with_whole_snapshots() -> None:
    stream = opened(end=12, flags=StreamFlag.WHOLE_SNAPSHOTS)
    stream.taken(s(10), durable=s(10), purged=ZERO)
    stream.done(s(10))
    assert stream.committed(s(11), s(15)) == (Forward(s(10), s(15), s(15)), End(EndReason.OK))


@pytest.mark.parametrize("reason", [EndReason.CLOSED, EndReason.STATE_CHANGED, EndReason.SHUTTING_DOWN])
def test_a_stream_can_be_stopped_at_any_time_and_only_once(reason: EndReason) -> None:
    stream = opened()
    stream.taken(s(10), durable=s(10), purged=ZERO)
    assert stream.stop(reason) == (End(reason),)
    assert stream.stop(reason) == NOTHING
    assert stream.done(s(4)) == stream.committed(s(11), s(12)) == stream.flushed(s(13)) == NOTHING
    assert stream.room() == stream.acknowledged() == stream.closed(s(13)) == NOTHING


# ── Purges and flushes ────────────────────────────────────────────────────────────────────────────


def test_a_consumer_that_fell_behind_purged_deletions_gets_no_further_changes() -> None:
    stream = live()
    stream.committed(s(11), s(20), room=False)
    assert stream.room() == (Take(s(10)),)
    assert stream.taken(s(20), durable=s(20), purged=s(11)) == (End(EndReason.TOO_SLOW),)


def test_a_consumer_at_the_purge_seqno_goes_on() -> None:
    stream = live()
    stream.committed(s(11), s(20), room=False)
    stream.room()
    assert stream.taken(s(20), durable=s(20), purged=s(10)) == (Send(s(10), s(20), s(20)),)


def test_a_consumer_that_begins_at_zero_has_missed_no_deletion() -> None:
    assert opened(0).taken(s(20), durable=s(20), purged=s(15)) == (Send(s(0), s(20), s(20)),)


def test_a_replica_at_zero_must_have_the_purge_seqno_of_its_first_snapshot() -> None:
    stream = ProducerStream(ZERO, high=s(9), exact=True, purged=s(4))
    stream.open()
    assert stream.taken(s(9), durable=s(9), purged=s(5)) == (End(EndReason.TOO_SLOW),)
    stream = ProducerStream(ZERO, high=s(9), exact=True, purged=s(4))
    stream.open()
    assert stream.taken(s(9), durable=s(9), purged=s(4)) == (Send(ZERO, s(9), s(9)),)


def test_a_replica_at_zero_that_is_live_ends_at_a_flush_that_it_cannot_count() -> None:
    stream = ProducerStream(ZERO, high=ZERO, exact=True, purged=ZERO)
    stream.open()
    stream.taken(ZERO, durable=ZERO, purged=ZERO)
    assert stream.flushed(s(5)) == (End(EndReason.TOO_SLOW),)


def test_a_live_stream_gets_the_flush_and_carries_on() -> None:
    stream = live()
    assert stream.flushed(s(11)) == (SendFlush(s(11)),)
    assert stream.committed(s(12), s(12)) == (Forward(s(11), s(12), s(12)),)


def test_a_flush_on_an_empty_partition_is_sent_too() -> None:
    stream = live(0)
    assert stream.flushed(s(1)) == (SendFlush(s(1)),)


def test_a_flush_waits_for_room_and_for_the_snapshot_before_it() -> None:
    stream = opened()
    stream.taken(s(10), durable=s(10), purged=ZERO)
    assert stream.flushed(s(11)) == NOTHING
    assert stream.committed(s(12), s(12)) == NOTHING
    assert stream.done(s(10)) == (CLOSED, SendFlush(s(11)), Take(s(11)))
    behind = live()
    assert behind.flushed(s(11), room=False) == NOTHING
    assert behind.room() == (SendFlush(s(11)),)
    assert behind.phase is Sending.LIVE


def test_a_flush_that_comes_while_the_store_is_read_is_sent_first() -> None:
    stream = opened(10)
    assert stream.flushed(s(11)) == NOTHING
    assert stream.taken(s(13), durable=s(13), purged=s(11)) == (SendFlush(s(11)), Take(s(11)))
    assert stream.taken(s(13), durable=s(13), purged=s(11)) == (Send(s(11), s(13), s(13)),)
    ending = opened(10, end=11)
    ending.flushed(s(11))
    assert ending.taken(s(13), durable=s(13), purged=s(11)) == (SendFlush(s(11)), End(EndReason.OK))


def test_a_flush_is_sent_once() -> None:
    stream = live()
    assert stream.flushed(s(11)) == (SendFlush(s(11)),)
    assert stream.flushed(s(11)) == NOTHING
    assert stream.phase is Sending.LIVE


def test_a_flush_that_does_not_meet_the_consumer_right_before_it_ends_the_stream() -> None:
    """It would count itself to a seqno where no other copy is empty."""
    stream = live(filtered=True)
    assert stream.committed(s(11), s(12)) == (Forward(s(10), s(12), s(12)),)
    assert stream.done(s(10)) == (CLOSED,)  # all of it was filtered out
    assert stream.flushed(s(13)) == (End(EndReason.TOO_SLOW),)


def test_an_empty_consumer_is_sent_no_flush() -> None:
    stream = opened(0)
    stream.taken(s(10), durable=s(10), purged=s(10))
    assert stream.done(ZERO) == (CLOSED,)
    assert stream.flushed(s(11)) == NOTHING
    assert stream.committed(s(12), s(12)) == (Forward(s(11), s(12), s(12)),)


def test_a_flush_that_is_the_end_of_the_stream_ends_it() -> None:
    stream = opened(10, end=11)
    stream.taken(s(10), durable=s(10), purged=ZERO)
    assert stream.flushed(s(11)) == (SendFlush(s(11)), End(EndReason.OK))
    busy = opened(end=11)
    busy.taken(s(10), durable=s(10), purged=ZERO)
    busy.flushed(s(11))
    assert busy.done(s(10)) == (CLOSED, SendFlush(s(11)), End(EndReason.OK))


# ── Filters ───────────────────────────────────────────────────────────────────────────────────────


def test_a_filtered_stream_moves_forward_without_sending() -> None:
    stream = live(filtered=True)
    stream.committed(s(11), s(12))
    assert stream.done(s(10)) == (CLOSED,)
    assert (stream.sent, stream.announced) == (12, 10)
    assert stream.committed(s(13), s(13)) == (Forward(s(12), s(13), s(13)),)


def test_a_dialect_with_seqno_advanced_sends_how_far_history_went() -> None:
    stream = live(filtered=True, exact=True)
    stream.committed(s(11), s(12))
    assert stream.done(s(11)) == (CloseSnapshot(s(12)),)
    assert stream.announced == 12
    stream.committed(s(13), s(13))
    assert stream.done(s(13)) == (CLOSED,)


def test_a_filtered_stream_reaches_its_end() -> None:
    stream = opened(10, end=12, filtered=True)
    stream.taken(s(10), durable=s(10), purged=ZERO)
    assert stream.committed(s(11), s(14)) == (Forward(s(10), s(12), s(12)),)
    assert stream.done(s(10)) == (
        CLOSED,
        End(EndReason.OK),
    )


# ── Takeover ──────────────────────────────────────────────────────────────────────────────────────


def handing_over() -> ProducerStream:
    stream = opened(flags=StreamFlag.TAKEOVER)
    stream.taken(s(10), durable=s(10), purged=ZERO)
    assert stream.done(s(10)) == (
        CLOSED,
        SendState(State.PENDING),
    )
    assert stream.acknowledged() == (CloseWrites(),)
    return stream


def test_a_takeover_drains_before_the_other_side_becomes_active() -> None:
    stream = handing_over()
    assert stream.closed(s(12)) == (Take(s(10)),)
    assert stream.taken(s(12), durable=s(11), purged=ZERO) == NOTHING
    assert stream.committed(s(12), s(12)) == (Send(s(10), s(12), s(12)),)
    assert stream.done(s(12)) == (
        CLOSED,
        SendState(State.ACTIVE),
    )
    assert stream.acknowledged() == (Retire(), End(EndReason.OK))


def test_a_takeover_with_nothing_left_to_drain() -> None:
    stream = handing_over()
    assert stream.closed(s(10)) == (Take(s(10)),)
    assert stream.taken(s(10), durable=s(10), purged=ZERO) == (SendState(State.ACTIVE),)


@pytest.mark.parametrize("drained", [False, True])
def test_a_takeover_that_fails_before_the_handover_opens_the_copy_again(drained: bool) -> None:
    stream = handing_over()
    if drained:
        stream.closed(s(12))
        stream.taken(s(12), durable=s(12), purged=ZERO)
    assert stream.stop(EndReason.DISCONNECTED) == (Reopen(), End(EndReason.DISCONNECTED))


def test_a_takeover_that_is_not_confirmed_makes_this_copy_active_as_a_new_branch() -> None:
    """The other copy may be active: the same branch would then have two histories."""
    stream = handing_over()
    stream.closed(s(10))
    stream.taken(s(10), durable=s(10), purged=ZERO)
    ended = End(EndReason.DISCONNECTED)
    assert stream.stop(EndReason.DISCONNECTED) == (Reopen(branch=True), ended)


def test_a_takeover_that_was_confirmed_stays_closed() -> None:
    stream = handing_over()
    stream.closed(s(10))
    stream.taken(s(10), durable=s(10), purged=ZERO)
    assert stream.acknowledged() == (Retire(), End(EndReason.OK))
    assert stream.stop(EndReason.DISCONNECTED) == NOTHING


def test_a_takeover_is_refused_when_the_other_side_cannot_get_the_last_seqno() -> None:
    """It would give out seqnos for the second time under the same branch."""
    stream = handing_over()
    stream.closed(s(11))
    stream.taken(s(11), durable=s(11), purged=ZERO)
    assert stream.done(s(10)) == (CLOSED, Reopen(), End(EndReason.STATE_CHANGED))


# ── The table ─────────────────────────────────────────────────────────────────────────────────────


def test_what_is_not_in_the_table_cannot_happen() -> None:
    with pytest.raises(LocalProtocolError, match='a stream that is "reading" cannot take "opened"'):
        opened().open()
    with pytest.raises(LocalProtocolError, match='"live" cannot take'):
        live().done(s(10))


def test_every_phase_can_be_reached_and_every_phase_but_the_last_can_end() -> None:
    assert set(NEXT.values()) == set(Sending) - {Sending.OPENING}
    leaves = {phase for (phase, _), after in NEXT.items() if after is Sending.ENDED}
    assert leaves == set(Sending) - {Sending.ENDED}


def test_a_commit_of_which_nothing_was_sent_is_not_closed() -> None:
    stream = live(filtered=True)
    assert stream.committed(s(11), s(11)) == (Forward(s(10), s(11), s(11)),)
    assert stream.done(s(10), opened=False) == NOTHING
    assert (stream.sent, stream.announced) == (11, 10)

"""The states of a partition's copy: which transitions exist, and which of them begin a history branch.

The protocol has four states. A copy that is dead because of a takeover needs more detail: while the
takeover runs no other copy is active, and afterwards one may be. So a copy is in one of six states, and
`Ownership.state` is the one of the four that a peer sees.

Invariant: a copy that another may have replaced as the active one never becomes active again under the same
branch. A consumer of the other copy then rolls back to the point where the two histories diverge.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from upper.errors import InvalidArguments
from upper.model.values import State


class Ownership(StrEnum):
    """The state of this node's copy, including what other copies may have become."""

    ACTIVE = "active"
    PENDING = "pending"
    REPLICA = "replica"
    DEAD = "dead"
    HANDING_OVER = "being handed over"  # dead to writers; the other side is not active yet
    HANDED_OVER = "handed over"  # dead; the other side was made active

    @property
    def state(self) -> State:
        """The state that the protocol has for it."""
        return _STATES[self]


_STATES: Final = {
    Ownership.ACTIVE: State.ACTIVE,
    Ownership.PENDING: State.PENDING,
    Ownership.REPLICA: State.REPLICA,
    Ownership.DEAD: State.DEAD,
    Ownership.HANDING_OVER: State.DEAD,
    Ownership.HANDED_OVER: State.DEAD,
}


class Access(StrEnum):
    """What clients may do with an active copy. The cluster decides it; alone, a copy is open."""

    OPEN = "open"
    READ_ONLY = "read-only"  # fewer in-sync copies than the minimum: changes are refused
    WAITING = "waiting"  # requests wait: the copy is being activated, or handed over
    CLOSED = "closed"  # requests are refused: another copy may be active


class StateCue(StrEnum):
    """What changes the state of a copy. The first four have the names of the protocol's states."""

    ACTIVE = "active"
    PENDING = "pending"
    REPLICA = "replica"
    DEAD = "dead"
    HAND_OVER = "hand over"  # a takeover closes writes
    RELEASE = "release"  # a takeover makes the other side active
    TAKE_BACK = "take back"  # a takeover ended before that
    RESTART = "restart"


class Transition(NamedTuple):
    after: Ownership
    branch: bool = False  # a history branch begins


def _requested(*before: Ownership) -> dict[tuple[Ownership, StateCue], Transition]:
    """Rows for transitions that are always allowed and keep the history."""
    cues = (StateCue.ACTIVE, StateCue.PENDING, StateCue.REPLICA, StateCue.DEAD)
    return {(one, cue): Transition(Ownership(cue.value)) for one in before for cue in cues}


NEXT: Final[Mapping[tuple[Ownership, StateCue], Transition]] = {
    **_requested(Ownership.ACTIVE, Ownership.PENDING, Ownership.REPLICA, Ownership.DEAD),
    (Ownership.ACTIVE, StateCue.HAND_OVER): Transition(Ownership.HANDING_OVER),
    (Ownership.HANDING_OVER, StateCue.RELEASE): Transition(Ownership.HANDED_OVER),
    (Ownership.HANDING_OVER, StateCue.TAKE_BACK): Transition(Ownership.ACTIVE),
    # The release may have been sent and not stored: a branch costs consumers nothing where it was not.
    (Ownership.HANDING_OVER, StateCue.ACTIVE): Transition(Ownership.ACTIVE, branch=True),
    (Ownership.HANDING_OVER, StateCue.DEAD): Transition(Ownership.HANDED_OVER),
    (Ownership.HANDING_OVER, StateCue.RESTART): Transition(Ownership.ACTIVE, branch=True),
    (Ownership.HANDED_OVER, StateCue.ACTIVE): Transition(Ownership.ACTIVE, branch=True),
    (Ownership.HANDED_OVER, StateCue.PENDING): Transition(Ownership.PENDING),
    (Ownership.HANDED_OVER, StateCue.REPLICA): Transition(Ownership.REPLICA),
    (Ownership.HANDED_OVER, StateCue.DEAD): Transition(Ownership.HANDED_OVER),
}


def transition(before: Ownership, cue: StateCue) -> Transition:
    """The row of the table, or an error that names state and request."""
    try:
        return NEXT[before, cue]
    except KeyError:
        raise InvalidArguments(
            f'a partition that is "{before}" cannot take "{cue}"; wait for the takeover to end, or cancel it '
            "by making the partition active"
        ) from None

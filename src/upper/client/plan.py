"""From what a caller wants to a follower that knows where to begin and where to end. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypedDict

from upper.client.calls import Call
from upper.client.checkpoint import Store
from upper.client.commands import Commands
from upper.client.events import Rollback
from upper.client.follow import Follower, FollowSettings
from upper.client.lane import Lane
from upper.client.positions import Known, Positions
from upper.client.routes import Routes
from upper.client.tap import TapFollower
from upper.errors import BadCheckpoint, InvalidArguments
from upper.model.messages import StreamFlag
from upper.model.values import Partition, Position, Seqno
from upper.wire.table import Dialect
from upper.wire.upr import UPR
from upper.wire.upr0 import UPR0

# Words are checked when they are used: most programs have them in a variable.
Since: TypeAlias = "str | Store | Mapping[Partition, Position]"  # "beginning" or "now"
Until: TypeAlias = "str | Mapping[Partition, Seqno] | None"  # "now"
# What a callback returns: None, or where it stands if it went further back; for asyncio it may be awaited.
OnRollback: TypeAlias = "Literal['continue'] | Callable[[Rollback], object] | None"
OPERATIONS = ("mutation", "deletion", "expiration")


class Wishes(TypedDict, total=False):
    """The arguments of `changes` and `changes_arrow`; `Wanted` has their defaults and says what they mean."""

    since: Since
    checkpoint: Store | None
    until: Until
    partitions: Iterable[int] | None
    keys_only: bool
    key_prefix: str | bytes | None
    operations: Sequence[str] | None
    whole_snapshots: bool
    on_rollback: OnRollback
    acknowledge: Literal["automatic", "manual"]
    checkpoint_every: float
    name: str
    settings: FollowSettings


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to follow, from where, and to where."""

    since: Since = "beginning"
    checkpoint: Store | None = None  # kept there, and taken up from there where there is something
    until: Until = None
    partitions: Iterable[int] | None = None  # None: all of them
    keys_only: bool = False
    key_prefix: str | bytes | None = None
    operations: Sequence[str] | None = None
    whole_snapshots: bool = False
    # Not to wait for `until` where the history, seen when the stream opens, does not reach so far (any more).
    # With "now" this is so anyway: what a failover took back since then will not come.
    at_most_now: bool = False
    on_rollback: OnRollback = None
    acknowledge: Literal["automatic", "manual"] = "automatic"
    checkpoint_every: float = 1.0  # seconds between two saves, at least
    name: str = ""
    settings: FollowSettings = field(default_factory=FollowSettings)

    @property
    def store(self) -> Store | None:
        if self.checkpoint is not None:
            return self.checkpoint
        since = self.since
        return since if isinstance(since, Store) and not isinstance(since, Mapping) else None

    @property
    def has_state(self) -> bool:
        """Somebody who comes back with a position has something built on it."""
        return self.checkpoint is not None or not isinstance(self.since, str)


@dataclass(frozen=True)
class Plan:
    follower: Follower
    begins: Positions  # what was known at the start


def plan(
    wanted: Wanted, commands: Commands, *, dialect: str, bucket: str, random: Callable[[], float]
) -> Call[Plan]:
    """Ask the nodes what is needed to begin."""
    _check(wanted)
    routes = yield from commands.patient_learn()
    partitions = _partitions(wanted, routes)
    begins = yield from _since(wanted, commands, partitions, bucket=bucket)
    if dialect == "tap":
        return Plan(_tap(wanted, routes, partitions, random=random), begins)
    until = yield from _until(wanted, commands, partitions)
    spoken: Dialect = {"upr": UPR, "upr0": UPR0}[dialect]
    if spoken is UPR0 and (
        wanted.keys_only or wanted.key_prefix or wanted.operations or wanted.whole_snapshots
    ):
        raise InvalidArguments("upr0:// has no filters and no whole snapshots; use upr:// for them")
    flags = StreamFlag.NONE
    if wanted.keys_only:
        flags |= StreamFlag.KEYS_ONLY
    if wanted.whole_snapshots:
        flags |= StreamFlag.WHOLE_SNAPSHOTS
    if wanted.at_most_now or wanted.until == "now":
        flags |= StreamFlag.UNTIL_NOW
    lanes = [
        Lane(
            partition,
            begins.known(partition),
            until=None if until is None else until[partition],
            flags=flags,
            log_apart=spoken is UPR0,
        )
        for partition in partitions
    ]
    follower = Follower(
        lanes,
        routes,
        dialect=spoken,
        random=random,
        controls=_controls(wanted),
        settings=wanted.settings,
    )
    return Plan(follower, begins)


def _tap(
    wanted: Wanted, routes: Routes, partitions: list[Partition], *, random: Callable[[], float]
) -> Follower:
    if wanted.has_state or isinstance(wanted.until, Mapping):
        raise InvalidArguments("tap:// has no positions to come back to or to end at; use upr:// for them")
    if wanted.key_prefix or wanted.operations or wanted.whole_snapshots:
        raise InvalidArguments("tap:// has no filters and no snapshots; use upr:// for them")
    return TapFollower(
        [Lane(partition, Known()) for partition in partitions],
        routes,
        name=wanted.name or f"upper-{int(random() * 2**48):012x}",
        only_new=wanted.since == "now",
        dump=wanted.until == "now",
        keys_only=wanted.keys_only,
        random=random,
        settings=wanted.settings,
    )


def _check(wanted: Wanted) -> None:
    if wanted.operations is not None and (
        not wanted.operations or not set(wanted.operations) <= set(OPERATIONS)
    ):
        raise InvalidArguments(
            f"operations are some of {', '.join(OPERATIONS)}, not {list(wanted.operations)}"
        )
    if isinstance(wanted.since, str) and wanted.since not in ("beginning", "now"):
        raise InvalidArguments(
            f"since is 'beginning', 'now', a checkpoint or positions, not {wanted.since!r}"
        )
    if isinstance(wanted.until, str) and wanted.until != "now":
        raise InvalidArguments(f"until is None, 'now' or seqnos by partition, not {wanted.until!r}")


def _partitions(wanted: Wanted, routes: Routes) -> list[Partition]:
    if wanted.partitions is None:
        return [Partition(p) for p in range(routes.partitions)]
    chosen = sorted({Partition(p) for p in wanted.partitions})
    if not chosen or chosen[0] < 0 or chosen[-1] >= routes.partitions:
        raise InvalidArguments(f"partitions are numbers from 0 to {routes.partitions - 1}, and at least one")
    return chosen


def _since(
    wanted: Wanted, commands: Commands, partitions: list[Partition], *, bucket: str
) -> Call[Positions]:
    since, of = wanted.since, commands.routes.partitions
    if wanted.checkpoint is not None and (kept := wanted.checkpoint.load()) is not None:
        since = kept
    if since == "beginning":
        return Positions({}, bucket=bucket, of=of)
    if since == "now":
        logs = yield from commands.failover_logs(partitions)
        highs = yield from commands.seqnos()
        known = {p: Known(logs[p], (highs[p],) if highs.get(p) else ()) for p in partitions}
        return Positions(known, bucket=bucket, of=of)
    loaded: object = since.load() if isinstance(since, Store) else since
    if loaded is None:
        return Positions({}, bucket=bucket, of=of)
    if not isinstance(loaded, Mapping):
        raise InvalidArguments("since is 'beginning', 'now', a checkpoint or positions")
    positions = loaded if isinstance(loaded, Positions) else Positions(loaded)
    if positions.bucket not in (None, bucket):
        raise BadCheckpoint(
            f"this checkpoint is of bucket {positions.bucket!r}, not {bucket!r}; name another, or start over"
        )
    if positions.of not in (None, of) or any(partition >= of for partition in positions):
        raise BadCheckpoint(
            f"this checkpoint is of {positions.of or 'more'} partitions, and the bucket has {of}; start over"
        )
    return Positions({p: positions.known(p) for p in positions}, bucket=bucket, of=of)


def _until(
    wanted: Wanted, commands: Commands, partitions: list[Partition]
) -> Call[Mapping[Partition, Seqno] | None]:
    if wanted.until is None:
        return None
    if isinstance(wanted.until, str):
        highs = yield from commands.seqnos()
        return {p: highs.get(p, Seqno(0)) for p in partitions}
    until = wanted.until
    missing = [p for p in partitions if p not in until]
    if missing:
        raise InvalidArguments(
            f"until says nothing about partition {missing[0]}; give a seqno for each that is followed"
        )
    return until


def _controls(wanted: Wanted) -> dict[bytes, bytes]:
    controls = {}
    if wanted.name:
        controls[b"name"] = wanted.name.encode()
    if wanted.key_prefix:
        prefix = wanted.key_prefix
        controls[b"filter.key.prefix"] = prefix.encode() if isinstance(prefix, str) else prefix
    if wanted.operations is not None:
        controls[b"filter.operations"] = ",".join(wanted.operations).encode()
    return controls

"""From the options of `changes` to a follower with a start and an end in each partition. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypedDict

from upper.client.calls import Call
from upper.client.checkpoint import Store
from upper.client.commands import Commands
from upper.client.events import Rollback
from upper.client.follow import Follower, FollowSettings
from upper.client.partition_consumer import PartitionConsumer
from upper.client.position_codec import ResumePoints
from upper.client.positions import Positions
from upper.client.routes import Routes
from upper.client.tap import TapFollower
from upper.errors import BadCheckpoint, InvalidArguments
from upper.model.messages import StreamFlag
from upper.model.values import NO_END, Partition, Position, Seqno
from upper.wire.session import DIALECTS

# Plain str instead of literals: most programs have the word in a variable, and it is checked when used.
Since: TypeAlias = "str | Store | Mapping[Partition, Position]"  # "beginning" or "now"
Until: TypeAlias = "str | Mapping[Partition, Seqno] | None"  # "now"
# A callback returns None, or the seqno to which it went back if that is further; for asyncio it may be
# awaited.
OnRollback: TypeAlias = "Literal['continue'] | Callable[[Rollback], object] | None"
OPERATIONS = ("mutation", "deletion", "expiration")
FILTER_MODES = ("view", "events")


class ChangesOptions(TypedDict, total=False):
    """The keyword arguments of `changes` and `changes_arrow`; `ChangesRequest` has their defaults."""

    since: Since
    checkpoint: Store | None
    until: Until
    partitions: Iterable[int] | None
    keys_only: bool
    key_prefix: str | bytes | None
    key_pattern: str | None
    value_filter: str | None
    filter_mode: str | None
    operations: Sequence[str] | None
    whole_snapshots: bool
    at_most_now: bool
    on_rollback: OnRollback
    acknowledge: Literal["automatic", "manual"]
    checkpoint_every: float
    name: str
    settings: FollowSettings


@dataclass(frozen=True, kw_only=True)
class ChangesRequest:
    """What to read, from where, and up to where."""

    since: Since = "beginning"
    checkpoint: Store | None = None  # positions are saved there, and loaded if it has any
    until: Until = None
    partitions: Iterable[int] | None = None  # None: all of them
    keys_only: bool = False
    key_prefix: str | bytes | None = None
    key_pattern: str | None = None  # RE2, found anywhere in the key
    value_filter: str | None = None  # a comparison with a part of a JSON value: $.type == "order"
    # With a value filter: "view" (default of nodes) sends a deletion for a key whose new value does not
    # match; "events" sends matching changes alone.
    filter_mode: str | None = None
    operations: Sequence[str] | None = None
    whole_snapshots: bool = False
    # End at the high seqno of the moment at which the stream opens, if that is below `until`. With "now"
    # this is always so: changes that a failover has removed since would never arrive.
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
    def filtered(self) -> bool:
        """Whether nodes leave out some changes."""
        return bool(
            self.key_prefix or self.key_pattern or self.value_filter or self.filter_mode or self.operations
        )

    @property
    def has_state(self) -> bool:
        """Whether the application resumes, so that it has state which a rollback must undo."""
        return self.checkpoint is not None or not isinstance(self.since, str)


@dataclass(frozen=True)
class Plan:
    follower: Follower
    begins: Positions  # of the start


def plan(
    request: ChangesRequest, commands: Commands, *, dialect: str, bucket: str, random: Callable[[], float]
) -> Call[Plan]:
    """Request from the nodes what is needed to begin."""
    _check(request)
    routes = yield from commands.patient_learn()
    partitions = _partitions(request, routes)
    begins = yield from _since(request, commands, partitions, bucket=bucket)
    chosen_dialect = DIALECTS[dialect]
    if not chosen_dialect.positions:
        return Plan(_tap(request, routes, partitions, random=random), begins)
    until = yield from _until(request, commands, partitions)
    less = request.keys_only or request.filtered or request.whole_snapshots
    if less and not (chosen_dialect.settings and chosen_dialect.stream_flags):
        raise InvalidArguments(f"{dialect}:// has no filters and no whole snapshots; use upr:// for them")
    flags = StreamFlag.NONE
    if request.keys_only:
        flags |= StreamFlag.KEYS_ONLY
    if request.whole_snapshots:
        flags |= StreamFlag.WHOLE_SNAPSHOTS
    if request.at_most_now or request.until == "now":
        flags |= StreamFlag.UNTIL_NOW
    consumers = [
        PartitionConsumer(
            partition,
            begins.known(partition),
            until=None if until is None else until[partition],
            flags=flags,
            log_apart=not chosen_dialect.log_in_answer,
            bounds=chosen_dialect.snapshot_bounds,
        )
        for partition in partitions
    ]
    follower = Follower(
        consumers,
        routes,
        dialect=chosen_dialect,
        random=random,
        controls=_controls(request),
        settings=request.settings,
    )
    return Plan(follower, begins)


def _tap(
    request: ChangesRequest, routes: Routes, partitions: list[Partition], *, random: Callable[[], float]
) -> Follower:
    if request.has_state or isinstance(request.until, Mapping):
        raise InvalidArguments("tap:// has no positions to resume from or to end at; use upr:// for them")
    if request.filtered or request.whole_snapshots:
        raise InvalidArguments("tap:// has no filters and no snapshots; use upr:// for them")
    return TapFollower(
        [
            PartitionConsumer(partition, ResumePoints(), until=NO_END if request.until == "now" else None)
            for partition in partitions
        ],
        routes,
        name=request.name or f"upper-{int(random() * 2**48):012x}",
        random_name=not request.name,
        only_new=request.since == "now",
        dump=request.until == "now",
        keys_only=request.keys_only,
        random=random,
        settings=request.settings,
    )


def _check(request: ChangesRequest) -> None:
    if request.operations is not None:
        unknown = ", ".join(repr(name) for name in request.operations if name not in OPERATIONS)
        if unknown or not request.operations:
            problem = f"there is no operation {unknown}" if unknown else "operations is empty"
            raise InvalidArguments(f"{problem}; use some of {', '.join(OPERATIONS)}")
    if request.filter_mode not in (None, *FILTER_MODES):
        raise InvalidArguments(
            f"filter_mode is {request.filter_mode!r}; it is one of {', '.join(FILTER_MODES)}"
        )
    for name in ("key_prefix", "key_pattern", "value_filter"):
        if not isinstance(value := getattr(request, name), str | bytes | None):
            raise InvalidArguments(f"{name} is text, not {type(value).__name__}")
    if isinstance(request.since, str) and request.since not in ("beginning", "now"):
        raise InvalidArguments(
            f"since is 'beginning', 'now', a checkpoint or positions, not {request.since!r}"
        )
    if not isinstance(request.checkpoint, Store | None):
        raise InvalidArguments(
            f"checkpoint is an object with load and save, not {request.checkpoint!r}; "
            "for a file, give upper.Checkpoint(FILE)"
        )
    if isinstance(request.until, str) and request.until != "now":
        raise InvalidArguments(f"until is None, 'now' or seqnos by partition, not {request.until!r}")
    if not (request.on_rollback in (None, "continue") or callable(request.on_rollback)):
        raise InvalidArguments(f"on_rollback is a function, 'continue' or None, not {request.on_rollback!r}")
    if request.acknowledge not in ("automatic", "manual"):
        raise InvalidArguments(f"acknowledge is 'automatic' or 'manual', not {request.acknowledge!r}")


def _partitions(request: ChangesRequest, routes: Routes) -> list[Partition]:
    if request.partitions is None:
        return [Partition(p) for p in range(routes.partitions)]
    given = list(request.partitions)
    if not all(isinstance(partition, int) for partition in given):
        raise InvalidArguments("partitions are whole numbers")
    chosen = sorted({Partition(p) for p in given})
    if not chosen or chosen[0] < 0 or chosen[-1] >= routes.partitions:
        raise InvalidArguments(f"partitions are numbers from 0 to {routes.partitions - 1}, and at least one")
    return chosen


def _since(
    request: ChangesRequest, commands: Commands, partitions: list[Partition], *, bucket: str
) -> Call[Positions]:
    since, of = request.since, commands.routes.partitions
    if request.checkpoint is not None and (kept := request.checkpoint.load()) is not None:
        since = kept
    if since == "beginning":
        return Positions({}, bucket=bucket, of=of)
    if since == "now":
        logs = yield from commands.failover_logs(partitions)
        highs = yield from commands.seqnos()
        known = {p: ResumePoints(logs[p], (highs[p],) if highs.get(p) else ()) for p in partitions}
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
    request: ChangesRequest, commands: Commands, partitions: list[Partition]
) -> Call[Mapping[Partition, Seqno] | None]:
    if request.until is None:
        return None
    if isinstance(request.until, str):
        highs = yield from commands.seqnos()
        # A partition without an active copy may get one: it then ends at its high seqno of that moment.
        return {p: highs.get(p, NO_END) for p in partitions}
    until = request.until
    missing = [p for p in partitions if p not in until]
    if missing:
        raise InvalidArguments(
            f"until has no seqno for partition {missing[0]}; give one for each partition that is read"
        )
    return until


def _controls(request: ChangesRequest) -> dict[bytes, bytes]:
    settings = {
        b"name": request.name,
        b"filter.key.prefix": request.key_prefix,
        b"filter.key.pattern": request.key_pattern,
        b"filter.value": request.value_filter,
        b"filter.mode": request.filter_mode,
        b"filter.operations": ",".join(request.operations or ()),
    }
    return {
        name: value.encode() if isinstance(value, str) else value for name, value in settings.items() if value
    }

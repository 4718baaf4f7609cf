"""Every history of a small model: one partition on three copies, a few keys, a few events.

One copy is active and takes writes; the others follow it by obeying the resume decision, keep the states of
their own snapshot ends to go back to, and may be made active in their turn. The active copy that was
replaced stays in the world and follows from then on, with whatever it alone had written.

The world has the real contents of every copy. After every event each follower is brought up to date in
the model, and must then hold exactly what the active copy holds. Nothing of that comparison uses the rule
that is being tried.

States that differ only in the names of keys or followers are one state, and each is visited once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import NamedTuple, TypeAlias

from upper.history.resume import Answer, Refuse, Resume, RollbackTo, decide
from upper.model.values import BranchId, FailoverLog, Position, Seqno, Snapshot, Version

# An item: seqno << 9 | number of the write << 1 | deleted; 0 = never written. One slot for each key.
Items: TypeAlias = tuple[int, ...]
Log: TypeAlias = tuple[tuple[int, int], ...]
Decide: TypeAlias = Callable[..., Answer]

MAX_IMAGES = 2


class Copy(NamedTuple):
    """One node's copy of the partition."""

    items: Items
    seqno: int  # the last change it holds
    start: int  # the snapshot that this change belongs to; start = end = seqno at its end
    end: int
    purged: int
    log: Log
    images: tuple[tuple[int, Items, int], ...]  # own snapshot ends: seqno, items, purge seqno; newest first


class World(NamedTuple):
    active: Copy
    before: Copy | None  # the active copy without its last write: what an unclean restart leaves of it
    followers: tuple[Copy, ...]
    writes: int
    branches: int


class Divergence(AssertionError):
    """A follower rolled back as required and does not hold what the active copy holds."""


@dataclass
class Explored:
    """What an exploration saw."""

    histories: int  # sequences of events, symmetric ones counted too
    states: int
    handshakes: int
    rollbacks: int

    def __str__(self) -> str:
        return (
            f"{self.histories:,} histories, {self.states:,} distinct states, "
            f"{self.handshakes:,} handshakes, {self.rollbacks:,} rollbacks performed"
        )


class Model:
    """The events of the small model, under a given resume decision."""

    def __init__(self, rule: Decide = decide, *, keys: int = 2, followers: int = 2) -> None:
        self.keys = keys
        self.handshakes = self.rollbacks = 0
        empty = (0,) * keys
        self.nothing = Copy(empty, 0, 0, 0, 0, (), ())
        self.first = World(
            Copy(empty, 0, 0, 0, 0, ((1, 0),), ()), None, (self.nothing,) * followers, writes=0, branches=1
        )

        @cache
        def judge(branch: int, at: tuple[int, int, int], log: Log, high: int, purged: int) -> Answer:
            seqno, start, end = (Seqno(number) for number in at)
            return rule(
                Position(BranchId(branch), seqno, Snapshot(start, end)),
                failover_log(log),
                high=Seqno(high),
                purged=Seqno(purged),
            )

        self._judge = judge

    # ── Following ─────────────────────────────────────────────────────────────────────────────────

    def handshake(self, copy: Copy, active: Copy) -> Copy:
        """The follower sends requests, and rolls back as required, until one is accepted."""
        for _ in range(2 * MAX_IMAGES + 4):
            self.handshakes += 1
            branch = copy.log[0][0] if copy.log else 0
            answer = self._judge(branch, self.claim(copy), active.log, active.seqno, active.purged)
            match answer:
                case Resume():
                    return copy
                case RollbackTo(to=to):
                    self.rollbacks += 1
                    copy = self.gone_back(copy, to)
                case Refuse(why=why):
                    raise Divergence(f"a truthful request was refused: {why}")
        raise Divergence("the handshake does not end")

    def claim(self, copy: Copy) -> tuple[int, int, int]:
        """The position that a follower claims: its seqno, and the snapshot around it."""
        return copy.seqno, copy.start, copy.end

    def gone_back(self, copy: Copy, to: int) -> Copy:
        """The newest own snapshot end at or before `to`."""
        inside = copy.start < copy.seqno < copy.end
        for seqno, items, purged in copy.images:
            if seqno <= to and (inside or seqno < copy.seqno):
                kept = tuple(image for image in copy.images if image[0] <= seqno)
                return Copy(items, seqno, seqno, seqno, purged, copy.log, kept)
        return self.nothing

    def stream(self, copy: Copy, active: Copy, records: int | None) -> Copy:
        """A handshake, then that many records of one snapshot, or all of it."""
        copy = self.handshake(copy, active)
        coming = sorted(item for item in active.items if item >> 9 > copy.seqno)
        inside = copy.start < copy.seqno < copy.end
        start = copy.start if inside else copy.seqno
        if inside and active.seqno < copy.end:
            raise Divergence(f"inside a snapshot that ends at {copy.end}, past all that exists here")
        whole = records is None or records >= len(coming)
        items = list(copy.items)
        for item in coming if whole else coming[:records]:
            items[active.items.index(item)] = item
        held = tuple(items)
        if not whole:
            reached = coming[records - 1] >> 9 if records else copy.seqno
            return Copy(held, reached, start, active.seqno, copy.purged, active.log, copy.images)
        end = active.seqno
        purged = self.purged_upstream(end) if start == 0 else copy.purged
        images = copy.images
        if end and (not images or images[0][0] < end):
            images = ((end, held, purged), *images)[:MAX_IMAGES]
        return Copy(held, end, end, end, purged, active.log, images)

    def purged_upstream(self, end: int) -> int:
        """A copy that began at 0 does not have the deletions purged by then: it counts all as purged."""
        return end

    def promoted_at(self, copy: Copy) -> int:
        """Where the branch of a promoted copy begins: at the last snapshot that it holds completely."""
        return copy.start if copy.seqno < copy.end else copy.seqno

    def last_purged(self, copy: Copy) -> int:
        """The newest deletion that may be purged: the newest change of all stays."""
        return copy.seqno - 1

    def check(self, world: World) -> None:
        """Every follower, brought up to date, holds what the active copy holds."""
        truth = tuple(0 if item & 1 else item for item in world.active.items)
        for follower in world.followers:
            copy = self.stream(follower, world.active, None)
            if tuple(0 if item & 1 else item for item in copy.items) != truth:
                raise Divergence(f"{follower} became {copy}, but the active copy is {world.active}")

    # ── Events ────────────────────────────────────────────────────────────────────────────────────

    def events(self, world: World) -> Iterator[tuple[str, World]]:
        active, followers = world.active, world.followers
        for key in range(self.keys):
            yield f"write {key}", self.changed(world, key, deleted=0)
            if active.items[key] and not active.items[key] & 1:
                yield f"delete {key}", self.changed(world, key, deleted=1)
        if (purged := self.purge(active)) != active:
            yield "purge the active copy", world._replace(active=purged)
        if active.seqno:
            yield "flush, received by no follower", self.flushed(world, received=False)
            if any(in_step(follower, active) for follower in followers):
                yield "flush, received by every follower in step", self.flushed(world, received=True)
        if world.before is not None:
            yield "unclean restart", self.restarted(world)
        for index, follower in enumerate(followers):
            others = followers[:index], followers[index + 1 :]

            def with_follower(copy: Copy, others: tuple[tuple[Copy, ...], ...] = others) -> tuple[Copy, ...]:
                return (*others[0], copy, *others[1])

            synced = self.stream(follower, active, None)
            yield f"follower {index} catches up", world._replace(followers=with_follower(synced))
            for records in range(1, self.keys):
                partly = self.stream(follower, active, records)
                if partly.seqno != partly.end:
                    yield (
                        f"follower {index} takes {records} of a snapshot",
                        world._replace(followers=with_follower(partly)),
                    )
            yield (
                f"takeover by follower {index}",
                world._replace(active=synced, before=None, followers=with_follower(active)),
            )
            yield (
                f"failover to follower {index}",
                world._replace(
                    active=self.promoted(follower, world.branches + 1),
                    before=None,
                    followers=with_follower(active),
                    branches=world.branches + 1,
                ),
            )
            if (purged := self.purge(follower)) != follower:
                yield f"purge follower {index}", world._replace(followers=with_follower(purged))

    def changed(self, world: World, key: int, *, deleted: int) -> World:
        active, seqno = world.active, world.active.seqno + 1
        items = list(active.items)
        items[key] = seqno << 9 | (world.writes + 1) << 1 | deleted
        after = active._replace(items=tuple(items), seqno=seqno, start=seqno, end=seqno)
        return world._replace(active=after, before=active, writes=world.writes + 1)

    def flushed(self, world: World, *, received: bool) -> World:
        seqno = world.active.seqno + 1
        empty = self.nothing.items

        def after(copy: Copy) -> Copy:
            images = ((seqno, empty, seqno), *copy.images)[:MAX_IMAGES]
            return Copy(empty, seqno, seqno, seqno, seqno, copy.log, images)

        followers = tuple(
            after(copy) if received and in_step(copy, world.active) else copy for copy in world.followers
        )
        return world._replace(
            active=after(world.active)._replace(images=world.active.images),
            before=world.active,
            followers=followers,
        )

    def restarted(self, world: World) -> World:
        assert world.before is not None
        branch = world.branches + 1
        return world._replace(active=self.promoted(world.before, branch), before=None, branches=branch)

    def promoted(self, copy: Copy, branch: int) -> Copy:
        """The copy made active without proof that it has everything."""
        versions: Log = ((branch, 0),)
        if copy.log:
            at = Seqno(self.promoted_at(copy))
            log = failover_log(copy.log).promoted(at, fresh=BranchId(branch))
            versions = tuple((version.branch, version.seqno) for version in log)
        return copy._replace(start=copy.seqno, end=copy.seqno, log=versions)

    def purge(self, copy: Copy) -> Copy:
        """Purges every deletion that may be purged."""
        last = self.last_purged(copy)
        gone = [item >> 9 for item in copy.items if item & 1 and item >> 9 <= last]
        if not gone:
            return copy
        items = tuple(0 if item & 1 and item >> 9 <= last else item for item in copy.items)
        return copy._replace(items=items, purged=max(copy.purged, *gone))

    # ── All of it ─────────────────────────────────────────────────────────────────────────────────

    def explore(self, depth: int) -> Explored:
        """Every history of up to `depth` events; raises Divergence with the history that leads to it."""
        layer: dict[World, int] = {self.canonical(self.first): 1}
        origin: dict[World, tuple[World, str] | None] = dict.fromkeys(layer)
        histories = 0
        for _ in range(depth):
            following: Counter[World] = Counter()
            for world, paths in layer.items():
                try:
                    events = list(self.events(world))
                except Divergence as problem:
                    raise Divergence(f"{story(origin, world)}: {problem}") from None
                for name, after in events:
                    state = self.canonical(after)
                    if state not in origin:
                        origin[state] = (world, name)
                        try:
                            self.check(state)
                        except Divergence as problem:
                            raise Divergence(f"{story(origin, state)}: {problem}") from None
                    following[state] += paths
                    histories += paths
            layer = following
        return Explored(histories, len(origin), self.handshakes, self.rollbacks)

    def canonical(self, world: World) -> World:
        """The same world under the names that sort first."""
        best: World | None = None
        for order in permutations(range(self.keys)):
            active = renamed(world.active, order)
            before = renamed(world.before, order) if world.before is not None else None
            followers = tuple(sorted(renamed(follower, order) for follower in world.followers))
            if best is None or (active, followers) < (best.active, best.followers):
                best = World(active, before, followers, world.writes, world.branches)
        assert best is not None
        return best


@cache
def failover_log(log: Log) -> FailoverLog:
    return FailoverLog(tuple(Version(BranchId(branch), Seqno(seqno)) for branch, seqno in log))


def in_step(copy: Copy, active: Copy) -> bool:
    return copy.log == active.log and copy.seqno == copy.end == active.seqno


def renamed(copy: Copy, order: tuple[int, ...]) -> Copy:
    items, seqno, start, end, purged, log, images = copy
    return Copy(
        tuple(items[key] for key in order),
        seqno,
        start,
        end,
        purged,
        log,
        tuple((at, tuple(held[key] for key in order), gone) for at, held, gone in images),
    )


def story(origin: dict[World, tuple[World, str] | None], state: World) -> str:
    """The events that led to a state."""
    events: list[str] = []
    while (step := origin[state]) is not None:
        state, name = step
        events.append(name)
    return ", then ".join(reversed(events)) or "at the very beginning"

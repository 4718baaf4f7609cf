"""Placement: which nodes should hold which copies, decided from the members and the present map. Pure.

Copies per node differ by at most one, and so do active copies. Copies of a partition lie on different nodes
and, where the zones allow it, in different zones. Copies that may stay do stay: a node that joins receives
its share from the others, and no other copy moves.

Balancing active copies moves no data: a replica and an active copy exchange their roles, along a path of
partitions where no direct exchange exists.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heapify, heappop, heappush

from upper.cluster.bucket_map import BucketMap, BucketSettings, Epoch, NodeId, PartitionEntry
from upper.errors import ClusterError
from upper.model.values import Partition

Copies = list[NodeId]  # of one partition, the active one first


@dataclass(frozen=True, slots=True)
class Member:
    """A node that may hold copies."""

    id: NodeId
    zone: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """The change of one partition on the way to its target."""

    partition: Partition
    add: tuple[NodeId, ...]  # nodes that get a copy
    remove: tuple[NodeId, ...]  # nodes that lose theirs
    active: NodeId  # the active node afterwards


def target(
    members: Sequence[Member], settings: BucketSettings, current: BucketMap | None = None
) -> tuple[tuple[NodeId, ...], ...]:
    """The copies of each partition, the active one first."""
    if not members:
        raise ClusterError("a bucket needs a node; start one with `upper serve --join`")
    zones = {member.id: member.zone for member in members}
    wanted = min(settings.replicas + 1, len(members))
    placed: list[Copies] = [[] for _ in range(settings.partitions)]
    if current is not None:
        for number, entry in enumerate(current.entries):
            placed[number] = [node for node in entry.copies if node in zones][:wanted]
    _fill(placed, wanted, zones)
    _balance_copies(placed, zones, wanted)
    _balance_actives(placed, zones.keys())
    return tuple(tuple(copies) for copies in placed)


def initial(members: Sequence[Member], settings: BucketSettings, *, seed: int) -> BucketMap:
    """The first map of a bucket: every copy is empty, so every copy is in sync."""
    entries = (
        PartitionEntry(Epoch(1), copies[0], copies[1:], frozenset(copies), branch_epoch=Epoch(1))
        for copies in target(members, settings)
    )
    return BucketMap(settings, tuple(entries), seed)


def moves(current: BucketMap, wanted: Sequence[Sequence[NodeId]]) -> list[Move]:
    """The changes, partition by partition. Partitions that are at their target are left out."""
    found = []
    for number, (entry, copies) in enumerate(zip(current.entries, wanted, strict=True)):
        add = tuple(node for node in copies if node not in entry.copies)
        remove = tuple(node for node in entry.copies if node not in copies)
        if add or remove or entry.active != copies[0]:
            found.append(Move(Partition(number), add, remove, copies[0]))
    return found


# ── Steps ─────────────────────────────────────────────────────────────────────────────────────────────


def _fill(placed: list[Copies], wanted: int, zones: Mapping[NodeId, str]) -> None:
    """Give every partition its number of copies, each on the node with the fewest that has none of it."""
    loads = _Loads(zones, Counter(node for copies in placed for node in copies))
    for copies in placed:
        while len(copies) < wanted:
            node = loads.least(copies)
            copies.append(node)
            loads.add(node)


class _Loads:
    """How many copies each node has. Finds the node with the fewest, in another zone where there is one."""

    def __init__(self, zones: Mapping[NodeId, str], count: Counter[NodeId]) -> None:
        self._zones, self._count = zones, count
        self._nodes: dict[str, list[tuple[int, bytes, NodeId]]] = defaultdict(list)  # a heap for each zone
        self._best: list[
            tuple[int, str]
        ] = []  # zones by their best node; entries that are out of date are skipped
        for node, zone in zones.items():
            heappush(self._nodes[zone], self._ranked(node))
        for zone, heap in self._nodes.items():
            heappush(self._best, (heap[0][0], zone))

    def add(self, node: NodeId) -> None:
        self._count[node] += 1
        heappush(self._nodes[self._zones[node]], self._ranked(node))

    def _ranked(self, node: NodeId) -> tuple[int, bytes, NodeId]:
        """Equal loads are in another order each time: else the same nodes would always be paired.

        If they were, one node would take over all partitions of another.
        """
        count = self._count[node]
        order = blake2b(f"{node}/{count}".encode(), digest_size=8).digest()
        return count, order, node

    def least(self, copies: Copies) -> NodeId:
        used = {self._zones[node] for node in copies}
        aside: list[tuple[int, str]] = []
        found: NodeId | None = None
        second: NodeId | None = None  # in a zone that has a copy
        while self._best and found is None:
            load, zone = heappop(self._best)
            node = self._least_of(zone, copies)
            if node is None:
                aside.append((load, zone))
            elif self._count[node] > load:
                heappush(self._best, (self._count[node], zone))
            else:
                aside.append((load, zone))
                if zone not in used:
                    found = node
                elif second is None:
                    second = node
        for entry in aside:
            heappush(self._best, entry)
        node = found or second
        assert node is not None, "fewer nodes than copies"
        return node

    def _least_of(self, zone: str, copies: Copies) -> NodeId | None:
        heap = self._nodes[zone]
        aside = []
        found = None
        while heap:
            load, _, node = heap[0]
            if load != self._count[node]:
                heappop(heap)
            elif node in copies:
                aside.append(heappop(heap))
            else:
                found = node
                break
        for entry in aside:
            heappush(heap, entry)
        return found


Rank = tuple[bool, bool]  # of a copy that may move: its zone has another copy, it is the active one


def _balance_copies(placed: list[Copies], zones: Mapping[NodeId, str], wanted: int) -> None:
    """Move copies from nodes with too many to nodes with too few, until they differ by at most one."""
    # No copy has a better rank. A search that finds one of the best rank ends there.
    lowest: Rank = (wanted > 1 and len(set(zones.values())) == 1, wanted == 1)
    pair, floor = None, lowest
    held: dict[NodeId, dict[int, None]] = {node: {} for node in zones}
    for number, copies in enumerate(placed):
        for node in copies:
            held[node][number] = None
    fewest = [(len(numbers), node) for node, numbers in held.items()]
    heapify(fewest)
    most_first = [(-len(numbers), node) for node, numbers in held.items()]
    heapify(most_first)

    def move(number: int, source: NodeId, to: NodeId) -> None:
        del held[source][number]
        held[to][number] = None
        placed[number][placed[number].index(source)] = to
        for node in (source, to):
            heappush(fewest, (len(held[node]), node))
            heappush(most_first, (-len(held[node]), node))

    while True:
        while fewest[0][0] != len(held[fewest[0][1]]):
            heappop(fewest)
        while -most_first[0][0] != len(held[most_first[0][1]]):
            heappop(most_first)
        least, most = fewest[0][1], most_first[0][1]
        if len(held[most]) - len(held[least]) <= 1:
            return
        if pair != (most, least):
            pair, floor = (most, least), lowest
        if (direct := _movable(placed, held[most], most, least, zones, floor)) is not None:
            number, floor = direct  # what is left between these two has no better rank
            move(number, most, least)
            continue
        # Every partition of the one is on the other already: go through a third node.
        through = next(
            node for node in sorted(held)
            if node not in (most, least)
            and any(least not in placed[each] for each in held[node])
            and any(node not in placed[each] for each in held[most])
        )  # fmt: skip
        move(next(each for each in held[through] if least not in placed[each]), through, least)
        move(next(each for each in held[most] if through not in placed[each]), most, through)


def _movable(
    placed: list[Copies],
    held: Mapping[int, None],
    source: NodeId,
    to: NodeId,
    zones: Mapping[NodeId, str],
    floor: Rank,
) -> tuple[int, Rank] | None:
    """The first partition of the best rank whose copy may go from one node to another; none is below `floor`.

    One that keeps its zones apart is preferred, then a replica: it moves without a handover.
    """
    best: tuple[int, Rank] | None = None
    for number in held:
        copies = placed[number]
        if to in copies:
            continue
        rank = (any(zones[each] == zones[to] for each in copies if each != source), copies[0] == source)
        if best is None or rank < best[1]:
            best = number, rank
            if rank <= floor:
                break
    return best


def _balance_actives(placed: list[Copies], nodes: Collection[NodeId]) -> None:
    """Choose the active copy of each partition so that nodes differ by at most one. No copy moves."""
    actives: dict[NodeId, dict[int, None]] = {node: {} for node in nodes}
    for number, copies in enumerate(placed):
        actives[copies[0]][number] = None
    low, rest = divmod(len(placed), len(nodes))
    high = low + (1 if rest else 0)
    while True:
        sources = [node for node in nodes if len(actives[node]) > high]
        enough = high
        if not sources:
            if all(len(actives[node]) >= low for node in nodes):
                return
            sources, enough = [node for node in nodes if len(actives[node]) > low], low
        path = _path(placed, actives, sources, enough)
        if path is None:
            return  # the copies do not allow a better balance
        for source, number, to in path:
            copies = placed[number]
            place = copies.index(to)
            copies[0], copies[place] = to, source
            del actives[source][number]
            actives[to][number] = None


def _path(
    placed: list[Copies], actives: Mapping[NodeId, Mapping[int, None]], sources: Sequence[NodeId], enough: int
) -> list[tuple[NodeId, int, NodeId]] | None:
    """The shortest way to pass one active role from a source to a node with fewer than `enough`."""
    came: dict[NodeId, tuple[NodeId, int] | None] = dict.fromkeys(sources)
    queue = deque(sources)
    while queue:
        node = queue.popleft()
        for number in actives[node]:
            for to in placed[number][1:]:
                if to in came:
                    continue
                came[to] = (node, number)
                if len(actives[to]) < enough:
                    steps = []
                    while (step := came[to]) is not None:
                        steps.append((*step, to))
                        to = step[0]
                    return steps[::-1]
                queue.append(to)
    return None

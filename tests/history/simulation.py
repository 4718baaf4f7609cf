"""Several nodes that hold one partition, and the real machines between them.

Every node is driven by the effects that `ProducerStream` and `ConsumerStream` return, and by nothing else:
the drivers here are as simple as the ones over sockets should be. The world may do anything in between: write
without making durable, drop connections after any packet, promote any copy, lose what was not on disk.

What the machines promise is checked as packets leave; that followers end equal is checked at the end,
by comparing what the nodes hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import count

from tests.history.links import NOTHING, Image, Item, Link, Node, P, seqno_of
from upper.history.following import (
    Clear,
    ConsumerStream,
    Deliver,
    FollowEffect,
    Following,
    GoBack,
    Over,
    Reached,
    RequestStream,
    Stop,
    TakeState,
)
from upper.history.producing import End, ProducerStream, Sending
from upper.history.resume import Refuse, Resume, RollbackTo, answer
from upper.history.trail import Trail
from upper.model.messages import (
    DeletionMessage,
    EndReason,
    ExpirationMessage,
    FlushMessage,
    MutationMessage,
    StreamFlag,
    StreamRequest,
)
from upper.model.values import NO_END, ZERO, BranchId, FailoverLog, Position, Seqno, State, Version


class World:
    """The nodes, and everything that can happen to them."""

    def __init__(self, nodes: int, *, bounds: bool) -> None:
        self.bounds = bounds
        self.nodes = [Node(name, ConsumerStream(bounds=bounds)) for name in range(nodes)]
        self._branches, self._writes = count(1), count(1)
        self.seen: Counter[str] = Counter()  # what the histories led to, so that tests can check it
        self.active: Node | None = self.nodes[0]
        self.nodes[0].log = FailoverLog((Version(self.fresh(), ZERO),))

    def fresh(self) -> BranchId:
        return BranchId(next(self._branches))

    def followers(self) -> list[Node]:
        return [node for node in self.nodes if node is not self.active]

    def links(self, node: Node) -> list[Link]:
        return [other.link for other in self.nodes if other.link is not None and other.link.producer is node]

    # ── The active copy ───────────────────────────────────────────────────────────────────────────

    def write(self, key: bytes, *, delete: bool = False) -> None:
        node = self.active
        if node is None or node.closed or (delete and not isinstance(node.items.get(key), MutationMessage)):
            return
        node.high = Seqno(node.high + 1)
        value = str(next(self._writes)).encode()
        item: Item
        if not delete:
            item = MutationMessage(partition=P, key=key, value=value, seqno=node.high)
        else:  # asked for, or because its time had come
            gone = DeletionMessage if node.high % 2 else ExpirationMessage
            item = gone(partition=P, key=key, seqno=node.high)
        node.items = {**node.items, key: item}
        node.pending.append(item)

    def flush(self) -> None:
        node = self.active
        if node is None or node.closed:
            return
        node.high = Seqno(node.high + 1)
        node.items, node.purged = {}, node.high
        node.pending.append(FlushMessage(partition=P))

    def commit(self) -> None:
        """Makes durable what was written, and passes it to the streams."""
        node = self.active
        if node is None or not node.pending:
            return
        runs: list[list[Item] | Seqno] = []
        seqno = node.durable
        for record in node.pending:
            seqno = Seqno(seqno + 1)
            if isinstance(record, FlushMessage):
                runs.append(seqno)
            elif runs and isinstance(runs[-1], list):
                runs[-1].append(record)
            else:
                runs.append([record])
        node.pending, node.durable = [], node.high
        for link in self.links(node):
            for run in runs:
                if isinstance(run, list):
                    link.committed = run
                    first, last = seqno_of(run[0]), seqno_of(run[-1])
                    link.carry_out(link.machine.committed(first, last, room=link.room))
                else:
                    link.carry_out(link.machine.flushed(run, room=link.room))

    def sync(self) -> None:
        """What is durable in the eyes of streams really is on disk (with durability "memory", it lags)."""
        if self.active is not None and not self.active.pending:
            self.active.on_disk = self.active.high, Image(self.active.items, self.active.purged)

    def unclean_restart(self) -> None:
        node = self.active
        links = [] if node is None else self.links(node)
        if node is None or any(link.machine.phase is Sending.HANDED for link in links):
            return  # a copy that may have been handed over is not active before the takeover is decided
        for link in links:
            self.drop(link.follower)
        assert node.log is not None
        seqno, image = node.on_disk
        node.items, node.purged = image.items, image.purged
        node.high = node.durable = seqno
        node.pending, node.closed = [], False
        node.log = node.log.promoted(seqno, fresh=self.fresh())

    def purge(self, node: Node) -> None:
        newest = node.high if node is self.active else node.stream.seqno
        gone = [
            item
            for item in node.items.values()
            if isinstance(item, DeletionMessage) and seqno_of(item) < newest
        ]
        if gone:
            node.purged = max(node.purged, *map(seqno_of, gone))
            node.items = {key: item for key, item in node.items.items() if item not in gone}

    def end_streams(self, node: Node, reason: EndReason) -> None:
        for link in self.links(node):
            link.carry_out(link.machine.stop(reason))

    def begin_branch(self, node: Node) -> None:
        """A takeover was not confirmed: what is written here from now on is another history."""
        self.end_streams(node, EndReason.STATE_CHANGED)
        assert node.log is not None
        node.log = node.log.promoted(node.high, fresh=self.fresh())
        self.seen["takeover not confirmed"] += 1

    def retire(self, node: Node) -> None:
        """The active copy is active no more; it follows from now on, from where it is."""
        assert node.log is not None
        ends = [seqno for seqno in sorted(node.images) if 0 < seqno < node.high]
        if node.high:
            ends.append(node.high)
            node.images[node.high] = Image(node.items, node.purged)
        node.stream = ConsumerStream(Trail(node.log if ends else None, ends), bounds=self.bounds)
        node.from_zero = not ends
        if not ends:
            node.items, node.purged = {}, ZERO
        if self.active is node:
            self.active = None

    def make_active(self, node: Node, log: FailoverLog) -> None:
        node.log, node.link, node.closed, node.pending = log, None, False, []
        node.high = node.durable = node.stream.seqno
        node.on_disk = node.high, Image(node.items, node.purged)
        node.images = {end: node.images[end] for end in node.stream.trail.ends}
        self.active = node

    def fail_over(self, node: Node) -> None:
        """The active copy is gone; this one takes its place without proof that it has everything."""
        if (old := self.active) is not None:
            self.end_streams(old, EndReason.STATE_CHANGED)
        for other in self.nodes:
            self.drop(other)  # no message of a takeover that was decided otherwise may arrive
        if old is not None:
            self.retire(old)
        known, at = node.stream.trail.log, node.stream.consistent_at
        fresh = self.fresh()
        log = known.promoted(at, fresh=fresh) if known else FailoverLog((Version(fresh, ZERO),))
        if not known and node.stream.seqno == 0:
            node.items, node.purged = {}, ZERO
        self.make_active(node, log)

    # ── Followers ────────────────────────────────────────────────────────────────────────────────

    def fetch_log(self, node: Node) -> None:
        """The log of the active copy; it may be out of date when it is used."""
        if self.active is not None:
            node.fetched = self.active.log

    def ask(self, node: Node, *, takeover: bool = False) -> None:
        """One request and its answer. A rollback is performed; the next request is another event."""
        active = self.active
        if (
            active is None
            or active is node
            or node.link is not None
            or node.stream.phase is not Following.AWAY
        ):
            return
        if takeover and any(link.machine._takeover for link in self.links(active)):
            return
        assert active.log is not None
        fetched, node.fetched = node.fetched, None
        *before, asked = node.stream.ask(None if fetched is None else node.stream.best(fetched))
        self.obey(node, before)
        assert isinstance(asked, RequestStream)
        request = self.request(asked.position)
        match answer(request, active.log, high=active.high, purged=active.purged, known_at_zero=self.bounds):
            case Resume(at):
                flags = StreamFlag.TAKEOVER if takeover else StreamFlag.NONE
                machine = ProducerStream(
                    at.seqno, high=active.high, flags=flags, exact=self.bounds, flushes=not self.bounds
                )
                node.link = link = Link(self, active, node, machine, self.bounds, last=at.seqno)
                self.obey(node, node.stream.accepted(tuple(active.log)))
                if node.link is not None:
                    node.from_zero = node.from_zero or node.stream.consistent_at == 0
                    link.carry_out(machine.open())
            case RollbackTo(to, why):
                assert why
                self.obey(node, node.stream.rollback_required(to))
            case Refuse(why):
                raise AssertionError(f"a truthful request was refused: {why}")

    def request(self, position: Position) -> StreamRequest:
        bounded = self.bounds and position.snapshot.end != NO_END
        return StreamRequest(
            partition=P,
            branch=position.branch,
            start=position.seqno,
            snapshot_start=position.snapshot.start if bounded else None,
            snapshot_end=position.snapshot.end if bounded else None,
        )

    def receive(self, node: Node, packets: int) -> None:
        """The follower reads some of the packets that are under way."""
        for _ in range(packets):
            link = node.link
            if link is None or not link.wire:
                return
            self.obey(node, node.stream.on(link.wire.pop(0)))

    def obey(self, node: Node, effects: Iterable[FollowEffect]) -> None:
        for effect in effects:
            match effect:
                case Deliver(change):
                    assert isinstance(change, MutationMessage | DeletionMessage)
                    node.items = {**node.items, change.key: change}
                case Clear(seqno):
                    node.items, node.purged = {}, seqno
                    self.seen["flushed"] += 1
                case Reached(position):
                    assert position == node.stream.position
                    if node.from_zero:
                        node.purged, node.from_zero = max(node.purged, position.seqno), False
                    node.images[position.seqno] = Image(node.items, node.purged)
                case GoBack(to):
                    self.go_back(node, to.seqno)
                case Stop():
                    node.link = None
                    self.seen["stopped"] += 1
                case Over(reason):
                    node.link = None
                    if reason is EndReason.TOO_SLOW:
                        self.seen["too slow"] += 1
                case TakeState(state):
                    self.take_state(node, state)
                case RequestStream():
                    raise AssertionError("asking is an event of its own")

    def take_state(self, node: Node, state: State) -> None:
        link = node.link
        assert link is not None
        old = link.producer
        if state is State.ACTIVE:
            assert (node.stream.seqno, node.live()) == link.handed, "a clean takeover needs everything"
            assert old.log is not None
            assert node.stream.branch == old.log.branch
        link.carry_out(link.machine.acknowledged())
        if state is State.ACTIVE and self.active is None:
            node.stream.ended()
            assert old.log is not None
            self.make_active(node, old.log)
            self.seen["took over"] += 1

    def go_back(self, node: Node, seqno: Seqno) -> None:
        self.seen["rolled back to a snapshot end" if seqno else "rolled back to 0"] += 1
        image = node.images[seqno] if seqno else NOTHING
        node.items, node.purged = image.items, image.purged
        node.from_zero = seqno == 0

    def drop(self, node: Node) -> None:
        """The connection is lost, with everything that was on its way."""
        if node.link is not None:
            link, node.link = node.link, None
            effects = link.machine.stop(EndReason.DISCONNECTED)
            link.carry_out(effect for effect in effects if not isinstance(effect, End))
            node.stream.ended()

    def restart(self, node: Node, steps: int) -> None:
        """A follower restarts with an older consistent state: it goes further back than required."""
        self.drop(node)
        ends = [ZERO, *node.stream.trail.ends]
        place = ends[max(0, len(ends) - 1 - steps)]
        node.stream.went_back(place)
        self.go_back(node, place)

    # ── The end ───────────────────────────────────────────────────────────────────────────────────

    def settle(self) -> None:
        """Everything that is possible happens, until nothing is left to do."""
        if self.active is None:
            self.fail_over(self.nodes[0])
        self.commit()
        for _ in range(200):
            for node in self.followers():
                self.advance(node)
            if all(self.at_rest(node) for node in self.followers()):
                return
        raise AssertionError("the followers never come to rest")

    def keep_up(self, node: Node) -> None:
        """One follower comes as far as it can."""
        for _ in range(10):
            if self.at_rest(node) or node is self.active:
                return
            self.advance(node)

    def advance(self, node: Node) -> None:
        if node.link is None:
            self.ask(node)
        elif not node.link.room:
            node.link.room = True
            node.link.carry_out(node.link.machine.room())
        elif node.link.wire:
            self.receive(node, 100)
        else:
            node.link.produce(100)

    def at_rest(self, node: Node) -> bool:
        link = node.link
        return link is not None and not link.wire and link.machine.phase is Sending.LIVE and link.room

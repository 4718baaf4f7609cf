"""Sending requests to the nodes that hold their partitions, and following partitions that move. No I/O.

The cluster map comes from any node that answers; a newer one also comes with a "not my vbucket" response. A
call repeats, until its deadline, the requests that

- a node refused because it does not hold the partition, or cannot serve it at the moment;
- were not sent, because no connection could be opened;
- were sent to a node that did not respond, or that lost the partition before other copies had the change,
  **if performing them twice has the effect of once** (`again`).

Any other such request raises `Unreachable` with `sent` set: its outcome is unknown, and only
the application can decide. In a batch only the requests without a response are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from math import inf
from typing import overload

from upper import kernel
from upper.client.backoff import Backoff, BackoffSettings
from upper.client.calls import Call, Exchange, Packets, Replies, SingleRequest, Wait
from upper.client.link import Answer, Purpose
from upper.client.refusals import no_active_copy, refusal
from upper.client.routes import Routes
from upper.client.url import Address, NodeAddress
from upper.errors import Refused, RemoteProtocolError, TimedOut, Unreachable, UpperError
from upper.model.values import Partition
from upper.wire.codes import Opcode, Status
from upper.wire.packet import HEADER, HEADER_SIZE, REQUEST, pack

# A failover takes seconds, and the requests of a call are few: it is retried often.
RETRIES = BackoffSettings(most=0.25)
FIRST_TRY = 2.5  # seconds that one of several nodes has to answer; a failover takes a little longer
LONG_WAIT = 16  # tries after which the log states what a call waits for: longer than a failover takes
AT_THE_MOMENT = (Status.TEMPORARY_FAILURE, Status.BUSY)  # nothing was performed, and a later try may succeed


class PackedRequests(Sequence[tuple[int, bytes]]):
    """Requests as the kernel packs them, one behind the other; the opaque of each is its index."""

    def __init__(self, data: bytes, count: int) -> None:
        self.data, self._count = data, count
        self._parts: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> tuple[int, bytes]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[int, bytes]]: ...

    def __getitem__(self, index: int | slice) -> tuple[int, bytes] | list[tuple[int, bytes]]:
        """The partition and the packet of a request; they are taken apart when one is asked for."""
        if not self._parts:
            self._parts, at = [(0, b"")] * self._count, 0
            while at < len(self.data):
                _, _, _, _, _, partition, body, opaque, _ = HEADER.unpack_from(self.data, at)
                past = at + HEADER_SIZE + body
                self._parts[opaque] = partition, self.data[at:past]
                at = past
        return self._parts[index]


class RequestRouter:
    """The cluster map of one bucket, and requests that are routed by it."""

    def __init__(
        self, address: Address, *, random: Callable[[], float], backoff: BackoffSettings = RETRIES
    ) -> None:
        self._address = address
        self._random = random
        self._backoff = backoff
        self._routes: Routes | None = None
        self.on_new_map: Callable[[], None] = lambda: None
        self.suspects: set[NodeAddress] = set()  # they failed, or refused without a newer map: asked last

    @property
    def routes(self) -> Routes:
        if self._routes is None:
            raise Unreachable("the cluster map has not been requested yet; connect first")
        return self._routes

    def learn(self, *, avoid: Collection[NodeAddress] = ()) -> Call[Routes]:
        """Request the cluster map from the first node that answers, and return the newest one received.

        The nodes of the present map and of the URL are tried, those in `avoid` last. Nodes of the URL that
        are not in the map fill in the partitions that it has no active copy of: they may be nodes on their
        own that each hold a part of the bucket.
        """
        present = self._routes.nodes if self._routes else ()
        nodes = sorted(
            dict.fromkeys((*present, *self._address.nodes)),
            key=lambda node: node in avoid or node in self.suspects,
        )
        failure: UpperError | None = None
        answered: Routes | None = None
        for index, node in enumerate(nodes):
            if answered is not None and (answered.complete or node in answered.nodes):
                continue
            try:
                received = yield from self._map_of(node, share=1 / (len(nodes) - index))
            except (Unreachable, Refused) as error:
                self.suspects.add(node)
                failure = error if failure is None or isinstance(error, Refused) else failure
            else:
                self._adopt(received)
                answered = received if answered is None else answered.updated(received)
        if answered is None:
            if failure is None or len(nodes) == 1 or isinstance(failure, Refused):
                raise failure or Unreachable("the URL names no node that answers")
            names = ", ".join(map(str, nodes))
            raise Unreachable(f"none of {names} can be reached; is a node running there?")
        return self.routes

    def _map_of(self, node: NodeAddress, *, share: float) -> Call[Routes]:
        request = pack(REQUEST, Opcode.GET_CLUSTER_CONFIG)
        replies: Replies = yield Exchange({node: Packets(request)}, share=share)
        if node in replies.failures:
            raise replies.failures[node]
        answer = replies.answers[node][0]
        if answer.status:
            raise refusal(answer)
        return Routes.parse(answer.value, asked=node, tls=self._address.tls)

    def _adopt(self, received: Routes) -> None:
        self._routes = received if self._routes is None else self._routes.updated(received)
        self.on_new_map()

    def first_try(self, *, again: bool) -> float:
        """Seconds that a node has to respond to the first try.

        A node that does not respond must leave time for the one that takes over from it.
        """
        return FIRST_TRY if again and len(self.routes.nodes) > 1 else inf

    def patient_learn(self) -> Call[Routes]:
        """Request the map until a node answers or the driver's deadline ends the call."""
        backoff = Backoff(self._backoff, self._random)
        reason: Unreachable | None = None
        while True:
            try:
                return (yield from self.learn())
            except Unreachable as error:
                # An attempt that the deadline cut short has no reason of its own.
                reason = error if reason is None or not isinstance(error, TimedOut) else reason
            try:
                yield Wait(backoff.next())
            except TimedOut:
                raise reason from None

    def ready(self) -> Call[Routes]:
        """The present map, requested if there is none."""
        return self._routes if self._routes is not None else (yield from self.patient_learn())

    def ask(
        self,
        partition: int,
        packet: bytes,
        *,
        again: bool,
        purpose: Purpose = Purpose.REQUESTS,
        wait: bool = True,
    ) -> Call[Answer]:
        """`spread` of one request, whose opaque is 0."""
        routes = self._routes or (yield from self.ready())
        owner, first = routes.owners[partition], None
        if owner >= 0:
            node = routes.nodes[owner]
            got: Answer | Replies = yield SingleRequest(node, packet, purpose, self.first_try(again=again))
            if isinstance(got, Answer):
                if not got.opaque and not (got.status and _repeated(got.status, wait, again)):
                    if self.suspects:
                        self.suspects.discard(node)
                    return _known(got) if got.status else got
                got = Replies({node: [got]}, {})
            first = routes, got
        (answer,) = yield from self.spread(
            [(partition, packet)], again=again, purpose=purpose, wait=wait, first=first
        )
        return answer

    def spread(
        self,
        requests: Sequence[tuple[int, bytes]],
        *,
        again: bool,
        purpose: Purpose = Purpose.REQUESTS,
        wait: bool = True,
        first: tuple[Routes, Replies] | None = None,
    ) -> Call[list[Answer]]:
        """Send each request to the node that holds its partition; the responses in the order of the requests.

        Opaques must be the indices. `again`: performing a request twice has the effect of once. `wait`:
        repeat what a node cannot do at the moment. `first`: the requests were sent, by this map, with this
        outcome.
        """
        yield from self.ready()
        answers: list[Answer | None] = [None] * len(requests)
        pending: Sequence[int] = range(len(requests))
        backoff = Backoff(self._backoff, self._random)
        why: UpperError | None = None
        while pending:
            routes = first[0] if first else self.routes
            by_node, repeat = _by_node(routes, requests, pending)
            if repeat:
                why = no_active_copy(requests[repeat[0]][0])
            # A node that is only slow gets more time with every try.
            most = self.first_try(again=again) * 2.0 ** min(backoff.tries, 20)
            replies: Replies = first[1] if first else (yield Exchange(by_node, purpose, most=most))
            first = None
            for node, batch in replies.answers.items():
                for answer in kernel.place(batch, answers):
                    if answer.opaque >= len(answers):
                        continue
                    if _repeated(answer.status, wait, again):
                        repeat.append(answer.opaque)
                        why = refusal(answer, partition=requests[answer.opaque][0])
                        self._refused(node, answer)
                    else:
                        answers[answer.opaque] = _known(answer)
            for node, error in replies.failures.items():
                if not again and getattr(error, "sent", False):
                    raise error
                self.suspects.add(node)
                unanswered = _unanswered(routes, requests, pending, answers, {*repeat}, node)
                # At the deadline every node is late; the earlier error is more helpful.
                if why is None or not isinstance(error, TimedOut):
                    why = error
                    if unanswered and len(routes.nodes) > 1:
                        why = _of_partition(requests[unanswered[0]][0], error)
                repeat += unanswered
            if repeat:
                yield from self._prepare_repeat(
                    routes, [requests[index][0] for index in repeat], backoff, why
                )
            elif self.suspects:
                self.suspects.difference_update(by_node)
            pending = sorted(repeat)
        whole = [answer for answer in answers if answer is not None]
        if len(whole) != len(requests):
            missing = [index for index, answer in enumerate(answers) if answer is None]
            raise RemoteProtocolError(
                f"{len(missing)} of {len(requests)} requests got no response of their own, the first about "
                f"partition {requests[missing[0]][0]}; what runs at this address is not a node"
            )
        return whole

    def _refused(self, node: NodeAddress, answer: Answer) -> None:
        """A node does not serve a partition that it should have: it may have sent a newer map."""
        before = self._routes
        if answer.status == Status.NOT_MY_VBUCKET and answer.value:
            self._adopt(Routes.parse(answer.value, asked=node, tls=self._address.tls))
        if self._routes == before:
            self.suspects.add(node)

    def _prepare_repeat(
        self, before: Routes, partitions: list[int], backoff: Backoff, why: UpperError | None
    ) -> Call[None]:
        """Request a newer map, and wait unless it names other nodes for these partitions."""

        def moved() -> bool:
            now = self.routes
            return all(now.owner(Partition(p)) not in (None, before.owner(Partition(p))) for p in partitions)

        if moved():
            return
        with suppress(Unreachable, Refused):
            yield from self.learn()
        if not moved():
            if backoff.tries == LONG_WAIT:
                import logging  # only here: a program that makes one short call starts faster

                logging.getLogger(__name__).warning("%s; trying again", str(why).partition(";")[0])
            try:
                yield Wait(backoff.next())
            except TimedOut as late:
                raise why or late from None


def _of_partition(partition: int, failure: UpperError) -> UpperError:
    """The error of a node that cannot be reached, with the partition that is missing because of it."""
    if type(failure) is not Unreachable:
        return failure
    error = Unreachable(str(no_active_copy(partition, why=str(failure))))
    error.sent = failure.sent
    return error


def _repeated(status: int, wait: bool, again: bool) -> bool:
    """Whether a request that was refused so, or whose outcome is unknown, is sent again."""
    if status == Status.SYNC_WRITE_AMBIGUOUS:
        return again
    return status == Status.NOT_MY_VBUCKET or (wait and status in AT_THE_MOMENT)


def _known(answer: Answer) -> Answer:
    """The answer, if it states whether the request was performed."""
    if answer.status == Status.SYNC_WRITE_AMBIGUOUS:
        error = Unreachable(str(refusal(answer)))
        error.sent = True
        raise error
    return answer


def _by_node(
    routes: Routes, requests: Sequence[tuple[int, bytes]], pending: Sequence[int]
) -> tuple[dict[NodeAddress, Packets], list[int]]:
    """The packets by the node that takes them, and the requests whose partition has no active copy."""
    nodes, owners = routes.nodes, routes.owners
    if isinstance(requests, PackedRequests) and len(pending) == len(requests):
        held_by = {*owners}
        if len(held_by) == 1 and (owner := held_by.pop()) >= 0:
            return {nodes[owner]: Packets(requests.data, len(requests))}, []
    packets: list[list[bytes]] = [[] for _ in nodes]
    unserved = []
    for index in pending:
        partition, packet = requests[index]
        owner = owners[partition]
        if owner < 0:
            unserved.append(index)
        else:
            packets[owner].append(packet)
    by_node: dict[NodeAddress, list[bytes]] = {}
    for node, some in zip(nodes, packets, strict=True):
        if some:
            by_node.setdefault(node, []).extend(some)  # two entries of the map may have one address
    return {node: Packets(b"".join(some), len(some)) for node, some in by_node.items()}, unserved


def _unanswered(
    routes: Routes,
    requests: Sequence[tuple[int, bytes]],
    pending: Iterable[int],
    answers: Sequence[Answer | None],
    refused: set[int],
    node: NodeAddress,
) -> list[int]:
    """The requests that were for this node and have no response."""
    return [
        index
        for index in pending
        if answers[index] is None
        and index not in refused
        and routes.owner(Partition(requests[index][0])) == node
    ]

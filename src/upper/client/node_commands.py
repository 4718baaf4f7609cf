"""Calls about nodes and partitions: statistics, seqnos, failover logs, promotion, durability. No I/O."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from upper.client.backoff import Backoff, BackoffSettings
from upper.client.calls import (
    Call,
    Exchange,
    NewDeadline,
    Packets,
    Promoted,
    Replies,
    Stored,
    Text,
    Wait,
    WriteCopies,
    as_key,
    require_number,
)
from upper.client.link import Answer, Purpose
from upper.client.refusals import no_active_copy, quoted, refusal
from upper.client.routing import RequestRouter
from upper.client.url import NodeAddress
from upper.errors import (
    InvalidArguments,
    NotDurable,
    NotMyPartition,
    Refused,
    RemoteProtocolError,
    TimedOut,
    Unreachable,
)
from upper.model.values import BranchId, FailoverLog, Partition, Seqno, Version
from upper.wire.codes import Opcode, Status
from upper.wire.extras import OBSERVED, PARTED, PLACE, STATE, TOKEN
from upper.wire.packet import REQUEST, pack

PROMOTION_TIMEOUT = 300.0  # seconds that a rollback of a partition may take
POLLS = BackoffSettings(first=0.005, most=0.1)  # between two questions whether a write is durable
LONG_WAIT = 8  # polls after which the map is requested again, about half a second
FAILOVER_LOG = 0x51  # UPR's; the connection still takes key-value requests afterwards


class NodeCommands(RequestRouter):
    """The calls of one bucket that are not about items."""

    def flush(self) -> Call[None]:
        """Delete every item of the bucket, on all nodes with active copies."""
        routes = yield from self.ready()
        packet = pack(REQUEST, Opcode.FLUSH)
        replies: Replies = yield Exchange({node: Packets(packet) for node in routes.active})
        for error in replies.failures.values():
            raise error
        for batch in replies.answers.values():
            check(batch)

    def stats(self, group: str = "") -> Call[dict[NodeAddress, dict[str, str]]]:
        """The statistics of each node that answers; those of a partition, of the node that holds it."""
        routes = yield from self.ready()
        packet = pack(REQUEST, Opcode.STAT, key=as_key(group))
        replies: Replies = yield Exchange({node: Packets(packet) for node in routes.nodes}, share=0.5)
        answers = {node: lines for node, lines in replies.answers.items() if node not in replies.failures}
        if not answers:
            raise next(iter(replies.failures.values()))
        for lines in answers.values():
            check(lines, but=(Status.NOT_MY_VBUCKET,))
        found = {
            node: {
                line.key.decode(errors="replace"): line.value.decode(errors="replace")
                for line in lines
                if not line.final
            }
            for node, lines in answers.items()
            if not any(line.status for line in lines)
        }
        if not found:
            last = self.routes.partitions - 1
            raise InvalidArguments(f"no node holds this partition; partitions are numbered from 0 to {last}")
        return found

    def seqnos(self) -> Call[dict[Partition, Seqno]]:
        """The high seqno of each partition that has an active copy in the cluster map.

        Waits, as other calls do, for a node that does not answer, or for the one that takes over from it.
        """
        highs: dict[Partition, Seqno] = {}
        packet = pack(REQUEST, Opcode.GET_ALL_VB_SEQNOS, extras=STATE.build(1))
        backoff = Backoff(self._backoff, self._random)
        while True:
            routes = yield from self.ready()
            missing = [p for p in map(Partition, range(routes.partitions)) if p not in highs]
            owners = {p: owner for p in missing if (owner := routes.owner(p)) is not None}
            if not owners:
                return dict(sorted(highs.items()))
            asked = {node: Packets(packet) for node in owners.values()}
            replies: Replies = yield Exchange(asked, share=0.5 if len(asked) > 1 else 1.0)
            for node, answers in replies.answers.items():
                if node not in replies.failures:
                    check(answers)
                    found = _seqnos(node, answers[0].value)
                    highs |= {p: seqno for p, seqno in found.items() if owners.get(p) == node}
            if late := [p for p in owners if p not in highs]:
                failure = replies.failures.get(owners[late[0]])
                self.suspects.update(owners[p] for p in late)
                yield from self._prepare_repeat(
                    routes, list(late), backoff, no_active_copy(late[0], why=str(failure or ""))
                )

    def failover_log(self, partition: int) -> Call[FailoverLog]:
        """The failover log of a partition."""
        return (yield from self.failover_logs([partition]))[Partition(partition)]

    def failover_logs(self, partitions: Iterable[int] | None = None) -> Call[dict[Partition, FailoverLog]]:
        """The failover logs of some partitions, by default of all."""
        routes = yield from self.ready()
        chosen = list(range(routes.partitions) if partitions is None else partitions)
        self._require_partitions(chosen)
        opcode, purpose = self._log_request()
        requests = [
            (Partition(partition), pack(REQUEST, opcode, vbucket=partition, opaque=index))
            for index, partition in enumerate(chosen)
        ]
        answers = yield from self.spread(requests, again=True, purpose=purpose)
        check(answers)
        return {Partition(p): parse_log(answer.value) for p, answer in zip(chosen, answers, strict=True)}

    def _log_request(self) -> tuple[int, Purpose]:
        """The request for a failover log, and the connection that it needs."""
        # Only a program that reads logs needs the dialects and their messages.
        from upper.model.messages import FailoverLogRequest
        from upper.wire.session import DIALECTS

        dialect = DIALECTS[self._address.dialect]
        if dialect.named_connections:
            return dialect.opcode(FailoverLogRequest), Purpose.LOGS
        return FAILOVER_LOG, Purpose.REQUESTS

    def promote(self, partition: int, *, to: int | None = None) -> Call[Promoted]:
        """Begin a new history branch by hand, for drills.

        With `to` the partition first rolls back to the newest seqno at or below it that storage can
        rebuild. That takes as long as reading and writing the partition, so the call waits longer than
        others.
        """
        try:
            answer = yield from self._promotion(partition, to)
            versions = (Version(BranchId(int(b)), Seqno(int(s))) for b, s in answer["log"])
            return Promoted(Partition(partition), Seqno(answer["seqno"]), FailoverLog(tuple(versions)))
        except TimedOut:
            raise TimedOut(
                "the node did not answer in time, and the promotion may still happen; see the failover log"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise RemoteProtocolError("the response to the promotion is not that of a node") from None

    def plan_promotion(self, partition: int, *, to: int | None = None) -> Call[Seqno]:
        """The seqno at which `promote` would begin its branch; nothing is changed."""
        answer = yield from self._promotion(partition, to, dry_run=True)
        return Seqno(int(answer["seqno"]))

    def _promotion(self, partition: int, to: int | None, **options: bool) -> Call[dict[str, Any]]:
        request: dict[str, object] = {"promote": True, **options}
        if to is not None:
            require_number("to", to, 48)
            request["to"] = to
        yield from self.ready()
        self._require_partitions([partition])
        yield NewDeadline(PROMOTION_TIMEOUT)
        packet = pack(
            REQUEST,
            Opcode.SET_VBUCKET_STATE,
            extras=b"\x01",
            value=json.dumps(request).encode(),
            vbucket=partition,
        )
        answer = yield from self._ask_copy(Partition(partition), packet)
        if answer.status:
            raise refusal(answer, partition=partition)
        promoted: dict[str, Any] = json.loads(answer.value)
        return promoted

    def _ask_copy(self, partition: Partition, packet: bytes) -> Call[Answer]:
        """The response of the node with the active copy, or with the only other copy where none is active.

        What a node cannot do at the moment is not repeated: its error has the reason, such as a full disk.
        """
        routes = yield from self.ready()
        if routes.owner(partition) is None:
            routes = yield from self.learn()
        if routes.owner(partition) is not None:
            (answer,) = yield from self.spread([(partition, packet)], again=False, wait=False)
            return answer
        node, *others = routes.replicas_of(partition) or routes.nodes
        if others:
            names = ", ".join(map(str, (node, *others)))
            raise NotMyPartition(
                f"partition {partition} has no active copy; promote one with the URL of its node alone, "
                f"which is one of {names}",
                partition=partition,
            )
        replies: Replies = yield Exchange({node: Packets(packet)})
        if node in replies.failures:
            raise replies.failures[node]
        return replies.answers[node][0]

    # ── WriteCopies of one write ───────────────────────────────────────────────────────────────────

    def wait_until_durable(
        self, key: Text, stored: Stored, *, persist: int = 1, replicate: int = 0
    ) -> Call[WriteCopies]:
        """Wait until a write is on the disks of `persist` nodes and on `replicate` replicas.

        `stored` is what the write returned. The active copy counts among the disks and not among the
        replicas. Raises NotDurable when the timeout is over, or when a failover has removed the write.
        """
        name = as_key(key)
        require_number("persist", persist, 8)
        require_number("replicate", replicate, 8)
        if stored.branch is None or stored.seqno is None:
            raise InvalidArguments("this write returned no seqno; use a call for one key, such as set")
        routes = yield from self.ready()
        partition, backoff = routes.partition_of(name), Backoff(POLLS, self._random)
        if max(persist - 1, replicate) > routes.replica_count:
            raise InvalidArguments(
                f"the bucket has {routes.replica_count} replicas, which is too few for persist={persist} and "
                f"replicate={replicate}; ask for less, or add replicas"
            )
        best: WriteCopies | None = None  # the last answer before the deadline may be incomplete
        while True:
            replicas = routes.replicas_of(partition) if persist > 1 or replicate else ()
            try:
                found = yield from self._observe(partition, stored.branch, stored.seqno, replicas, name)
                if found.persisted >= persist and found.replicated >= replicate:
                    return found
                best = WriteCopies(*map(max, best or found, found))
                yield Wait(backoff.next())
            except TimedOut:
                if best is None:
                    raise
                raise NotDurable(
                    f"key {quoted(name)} is on {best.persisted} disks and {best.replicated} replicas, not "
                    f"on {persist} and {replicate}, at the end of the timeout; wait again, or look for a "
                    "replica that is away",
                    persisted=best.persisted,
                    replicated=best.replicated,
                ) from None
            if backoff.tries > LONG_WAIT:
                with suppress(Unreachable, Refused):  # replicas may be elsewhere by now
                    yield from self.learn()
            routes = self.routes

    def _observe(
        self,
        partition: Partition,
        branch: BranchId,
        seqno: Seqno,
        replicas: Sequence[NodeAddress],
        key: bytes,
    ) -> Call[WriteCopies]:
        """How many copies have the change at a seqno of a branch."""
        packet = pack(REQUEST, Opcode.OBSERVE_SEQNO, value=branch.to_bytes(8, "big"), vbucket=partition)
        (answer,) = yield from self.spread([(partition, packet)], again=True)
        if answer.status not in (Status.OK, Status.KEY_NOT_FOUND):
            raise refusal(answer, partition=partition)
        on_disk, held = _copy_of(answer, seqno)
        if not held:
            raise NotDurable(
                f"a failover has removed the write of key {quoted(key)}; read the key, and write it again",
                lost=True,
            )
        replies = Replies({}, {})
        if replicas:
            replies = yield Exchange({node: Packets(packet) for node in replicas}, share=0.5)
        copies = [_copy_of(each, seqno) for answers in replies.answers.values() for each in answers]
        return WriteCopies(on_disk + sum(disk for disk, _ in copies), sum(memory for _, memory in copies))

    def _require_partitions(self, partitions: Iterable[int]) -> None:
        for partition in partitions:
            require_number("partition", partition, 16)
            if partition >= self.routes.partitions:
                raise InvalidArguments(
                    f"there is no partition {partition}; they are 0 to {self.routes.partitions - 1}"
                )


def _copy_of(answer: Answer, seqno: Seqno) -> tuple[bool, bool]:
    """Whether the copy of the node that sent this has the change on disk, and whether it has it at all."""
    if answer.status:
        return False, False
    try:
        kind, _, _, persisted, current = OBSERVED.read(answer.value[: OBSERVED.size])
        # On another branch: only what was before the two histories parted.
        until = current if kind == 0 else PARTED.read(answer.value[OBSERVED.size :])[1]
    except struct.error as error:
        raise RemoteProtocolError(f"the response to OBSERVE_SEQNO is invalid: {error}") from None
    held = seqno <= until
    return held and seqno <= persisted, held


def _seqnos(node: NodeAddress, value: bytes) -> dict[Partition, Seqno]:
    if len(value) % PLACE.size:
        raise RemoteProtocolError(
            f"{node} sent seqnos of {len(value)} bytes; {PLACE.size} bytes are one partition"
        )
    return {Partition(partition): Seqno(seqno) for partition, seqno in PLACE.read_all(value)}


def parse_log(value: bytes) -> FailoverLog:
    try:
        return FailoverLog(tuple(Version(BranchId(b), Seqno(s)) for b, s in TOKEN.read_all(value)))
    except (ValueError, struct.error) as error:
        raise RemoteProtocolError(f"the failover log is invalid: {error}") from None


def check(answers: Sequence[Answer], names: Sequence[bytes] = (), *, but: Sequence[int] = ()) -> None:
    """Raise the first refusal, which is about the name at the same index."""
    for index, answer in enumerate(answers):
        if answer.status and answer.status not in but:
            raise refusal(answer, key=names[index] if names else None)

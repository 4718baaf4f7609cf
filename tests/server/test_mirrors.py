"""Whatever happens to a bucket, every consumer of every dialect ends equal to it.

A writer and an operator that disregards consumers take turns, at random: batches with
repeated keys, flushes, changes of state, promotions, steps back into history, restarts and kills. Mirrors
read when they like, or disconnect in the middle of a packet. Now and then all consumers catch up, and all are
compared.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.nodes import Node
from tests.server.mirrors import Mirror, OldFashioned, all_kinds
from tests.server.peers import Peer
from upper.model.messages import Request, Response
from upper.model.values import Partition
from upper.wire.codes import Opcode

PARTITIONS = 4
KEYS = [b"%c%d" % (letter, number) for letter in b"ab" for number in range(12)]
ACTIVE = b"\1"


class World:
    """A node, a writer, the mirrors, and random numbers."""

    def __init__(self, node: Node, seed: int) -> None:
        self.node, self.chance = node, random.Random(seed)
        self.mirrors = all_kinds(node, PARTITIONS)
        self.writer = Peer(node, None)
        self.story: list[str] = []
        self.checks = 0

    def step(self) -> None:
        """One thing that happens."""
        happenings = {self.write: 55, self.look: 20, self.hang_up: 8, self.administer: 8, self.flush: 3}
        happening = self.chance.choices(list(happenings), list(happenings.values()))[0]
        happening(self.chance.randrange(PARTITIONS))

    def _log(self, what: str) -> None:
        self.story.append(what)

    def write(self, partition: int) -> None:
        """A batch in one write: keys are repeated, and some commands fail."""
        writer = self.writer
        for _ in range(self.chance.randrange(1, 30)):
            opcode = self.chance.choice(
                (Opcode.SETQ, Opcode.SETQ, Opcode.DELETEQ, Opcode.APPENDQ, Opcode.INCREMENTQ)
            )
            has_value = opcode in (Opcode.SETQ, Opcode.APPENDQ)
            writer.session.send(
                Request(
                    opcode=opcode,
                    key=self.chance.choice(KEYS),
                    value=b"%d" % self.chance.randrange(1000) if has_value else b"",
                    extras={Opcode.SETQ: bytes(8), Opcode.INCREMENTQ: bytes(20)}.get(opcode, b""),
                    partition=Partition(self.chance.choice((partition, self.chance.randrange(PARTITIONS)))),
                    opaque=1,
                )
            )
        writer.session.send(Request(opcode=Opcode.NOOP, opaque=2))
        writer.socket.sendall(writer.session.take_output())
        writer.wait_for(Response, 2)
        self._log(f"a batch, mostly to {partition}")

    def look(self, _: int) -> None:
        for mirror in self.chance.sample(list(self.mirrors.values()), 3):
            mirror.read(wait=False)

    def hang_up(self, _: int) -> None:
        name = self.chance.choice(list(self.mirrors))
        self.mirrors[name].leave()
        self._log(f"{name} hangs up")

    def flush(self, _: int) -> None:
        assert self.writer.ask(Opcode.FLUSH).status == 0
        self._log("flush")

    def administer(self, partition: int) -> None:
        match self.chance.randrange(5):
            case 0:
                self._state(partition, self.chance.choice((b"\2", b"\3", b"\4")))
                self.look(partition)
                self._state(partition, ACTIVE)
            case 1:
                self._state(partition, ACTIVE, {"promote": True})
            case _:
                rows = self.writer.stats(f"vbucket-details {partition}")
                high = int(rows[f"vb_{partition}:high_seqno"])
                self._state(
                    partition, ACTIVE, {"promote": True, "to": max(0, high - self.chance.randrange(40))}
                )

    def _state(self, partition: int, state: bytes, order: dict[str, object] | None = None) -> None:
        value = b"" if order is None else json.dumps(order).encode()
        answer = self.writer.ask(Opcode.SET_VBUCKET_STATE, extras=state, value=value, partition=partition)
        assert answer.status == 0
        self._log(f"partition {partition}: state {state[0]}, {order}")

    def restart(self) -> None:
        if self.chance.random() < 0.5:
            self.node.kill()
        else:
            assert self.node.stop() == 0
        self.node.restart()
        self.writer = Peer(self.node, None)
        for mirror in self.mirrors.values():
            mirror.leave()
            if isinstance(mirror, OldFashioned):
                mirror.forget()  # TAP has no positions, and the node keeps none on disk
        self._log("restart")

    def compare(self) -> None:
        """Every consumer reads until it has what was written last, and then equals the bucket."""
        self.checks += 1
        mark = b"a-mark-%d" % self.checks
        for partition in range(PARTITIONS):
            assert self.writer.set(mark, b"here", partition=partition).status == 0
        truth = {
            partition: {
                key: answer.value
                for key in (*KEYS, *(b"a-mark-%d" % number for number in range(self.checks + 1)))
                if (answer := self.writer.get(key, partition=partition)).status == 0
            }
            for partition in range(PARTITIONS)
        }
        for name, mirror in self.mirrors.items():
            while not all(mark in items for items in mirror.items.values()):
                mirror.read(wait=True)
            assert dict(mirror.items) == _seen_by(mirror, name, truth), (name, self.story[-60:])


def _seen_by(
    mirror: Mirror, name: str, truth: dict[int, dict[bytes, bytes]]
) -> dict[int, dict[bytes, bytes]]:
    return {
        partition: {
            key: b"" if name == "keys only" else value
            for key, value in items.items()
            if key.startswith(mirror.prefix)
        }
        for partition, items in truth.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "options"), [(1, ()), (2, ("--durability", "memory")), (3, ("--memory", "1M"))]
)
def test_whatever_happens_every_consumer_ends_equal_to_the_bucket(
    tmp_path: Path, seed: int, options: tuple[str, ...]
) -> None:
    with Node(tmp_path / "data", *options, partitions=PARTITIONS).start() as node:
        world = World(node, seed)
        for turn in range(15):
            for _ in range(20):
                world.step()
            if turn % 5 == 4:
                world.restart()
            world.compare()
        assert "Traceback" not in node.log

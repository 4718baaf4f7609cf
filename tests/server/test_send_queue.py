"""Connections take turns in sending, and the event loop runs between their turns."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from time import perf_counter

from tests.server.inside import Running
from tests.server.peers import Peer
from upper.model.messages import Request, Response, TapConnect
from upper.server.send_queue import SendQueue
from upper.storage import Durability, StorageSettings
from upper.wire.codes import Opcode
from upper.wire.tap import TAP


def test_the_loop_runs_between_connections_that_use_all_their_time() -> None:
    async def run() -> list[str]:
        loop = asyncio.get_running_loop()
        queue, done = SendQueue(loop), asyncio.Event()
        events: list[str] = []

        def other_work() -> None:
            events.append("loop")
            if not done.is_set():
                loop.call_soon(other_work)

        class Greedy:
            def __init__(self, name: str) -> None:
                self.name, self.left = name, 3

            def send(self, until: float) -> None:
                while perf_counter() < until:
                    pass
                events.append(self.name)
                self.left -= 1
                if self.left:
                    queue.add(self.send)
                elif events.count("a") == events.count("b") == 3:
                    done.set()

        for name in "ab":
            queue.add(Greedy(name).send)
        loop.call_soon(other_work)
        await done.wait()
        return events

    events = asyncio.run(run())
    sends = [place for place, event in enumerate(events) if event != "loop"]
    assert [events[place] for place in sends] == ["a", "b"] * 3
    assert all("loop" in events[one:other] for one, other in pairwise(sends))


def test_a_connection_that_is_added_twice_sends_once() -> None:
    async def run() -> int:
        queue = SendQueue(asyncio.get_running_loop())
        calls: list[float] = []
        queue.add(calls.append)
        queue.add(calls.append)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return len(calls)

    assert asyncio.run(run()) == 1


def test_a_new_connection_is_answered_while_many_tap_clients_wait_for_their_backfills(tmp_path: Path) -> None:
    partitions, count = 256, 40
    memory = StorageSettings(durability=Durability.MEMORY)
    running = Running(tmp_path / "data", storage=memory, partitions=partitions)
    with running, ExitStack() as stack:
        writer = stack.enter_context(running.peer())
        for partition in range(partitions):
            writer.set(b"k", b"v", partition=partition)
        address = ("127.0.0.1", running.port)
        clients = [stack.enter_context(Peer(address, TAP)) for _ in range(count)]
        for client in clients:
            client.ask(Opcode.NOOP)  # it is accepted
        held, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            assert go_on.wait(20)

        holder = threading.Thread(target=running.call, args=(hold,))
        holder.start()
        assert held.wait(20)
        # Everything arrives while the loop is held, so what it does first is its own choice.
        for client in clients:
            client.send(TapConnect())
        newcomer = stack.enter_context(running.peer())
        newcomer.send(Request(opcode=Opcode.STAT, opaque=5))
        go_on.set()
        holder.join()
        answer = newcomer.until(lambda message: isinstance(message, Response) and not message.key)
        rows = {row.key: row.value for row in answer if isinstance(row, Response)}
        assert int(rows[b"stream_items"]) < count * partitions
        for client in clients:
            assert len(client.changes(partitions)) == partitions
        assert int(writer.stats()["stream_items"]) == count * partitions

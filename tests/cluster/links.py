"""Links between the processes of a cluster that a test cuts: a proxy before each node, and before its store.

A link goes from a process, recognised by its socket, to what a proxy stands for. A link that is cut with
`held` delivers nothing until it is healed, and then everything, also what the sender has given up: bytes of
an earlier epoch arrive late. Otherwise its connections are reset, and new ones too.

Links of clients are always reset. A `set` that a client has given up and repeated must not arrive later, when
it would overwrite what the client has written since: no server can recognise that.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

OTHERS = "clients"  # the source of connections of any other process
PIECE = 1 << 16  # bytes


class Link:
    """All connections from one process to one proxy."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.resets = False
        self.transports: set[asyncio.WriteTransport] = set()

    def cut(self, *, held: bool) -> None:
        self.open.clear()
        self.resets = not held
        if not held:
            self._abort()

    def heal(self) -> None:
        self.resets = False
        self.open.set()

    def _abort(self) -> None:
        for transport in tuple(self.transports):
            transport.abort()


class Links:
    """Proxies in a thread of their own. `processes` returns the names of processes by their ids."""

    def __init__(self, processes: Callable[[], Mapping[int, str]]) -> None:
        self._processes = processes
        self._links: dict[tuple[str, str], Link] = {}
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        async def end() -> None:
            for server in self._servers:
                server.close()
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def to(self, name: str, target: Callable[[], int]) -> int:
        """The port of a new proxy for `name`; `target` returns the port that it connects to."""

        async def begin() -> int:
            server = await asyncio.start_server(
                lambda reader, writer: self._serve(name, target, reader, writer), "127.0.0.1", 0
            )
            self._servers.append(server)
            return int(server.sockets[0].getsockname()[1])

        port: int = self._call(begin())
        return port

    def cut(self, source: str, to: str, *, held: bool) -> None:
        """Cut one direction of connecting; bytes flow in neither."""

        async def cut() -> None:
            self._link(source, to).cut(held=held and source != OTHERS)

        self._call(cut())

    def heal(self) -> None:
        """Heal every link."""

        async def heal() -> None:
            for link in self._links.values():
                link.heal()

        self._call(heal())

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def _link(self, source: str, to: str) -> Link:
        return self._links.setdefault((source, to), Link())

    async def _serve(
        self,
        name: str,
        target: Callable[[], int],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        link = self._link(self._source(writer.get_extra_info("peername")[1]), name)
        link.transports.add(writer.transport)
        behind = None
        try:
            if link.resets:
                return
            await link.open.wait()
            there, behind = await asyncio.open_connection("127.0.0.1", target())
            link.transports.add(behind.transport)
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(link, reader, behind))
                both.create_task(_pump(link, there, writer))
        except* OSError:
            pass  # one side has ended, and so the other
        finally:
            for each in (writer, behind):
                if each is not None:
                    link.transports.discard(each.transport)
                    each.transport.abort()

    def _source(self, port: int) -> str:
        """Which process has the other end of a connection."""
        inode = _inode(port)
        for pid, name in self._processes().items():
            with suppress(OSError):
                for entry in os.scandir(f"/proc/{pid}/fd"):
                    with suppress(OSError):
                        if os.readlink(entry.path) == f"socket:[{inode}]":
                            return name
        return OTHERS


async def _pump(link: Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(PIECE):
        await link.open.wait()
        sink.write(data)
        await sink.drain()
    await link.open.wait()
    sink.write_eof()


def _inode(port: int) -> str:
    with open("/proc/net/tcp") as table:
        for line in table:
            fields = line.split()
            if fields[1].endswith(f":{port:04X}") and fields[1].startswith("0100007F"):
                return fields[9]
    return ""

"""Connections for the asynchronous driver: opening one, signing in, and exchanging packets.

Dull on purpose, like `sockets`: what is sent and what it means is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress

from upper.client.bucket import GATHER
from upper.client.link import Answer, Link, finals
from upper.client.sockets import Access, hung_up, no_node, no_tls, prepare
from upper.client.url import Node
from upper.errors import RemoteProtocolError, Unreachable

READ = GATHER  # bytes asked of a connection at once; what goes into one record batch, at most
AHEAD = READ // 2  # bytes after which asyncio stops reading from a socket; it may hold twice as many


class Pipe:
    """One connection, signed in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer, self.link = reader, writer, Link()

    async def exchange(self, data: bytes, count: int) -> list[Answer]:
        """Send, and read while sending: neither end may wait for the other to read first."""
        self.writer.write(data)
        answers: list[Answer] = []
        missing = count
        while missing:
            piece = await self.reader.read(READ)
            if not piece:
                raise ConnectionResetError("the node closed the connection")
            some = self.link.receive(piece)
            answers += some
            missing -= finals(some)
        return answers

    def close(self) -> None:
        with suppress(RuntimeError):  # the loop may be gone before us
            self.writer.close()


async def open_pipe(access: Access, node: Node, *, tokens: bool = False) -> Pipe:
    try:
        reader, writer = await asyncio.open_connection(
            node.host,
            node.port,
            ssl=access.tls,
            limit=AHEAD,
            server_hostname=node.host if access.tls else None,
        )
    except ssl.SSLCertVerificationError as error:
        raise Unreachable(
            f"the certificate of {node} is not trusted ({error.verify_message}); name its authority: ?ca=FILE"
        ) from None
    except ssl.SSLError as error:
        raise no_tls(node, error) from None
    except OSError as error:
        why = error.strerror or str(error)
        raise Unreachable(f"{node} cannot be reached ({why}); is a node running there?") from None
    prepare(writer.get_extra_info("socket"))
    pipe = Pipe(reader, writer)
    steps = access.login(node, tokens=tokens)
    try:
        packet = next(steps)
        while True:
            (answer,) = await pipe.exchange(packet, 1)
            packet = steps.send(answer)
    except StopIteration:
        return pipe
    except OSError:
        pipe.close()
        raise hung_up(node, plain=access.tls is None) from None
    except RemoteProtocolError:
        pipe.close()
        raise no_node(node) from None
    except BaseException:
        pipe.close()
        raise

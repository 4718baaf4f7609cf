"""Bytes of a stream connection into packets, and packets into events.

The three kinds of changes of UPR are read here field by field, past the tables of `wire`, because a follower
sees millions of them; a test holds these lines to what the tables say. Everything else, and every other
dialect, goes through the tables.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

from upper.client.events import Deletion, Event, Expiration, Mutation
from upper.client.lane import Lane
from upper.errors import BadLength, BadMagic, RemoteProtocolError, TooLarge
from upper.model.messages import Message
from upper.model.values import Partition
from upper.wire.codes import Side
from upper.wire.packet import HEADER, HEADER_SIZE, MAX_BODY, REQUEST, RESPONSE
from upper.wire.table import Dialect

_LIVE = struct.Struct(">QQIII")  # seqno, revision, flags, expiration, lock time
_GONE = struct.Struct(">QQ")
NOOP = 0x5C


class Frames:
    """The receiving end of one stream connection."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._have = self._need = 0
        self._streamed = 0

    def collect(self, data: bytes) -> bytes:
        """All bytes that have not been dealt with, or nothing while the next packet is not whole."""
        if not self._parts:
            return data
        self._parts.append(data)
        self._have += len(data)
        if self._have < self._need:
            return b""
        whole = b"".join(self._parts)
        self._parts.clear()
        return whole

    def keep(self, data: bytes, at: int) -> None:
        """Keep what follows `at`, which is not a whole packet."""
        left = len(data) - at
        if left:
            self._parts = [data[at:] if at else data]
            self._have = left
            self._need = HEADER_SIZE
            if left >= HEADER_SIZE:
                self._need += int.from_bytes(data[at + 8 : at + 12], "big")

    def streamed(self, size: int) -> None:
        """Bytes of streams, which the flow-control window counts."""
        self._streamed += size

    def take_streamed(self) -> int:
        size, self._streamed = self._streamed, 0
        return size

    def typed(
        self, data: bytes, lanes: Mapping[Partition, Lane], dialect: Dialect
    ) -> Iterator[Event | tuple[Message]]:
        """Changes as events; any other message in a tuple, to be dealt with before the next is asked for."""
        data = self.collect(data)
        unpack, at, size = HEADER.unpack_from, 0, len(data)
        fast = dialect.name == "upr"
        while size - at >= HEADER_SIZE:
            magic, opcode, keys, extras, data_type, partition, body, opaque, cas = unpack(data, at)
            end = at + HEADER_SIZE + body
            if magic != REQUEST and magic != RESPONSE:
                raise BadMagic(
                    f"magic 0x{magic:02x} begins no packet; the connection is of no use any more", at=at
                )
            if body > MAX_BODY:
                raise TooLarge(f"a packet of {body} bytes is more than the {MAX_BODY} accepted here", at=at)
            if end > size:
                break
            if magic == REQUEST and opcode != NOOP:
                self._streamed += end - at
            if fast and magic == REQUEST and 0x56 <= opcode <= 0x58:
                lane = lanes.get(opaque)  # an opaque is the partition's number
                key_at = at + HEADER_SIZE + extras
                value_at = key_at + keys
                if lane is None or lane.partition != partition:
                    raise RemoteProtocolError(
                        f"a change of stream {opaque} came, which was never asked for", at=at
                    )
                if extras != (28 if opcode == 0x56 else 16) or not keys or value_at > end:
                    raise BadLength(
                        "the lengths of a change do not add up; the connection is of no use", at=at
                    )
                stream = lane.stream
                if opcode == 0x56:
                    seqno, revision, flags, expiration, lock_time = _LIVE.unpack_from(data, at + HEADER_SIZE)
                    stream.moved(seqno)
                    yield Mutation(
                        partition=partition,
                        seqno=seqno,
                        branch=stream.branch,
                        key=data[key_at:value_at],
                        value=data[value_at:end],
                        revision=revision,
                        cas=cas,
                        flags=flags,
                        expiration=expiration,
                        lock_time=lock_time,
                        data_type=data_type,
                    )
                else:
                    seqno, revision = _GONE.unpack_from(data, at + HEADER_SIZE)
                    stream.moved(seqno)
                    kind = Deletion if opcode == 0x57 else Expiration
                    yield kind(
                        partition=partition,
                        seqno=seqno,
                        branch=stream.branch,
                        key=data[key_at:value_at],
                        revision=revision,
                        cas=cas,
                    )
            else:
                yield (dialect.decode(data[at:end], by=Side.SERVER),)
            at = end
        self.keep(data, at)

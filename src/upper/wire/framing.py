"""Cutting bytes into packets: the one framer of both sides.

A `Framer` keeps the bytes of a connection that do not form a whole packet yet, in the chunks in which they
arrived, and joins them once, when there are enough. `head` checks and cuts one packet; `kernel.scan` does the
same for all packets of a buffer, with the same checks and errors. An invalid header raises as soon as it has
arrived. Nothing is allocated because of a length field.
"""

from __future__ import annotations

from upper.record.layout import AT_BODY, HEADER, HEADER_SIZE, MAX_BODY, U32
from upper.wire.frame_info import lengths
from upper.wire.packet import MAGICS, Header, bad_length, bad_magic, header, too_large


class Framer:
    """The receiving end of one connection."""

    __slots__ = ("_parts", "needed", "size")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.size = 0  # bytes kept
        self.needed = 0  # bytes without which no packet can be whole

    def __bool__(self) -> bool:
        """Whether bytes are kept."""
        return bool(self._parts)

    @property
    def ready(self) -> bool:
        """Whether the kept bytes may hold a whole packet."""
        return bool(self._parts) and self.size >= self.needed

    def add(self, data: bytes) -> None:
        """Append received bytes to the kept ones."""
        self._parts.append(data)
        self.size += len(data)

    def feed(self, data: bytes) -> bytes:
        """All received bytes that were not cut yet; empty while the next packet is not whole."""
        if not self._parts:
            return data
        self.add(data)
        return self.take() if self.ready else b""

    def take(self) -> bytes:
        """All kept bytes; the framer is empty afterwards."""
        data = b"".join(self._parts) if len(self._parts) > 1 else self._parts[0]
        self.clear()
        return data

    def head(self, data: bytes, at: int, *, max_body: int = MAX_BODY) -> Header | None:
        """The header of the packet at `at` if all of it is there; otherwise `needed` is its size.

        Errors count from the start of the packet.
        """
        left = len(data) - at
        if not left:
            return None  # nothing came, or what is kept is not enough: `needed` holds on
        if left < HEADER_SIZE:
            if data[at] not in MAGICS:
                raise bad_magic(data[at], 0)
            self.needed = HEADER_SIZE
            return None
        head = header(data, at, max_body=max_body, base=-at)
        self.needed = head.size
        return head if left >= head.size else None

    def alternative(self, data: bytes, at: int, *, max_body: int = MAX_BODY) -> Header | None:
        """The same for a request with framing extras, whose key length has another form."""
        if len(data) - at < HEADER_SIZE:
            self.needed = HEADER_SIZE
            return None
        head = Header._make(HEADER.unpack_from(data, at))
        if head.body > max_body:
            raise too_large(head.body, max_body, AT_BODY)
        options, key = lengths(head)
        if options + head.extras_length + key > head.body:
            raise bad_length(options + head.extras_length, key, head.body, AT_BODY)
        self.needed = head.size
        return head if len(data) - at >= head.size else None

    def put_back(self, data: bytes, at: int) -> None:
        """Keep the rest of `data`, before what was added since."""
        if at < len(data):
            self._parts.insert(0, data[at:] if at else data)
            self.size += len(data) - at

    def keep(self, data: bytes, at: int) -> None:
        """The packets of `data` up to `at` were cut, and the next one is not whole."""
        if not data:
            return  # what is kept is not enough: `needed` holds on
        self.put_back(data, at)
        left = len(data) - at
        if left >= HEADER_SIZE:
            self.needed = HEADER_SIZE + U32.unpack_from(data, at + AT_BODY)[0]
        else:
            self.needed = HEADER_SIZE

    def clear(self) -> None:
        self._parts.clear()
        self.size = self.needed = 0

"""One connection, either side, without its socket: bytes in, messages out; messages in, bytes out.

A connection begins as key-value. Its first stream packet fixes its dialect, a packet of another
dialect afterwards is refused, and key-value stays allowed throughout. What a bad packet gets:

- A header that cannot be trusted (magic, lengths, size) ends the session: whatever follows cannot be
  read. The messages before it are still delivered; `error` tells, and `refusal` is the answer to send
  before closing, where one can be matched to the packet.
- A whole packet that makes no sense (unknown opcode, wrong extras, reserved bits, another dialect) is
  delivered to a server as `Unreadable`, with its answer, and the connection goes on. A client that
  gets one from its server raises: it would rather stop than miss something.

The buffer holds what has arrived and not yet been read: never more than one packet and one read, and
nothing is allocated because a length field says so.
"""

from __future__ import annotations

from upper.errors import LocalProtocolError, ProtocolError, RemoteProtocolError, Truncated, WrongDialect
from upper.model.messages import Message, Refusal, Unreadable
from upper.model.values import Partition
from upper.wire.codes import Side
from upper.wire.dcp import DCP
from upper.wire.kv import KV
from upper.wire.packet import HEADER_SIZE, MAX_BODY, REQUEST, Header, header, peek, response
from upper.wire.table import Dialect
from upper.wire.tap import TAP
from upper.wire.upr import UPR
from upper.wire.upr0 import UPR0

DIALECTS = {dialect.name: dialect for dialect in (KV, UPR, UPR0, TAP, DCP)}
SHARED = range(0x5C, 0x5F)  # NOOP, BUFFER_ACK and CONTROL: UPR and DCP have the same


def family(head: Header) -> Dialect | None:
    """The stream dialect that this request can only belong to; None where it tells nothing."""
    if head.magic != REQUEST:
        return None
    match head.opcode, head.extras_length:
        case 0x01, 32 | 40 if head.data_type == 1:
            return UPR0
        case 0x01, 0 if head.data_type == 2 and head.body == 0:
            return UPR0
        case 0x40, _:
            return TAP
        case 0x50, 40:
            return UPR
        case 0x51, 0 if head.body == 0:
            return UPR
        case (0x50, 8) | (0x51, 4) | (0x53, 48):
            return DCP
    return None


def select(current: Dialect | None, head: Header) -> Dialect | None:
    """The dialect of a connection once a client has sent this; raises where it would be a second one.

    None as long as only key-value has been spoken.
    """
    told = family(head)
    if current is None:
        if told is DCP and head.opcode != 0x50:  # DCP begins with OPEN
            return None
        return UPR if head.magic == REQUEST and head.opcode in SHARED else told
    if told is not None and told is not current:
        raise WrongDialect(
            f"this connection speaks {current.name} and the packet is {told.name}; open another connection",
            at=1,
        )
    return current


def error_answer(error: ProtocolError, head: Header | None, dialect: Dialect | None = None) -> bytes:
    """What to answer to a packet with this header; empty where no answer could be matched to it."""
    if head is None or head.magic != REQUEST:
        return b""
    if family(head) is UPR0 or (dialect is UPR0 and head.opcode == 0x01 and head.data_type in (1, 2)):
        return UPR0.encode(
            Refusal(
                opcode=0x01,
                status=error.status,
                opaque=head.opaque,
                partition=Partition(head.vbucket),
                value=str(error).encode(),
            )
        )
    return response(head.opcode, head.opaque, status=error.status, value=str(error).encode())


class Session:
    """The protocol state of one connection."""

    def __init__(self, side: Side, *, dialect: Dialect | None = None, max_body: int = MAX_BODY) -> None:
        self.side = side
        self.dialect = dialect  # the stream dialect; None while only key-value is spoken
        self.max_body = max_body
        self.error: RemoteProtocolError | None = None
        self.refusal = b""
        self._input = bytearray()
        self._output: list[bytes] = []

    # Bytes in

    def receive(self, data: bytes) -> list[Message]:
        """Every message that is whole now.

        Broken input raises at once where nothing came before it; otherwise what came before it is
        returned, `error` is set, and the next call raises.
        """
        if self.error is not None:
            raise self.error
        self._input += data
        messages: list[Message] = []
        at = 0
        try:
            while (message_end := self._next(at)) is not None:
                message, at = message_end
                messages.append(message)
        except RemoteProtocolError as error:
            self.error = error
            self._input.clear()
            if not messages:
                raise
            return messages
        if at:
            del self._input[:at]
        return messages

    def _next(self, at: int) -> tuple[Message, int] | None:
        if len(self._input) - at < HEADER_SIZE:
            return None
        try:
            head = header(self._input, at, max_body=self.max_body, base=-at)
        except RemoteProtocolError as error:
            if self.side is Side.SERVER:
                self.refusal = error_answer(error, peek(self._input, at), self.dialect)
            raise
        end = at + head.size
        if len(self._input) < end:
            return None
        try:
            return self.read(head, bytes(self._input[at:end])), end
        except RemoteProtocolError as error:
            if self.side is Side.CLIENT:
                raise
            answer = error_answer(error, head, self.dialect)
            return Unreadable(opcode=head.opcode, opaque=head.opaque, error=error, refusal=answer), end

    def read(self, head: Header, packet: bytes) -> Message:
        """One whole packet, for a driver that cuts packets apart itself because most never come here."""
        if self.side is Side.SERVER:
            self.dialect = select(self.dialect, head)
        return (self.dialect or KV).row(head, by=self.side.other).read(head, packet)

    def finish(self) -> None:
        """The peer has closed its side: raises if that was in the middle of a packet."""
        if self._input and self.error is None:
            self.error = Truncated(
                f"the connection ended {len(self._input)} bytes into a packet", at=len(self._input)
            )
            raise self.error

    @property
    def buffered(self) -> int:
        """Bytes that have arrived and are not a whole packet yet."""
        return len(self._input)

    # Bytes out

    def speak(self, dialect: Dialect) -> None:
        """A client decides which dialect its streams use."""
        if self.dialect not in (None, dialect):
            raise LocalProtocolError(
                f"this connection speaks {self.dialect.name}, not {dialect.name}; open another one"
            )
        self.dialect = dialect

    def send(self, message: Message) -> None:
        self._output.append((self.dialect or KV).encode(message))

    def take_output(self) -> bytes:
        """Everything to write now; the session forgets it."""
        output, self._output = b"".join(self._output), []
        return output

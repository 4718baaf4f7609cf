"""One connection that carries streams: what is to be sent, framing, flow control, and how it begins.

A connection begins with OPEN where the dialect names connections, and with CONTROL for each setting where it
has settings. Settings that only some servers have are sent with an opaque of their own, and may be refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from upper.client.decode import StreamFramer
from upper.history.window import Acknowledgements
from upper.model.messages import Control, Message, Open, Refusal
from upper.wire.table import Dialect

NO_STREAM = 0xFFFF_0000  # the opaque of messages that belong to no stream
OPTIONAL = 0xFFFF_0001  # of settings that a node may refuse
PRODUCER, XATTRS, DELETE_TIMES = 0x01, 0x04, 0x20  # flags of OPEN; expirations need the last one since 7.0
# DCP's own settings. Servers before 5.5 and 6.5 do not have them.
EXTRA = {b"enable_expiry_opcode": b"true", b"send_stream_end_on_client_close_stream": b"true"}


class StreamConnection:
    """The state of one connection, without its socket."""

    def __init__(self, dialect: Dialect, window: int, now: float) -> None:
        self.dialect = dialect
        self.out = bytearray()
        self.frames = StreamFramer()
        self.window = window if dialect.flow_control else 0
        self.acks = Acknowledgements(self.window)
        self.active_at = now
        self.received = 0
        self.seqnos_due = False  # streams were requested, and the high seqnos are to be requested next
        self._open_flags = 0

    def send(self, message: Message) -> None:
        self.out += self.dialect.encode(message)

    def configure(self, name: bytes, flags: int, controls: Mapping[bytes, bytes], *, noop: int) -> None:
        """Send what precedes the first stream request: OPEN under this name, and the settings."""
        controls = dict(controls)
        if self.dialect.named_connections:
            self._open_flags = flags
            self.send(Open(name=name, flags=flags, opaque=NO_STREAM))
            # Only nodes of this project have a second name, for statistics.
            for extra, setting in (EXTRA | {b"name": controls.pop(b"name", b"")}).items():
                self.send(Control(name=extra, setting=setting, opaque=OPTIONAL))
        if self.dialect.settings:
            if self.window:
                controls[b"connection_buffer_size"] = str(self.window).encode()
            if noop:
                controls[b"enable_noop"] = b"true"
                controls[b"set_noop_interval"] = str(noop).encode()
            for control, setting in controls.items():
                self.send(Control(name=control, setting=setting, opaque=NO_STREAM))

    def refused_flags(self, refused: Refusal) -> bool:
        """Whether OPEN was refused, and may be accepted without flags that servers have since 5.0."""
        opens = self.dialect.named_connections and refused.opcode == self.dialect.opcode(Open)
        return opens and refused.opaque == NO_STREAM and self._open_flags != PRODUCER

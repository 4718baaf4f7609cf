"""The whole exception tree.

Every error is one sentence that says what is wrong and what to do next, with the facts attached
as attributes; handlers look at classes and attributes, never at the text. A class knows the status
that it becomes on the wire and the exit code that it becomes in a shell.

Nothing here imports anything of `upper`: any room may raise any of these.
"""

from __future__ import annotations

from typing import ClassVar


class UpperError(Exception):
    """Something that a person or a peer can act on."""

    status: ClassVar[int] = 0x84  # internal error
    exit_code: ClassVar[int] = 1


# ── Bytes that are not what the protocol says ─────────────────────────────────────────────────────


class ProtocolError(UpperError):
    """Bytes or messages that break the protocol. `at` is the offset of the first wrong byte."""

    status = 0x04  # invalid arguments
    exit_code = 2

    def __init__(self, sentence: str, *, at: int | None = None) -> None:
        super().__init__(sentence if at is None else f"byte {at}: {sentence}")
        self.at = at


class LocalProtocolError(ProtocolError):
    """Our own side asked for something that the protocol cannot say."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol does not allow."""


class BadMagic(RemoteProtocolError):
    """The first byte of a packet is not a known magic: the rest cannot be read."""


class TooLarge(RemoteProtocolError):
    """A packet announces more than this side accepts."""

    status = 0x03


class BadLength(RemoteProtocolError):
    """The lengths of a packet do not add up, or do not fit its kind."""


class ReservedBits(RemoteProtocolError):
    """Reserved bits are set, or a field holds a number that means nothing here."""


class UnknownOpcode(RemoteProtocolError):
    """No dialect spoken here has this opcode."""

    status = 0x81


class WrongDialect(RemoteProtocolError):
    """A packet of one dialect on a connection that already speaks another."""


class Truncated(RemoteProtocolError):
    """The bytes end inside a packet."""


# ── What a server answers ─────────────────────────────────────────────────────────────────────────


class Refused(UpperError):
    """The node understood the request and said no. `status` is the code it answered."""

    exit_code = 4


class KeyNotFound(Refused):
    status = 0x01


class KeyExists(Refused):
    """The key exists, or its CAS is another than the one given."""

    status = 0x02


class ValueTooLarge(Refused):
    status = 0x03


class InvalidArguments(Refused):
    status = 0x04
    exit_code = 2  # whoever says so, a node or this side: it is the input that must change


class NotStored(Refused):
    status = 0x05


class NotANumber(Refused):
    status = 0x06


class NotMyPartition(Refused):
    """This node does not hold the partition in the state that the request needs."""

    status = 0x07

    def __init__(self, sentence: str, *, partition: int, cluster_map: bytes = b"") -> None:
        super().__init__(sentence)
        self.partition, self.cluster_map = partition, cluster_map


class Locked(Refused):
    status = 0x09


class AuthenticationFailed(Refused):
    status = 0x20


class NotAllowed(Refused):
    """The user lacks the role that the request needs."""

    status = 0x24


class OutOfRange(Refused):
    status = 0x22


class OutOfMemory(Refused):
    status = 0x82


class NotSupported(Refused):
    status = 0x83


class Busy(Refused):
    status = 0x85


class TemporaryFailure(Refused):
    status = 0x86


# ── Reaching a server ─────────────────────────────────────────────────────────────────────────────


class Unreachable(UpperError):
    """No node answered, within the time given."""

    exit_code = 3


class TimedOut(Unreachable):
    """A node took longer than the caller was willing to wait."""


class BadUrl(UpperError):
    exit_code = 2


# ── Positions and data at rest ────────────────────────────────────────────────────────────────────


class BadCheckpoint(UpperError):
    """A saved position that is damaged, of another bucket, or of a newer version of this software."""

    exit_code = 2


class RollbackRequired(UpperError):
    """History branched behind a consumer that has state and no way to take it back."""

    def __init__(self, sentence: str, *, partition: int, to: int) -> None:
        super().__init__(sentence)
        self.partition, self.to = partition, to


class StorageError(UpperError):
    """The data directory cannot be used as asked. Nothing in it was changed."""

    status = 0x86
    exit_code = 5


class Corrupt(StorageError):
    """Stored bytes contradict their checksum or each other."""


class DirectoryInUse(StorageError):
    """Another process has this data directory open."""


class WrongVersion(StorageError):
    """The directory was written by a version that this one does not understand."""


class NotWritable(StorageError):
    """The disk refused a write (full, read-only, failing); reads go on."""


class SeqnoExhausted(StorageError):
    """A partition has used its last seqno, 2^48 - 1."""


# ── The machine around us ─────────────────────────────────────────────────────────────────────────


class NotInstalled(UpperError):
    """Something outside this package is needed, and absent or too old."""

    exit_code = 2

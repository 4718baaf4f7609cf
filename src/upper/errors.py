"""The exception tree.

The message of an error is one sentence: the problem, then the remedy. Facts are attributes; handlers use
classes and attributes, never the text. A class holds its status on the wire and its exit code in a shell.

This module imports nothing of `upper`, so every package can raise these errors.
"""

from __future__ import annotations

from typing import ClassVar


class UpperError(Exception):
    """An error that a user or a peer can act on."""

    status: int = 0x84  # internal error
    exit_code: ClassVar[int] = 1


# ── Violations of the protocol ─────────────────────────────────────────────────────


class ProtocolError(UpperError):
    """Bytes or messages that break the protocol. `at` is the offset of the first wrong byte."""

    status = 0x04  # invalid arguments
    exit_code = 2

    def __init__(self, sentence: str, *, at: int | None = None) -> None:
        super().__init__(sentence if at is None else f"byte {at}: {sentence}")
        self.at = at


class LocalProtocolError(ProtocolError):
    """This side asked for something that the protocol cannot express."""


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
    """Reserved bits are set, or a field holds a number that is not defined."""


class UnknownOpcode(RemoteProtocolError):
    """No supported dialect has this opcode."""

    status = 0x81


class WrongDialect(RemoteProtocolError):
    """A packet of one dialect on a connection that uses another."""


class Truncated(RemoteProtocolError):
    """The bytes end inside a packet."""


# ── Requests that a node rejects ─────────────────────────────────────────────────────────────────────────


class Refused(UpperError):
    """The node rejected the request. `status` is the code of its response, `key` the key it is about."""

    exit_code = 4
    key: bytes | None = None


class KeyNotFound(Refused):
    status = 0x01
    exit_code = 1  # the same for every verb: the question was answered, with no


class KeyExists(Refused):
    """The key exists, or its CAS differs from the one in the request."""

    status = 0x02


class ValueTooLarge(Refused):
    status = 0x03


class InvalidArguments(Refused):
    status = 0x04
    exit_code = 2  # whether a node or this side detects it: the input must change


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


class UnknownCollection(Refused):
    status = 0x88


class UnknownScope(Refused):
    status = 0x8C


class UnknownStreamId(Refused):
    status = 0x8D


class InvalidDurability(Refused):
    """There is no such durability level."""

    status = 0xA0


class DurabilityImpossible(Refused):
    """Too few copies are in sync for the durability that a write requires; it was not made."""

    status = 0xA1


class DurabilityAmbiguous(Refused):
    """A write was made, and too few copies confirmed it: a failover may keep it or remove it."""

    status = 0xA3


class SubdocumentError(Refused):
    """A path cannot be read or edited; the status is the reason."""

    status = 0xC0

    def __init__(self, sentence: str, *, status: int) -> None:
        super().__init__(sentence)
        self.status = status


# ── Reaching a server ─────────────────────────────────────────────────────────────────────────────


class Unreachable(UpperError):
    """No node answered in time. `sent`: a request was sent, and may have been performed."""

    exit_code = 3
    sent = False


class TimedOut(Unreachable):
    """A node took longer than the timeout of the caller."""


class NotDurable(UpperError):
    """A write has fewer copies than requested when the timeout ends, or a failover removed it (`lost`)."""

    exit_code = 1  # the question was answered, with no

    def __init__(self, sentence: str, *, persisted: int = 0, replicated: int = 0, lost: bool = False) -> None:
        super().__init__(sentence)
        self.persisted, self.replicated, self.lost = persisted, replicated, lost


class BucketClosed(UpperError):
    """A call on a bucket after `close`."""

    exit_code = 2


class BadUrl(UpperError):
    exit_code = 2


# ── Positions and data at rest ────────────────────────────────────────────────────────────────────


class BadCheckpoint(UpperError):
    """A saved position that is damaged, of another bucket, or of a newer version of this software."""

    exit_code = 2


class RollbackRequired(UpperError):
    """History branched, and the consumer has state and no rollback handler."""

    def __init__(self, sentence: str, *, partition: int, to: int) -> None:
        super().__init__(sentence)
        self.partition, self.to = partition, to


class ClusterError(UpperError):
    """The cluster, its map or its agreement store cannot be used as requested."""

    status = 0x86
    exit_code = 4


class StorageError(UpperError):
    """The data directory cannot be used as requested. Nothing in it was changed."""

    status = 0x86
    exit_code = 5


class InvalidBucket(StorageError):
    """A bucket cannot have this name or this number of partitions."""

    exit_code = 2


class Corrupt(StorageError):
    """Stored bytes contradict their checksum or each other."""


class DirectoryInUse(StorageError):
    """Another process has this data directory open."""


class WrongVersion(StorageError):
    """The directory was written by a version that this one cannot read."""


class NotWritable(StorageError):
    """The disk rejected a write (full, read-only, failing); reads still work."""


class SeqnoExhausted(StorageError):
    """A partition has used its last seqno, 2^48 - 1."""


# ── The environment ─────────────────────────────────────────────────────────────────────────


class NotInstalled(UpperError):
    """A package or program that is needed is absent or too old."""

    exit_code = 2

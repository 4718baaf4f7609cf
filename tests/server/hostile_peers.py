"""Hostile peers: clients that can build every packet and misuse all of them.

A hostile peer uses one dialect, or several at once. It sends values that it received (CAS, seqnos, branches,
opaques) back, so that it gets further than noise would. Some damage what they send, some send it byte by
byte, some do not read, and they disconnect in several ways. All responses of the node have to be whole
packets: a peer that receives anything else raises.
"""

from __future__ import annotations

import base64
import contextlib
import json
import random
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable

from tests.wire.samples import vectors
from upper.server import commands
from upper.server.auth import HASHES
from upper.server.controls import SETTINGS
from upper.server.stats import GROUPS
from upper.server.table import TABLE
from upper.wire.codes import Opcode

assert commands.__all__, "importing the commands fills their table"

HEAD = struct.Struct(">BBHBBHIIQ")
LARGEST = (20 << 20) + (64 << 10)
ODD = (0, 1, 2, 255, 256, 2**31, 2**32 - 1, 2**48 - 1, 2**63 - 1, 2**63, 2**64 - 1)
PRINTED = [vector.on_the_wire for vector in vectors()]
TEXTS = (
    *(b"", b"0", b"1", b"true", b"false", b"64", b"100000", b"-1", b"1e9", b"nan", b"0.1", b"\xff\xfe"),
    *(b"user:", b"^k[0-9]", b"((((", b"$.a == 1", b"$.a < [1]", b'$.a == "\xff"', b"$" + b"[9999]" * 50),
    *(
        b"9" * 5000,
        b"$[" + b"9" * 4050 + b"] == 1",
        b"$.a == " + b"[" * 4000,
        b"$.a == x" + b" " * 4000 + b"y",
    ),
    *(b"mutation", b"deletion,expiration", b"0-3,9", b"0-65535," * 400 + b"1", b"5-1", b"a-b"),
)
VALUES = (
    *(b"", b"1", b"18446744073709551615", b'{"a": 1}', b'{"a": ["b"]}', b"[" * 9000),
    *(bytes(3000), b"x" * 70_000),
)
COMMON = (Opcode.SET, Opcode.GET, Opcode.DELETE, Opcode.SETQ, Opcode.INCREMENT)
DRASTIC = frozenset(
    {
        *(Opcode.FLUSH, Opcode.FLUSHQ, Opcode.QUIT, Opcode.QUITQ),
        *(Opcode.SET_VBUCKET_STATE, Opcode.DELETE_VBUCKET),
    }
)
KEYS = (*(b"k%d" % number for number in range(8)), b"user:1", b"k" * 250, b"k" * 251, b"\xff")


def packet(
    opcode: int,
    *,
    extras: bytes = b"",
    key: bytes = b"",
    value: bytes = b"",
    partition: int = 0,
    opaque: int = 0,
    cas: int = 0,
    data_type: int = 0,
    magic: int = 0x80,
) -> bytes:
    body = extras + key + value
    head = (magic, opcode, len(key), len(extras), data_type, partition, len(body), opaque, cas)
    return HEAD.pack(*head) + body


class HostilePeer:
    """One connection, and what it has learned so far."""

    def __init__(
        self, connection: socket.socket, chance: random.Random, received: Counter[str], *, rude: bool = True
    ) -> None:
        self.socket, self.chance, self.received = connection, chance, received
        self.dialect: Callable[[], bytes] = chance.choice(
            (self._kv, self._kv, self._upr, self._upr, self._upr, self._upr0, self._tap, self._anything)
        )
        self.damage: float = chance.choice((0.0, 0.0, 0.02, 0.3)) if rude else 0.0
        self.reads: bool = chance.random() < 0.9
        self.closed = False
        self.answered: set[int] = set()  # opaques of NOOPs
        self._cas, self._seqno, self._branch, self._opaque, self._asked = [0], [0], [0], 0, [1]
        self._rest = b""

    # ── Traffic ───────────────────────────────────────────────────────────────────────────────────

    def step(self) -> None:
        """Send something, and read what has arrived."""
        data = b"".join(self._damaged(self.dialect()) for _ in range(self.chance.choice((1, 1, 2, 5, 30))))
        self.write(data)
        if self.reads:
            self.read_some(0.002)

    def write(self, data: bytes) -> None:
        """At once, in a few pieces, or byte by byte."""
        pieces = [data]
        match self.chance.randrange(4):
            case 0 if len(data) > 2:
                cuts = sorted(self.chance.randrange(1, len(data)) for _ in range(self.chance.randrange(1, 6)))
                pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
            case 1 if len(data) < 200:
                pieces = [data[at : at + 1] for at in range(len(data))]
        try:
            self.socket.settimeout(10.0 if self.reads else 0.05)
            for piece in pieces:
                self.socket.sendall(piece)
        except TimeoutError:
            assert not self.reads, "the node does not read from a peer that reads"
            self.closed = True
        except OSError:
            self.closed = True

    def read_some(self, seconds: float) -> bool:
        """Whatever came within a moment; false when nothing did."""
        self.socket.settimeout(seconds)
        try:
            data = self.socket.recv(1 << 18)
        except (TimeoutError, ssl.SSLWantReadError):
            return False
        except OSError:
            self.closed = True
            return False
        if not data:
            self.closed = True
            return False
        self._rest += data
        self._learn()
        return True

    def _learn(self) -> None:
        at = 0
        while len(self._rest) - at >= 24:
            magic, opcode, key, extras, kind, status, body, opaque, cas = HEAD.unpack_from(self._rest, at)
            assert magic in (0x80, 0x81), f"the node sent magic 0x{magic:02x}"
            assert key + extras <= body <= LARGEST, f"the node sent a packet that cannot be, 0x{opcode:02x}"
            if len(self._rest) - at < 24 + body:
                break
            content = self._rest[at + 24 : at + 24 + body]
            at += 24 + body
            self._keep(self._cas, cas)
            self.received[f"{magic:02x}{opcode:02x}{f'.{kind}' if opcode < 6 else ''}"] += 1
            if magic == 0x81 and opcode == 0x0A and status == 0:
                self.answered.add(opaque)
            elif (magic == 0x80 and 0x56 <= opcode <= 0x58) or (magic, opcode, extras) == (0x81, 4, 28):
                self._keep(self._seqno, int.from_bytes(content[:8], "big"))
            elif magic == 0x80 and 0x41 <= opcode <= 0x45 and content[3] & 1:
                self._keep(self._asked, opaque)
            elif opcode in (0x50, 0x51) and magic == 0x81:
                self.received[f"streams, status {status:x}"] += opcode == 0x50
                if not status and len(content) >= 16:
                    self._keep(self._branch, int.from_bytes(content[:8], "big"))
        self._rest = self._rest[at:]

    def _keep(self, where: list[int], number: int) -> None:
        where.append(number)
        del where[:-5]

    def leave(self, goodbye: str) -> None:
        """Disconnect: in order, in the middle of a packet, half-closed, or by a reset."""
        with contextlib.suppress(OSError):
            match goodbye:
                case "ask" if not self.damage and self.reads:
                    self._still_answered()
                case "half" if self.reads and not isinstance(self.socket, ssl.SSLSocket):
                    self.socket.shutdown(socket.SHUT_WR)
                    self._until(
                        lambda: self.closed, "the node keeps a connection whose peer has sent everything"
                    )
                case "cut":
                    self.write(self.chance.choice(PRINTED)[: self.chance.randrange(1, 30)])
                case "reset":
                    self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def _still_answered(self) -> None:
        """A peer that sent only whole packets is answered, or its connection was closed."""
        self.write(packet(Opcode.NOOP, opaque=0xFEED))
        self._until(lambda: self.closed or 0xFEED in self.answered, "a NOOP was not answered")

    def _until(self, done: Callable[[], bool], otherwise: str) -> None:
        while not done():
            assert self.read_some(20.0) or self.closed, otherwise

    # ── Words ─────────────────────────────────────────────────────────────────────────────────────

    def _damaged(self, data: bytes) -> bytes:
        if self.chance.random() >= self.damage:
            return data
        spoiled = bytearray(data)
        for _ in range(self.chance.randrange(1, 4)):
            spoiled[self.chance.randrange(len(spoiled))] = self.chance.choice((0, 1, 0x7F, 0x80, 0xFF))
        if self.chance.random() < 0.2:
            del spoiled[self.chance.randrange(len(spoiled)) :]
        if len(spoiled) >= 24 and self.chance.random() < 0.7:
            # So that more than the header is looked at.
            spoiled[8:12] = (len(spoiled) - 24).to_bytes(4, "big")
        return bytes(spoiled)

    def _number(self, known: list[int]) -> int:
        return int(self.chance.choice((0, 0, *known, self.chance.choice(ODD))))

    def _where(self) -> int:
        return int(self.chance.choice((*(0, 1, 2, 3) * 10, *range(18), 0xFFFF)))

    def _name(self) -> bytes:
        return self.chance.choice(KEYS)

    def _kv(self) -> bytes:
        """Any command of the table with a body that its row allows."""
        chance = self.chance
        opcode = chance.choice((*COMMON * 6, *TABLE))
        if opcode in DRASTIC and chance.random() < 0.8:
            opcode = chance.choice(COMMON)  # else there is soon nothing left to follow
        row = TABLE[opcode]
        extras = self._extras(opcode, chance.choice(row.shape.extras))
        key = b"" if row.shape.key is False else self._key(opcode)
        value = b"" if row.shape.value is False else self._value(opcode)
        return packet(
            opcode,
            extras=extras,
            key=key,
            value=value,
            partition=self._where(),
            opaque=chance.getrandbits(16),
            cas=chance.choice((0, 0, *self._cas, *ODD)),
            data_type=chance.choice((0, 0, 0, 1, 2)) if opcode != 1 else 0,
        )

    def _extras(self, opcode: int, size: int) -> bytes:
        if opcode in (Opcode.FLUSH, Opcode.FLUSHQ):
            return bytes(size)  # a flush that comes later would remove the checked key
        if size >= 24:  # with meta
            numbers = (self._number([1]) % 2**32, self._number([1]) % 2**32)
            theirs = (self._number([5]), self._number(self._cas))
            return struct.pack(">IIQQ", *numbers, *theirs) + bytes(size - 24)
        if opcode == Opcode.SET_VBUCKET_STATE:
            return self.chance.choice((1, 1, 1, 2, 3, 4, 5)).to_bytes(size, "big")
        small = bytes(size - 1) + b"\2" if size else b""
        return self.chance.choice((bytes(size), self.chance.randbytes(size), small))

    def _key(self, opcode: int) -> bytes:
        match opcode:
            case Opcode.STAT:
                return self.chance.choice((b"", *map(str.encode, GROUPS))) + self.chance.choice(
                    (b"", b" 1", b" 99999", "\u00b2".join("  ").encode(), b" " + b"9" * 200, b" \xff")
                )
            case Opcode.SASL_AUTH | Opcode.SASL_STEP:
                return self.chance.choice((b"PLAIN", *map(str.encode, HASHES), b"CRAM"))
            case Opcode.SELECT_BUCKET:
                return self.chance.choice((b"default", b"other"))
        return self._name()

    def _value(self, opcode: int) -> bytes:
        chance = self.chance
        match opcode:
            case Opcode.SASL_AUTH | Opcode.SASL_STEP:
                proof = b"c=biws,r=abc,p=" + base64.b64encode(bytes(32))
                words = (b"n,,n=boss,r=abc", b"n,,n=\xff,r=", proof, b"p=x,,", b"=,=,=")
                return chance.choice((*words, b"\0a\0b", b"\0\xff\0\xff"))
            case Opcode.SET_VBUCKET_STATE if chance.random() < 0.3:
                return json.dumps({"promote": True, "to": self._number(self._seqno)}).encode()
            case Opcode.SET_VBUCKET_STATE | Opcode.DELETE_VBUCKET:
                return chance.choice((b"", b"", b"{}", b'{"promote": true}', b"[" * 9000))
            case Opcode.OBSERVE:
                return struct.pack(">HH", self._where(), 2) + chance.choice((b"k1", b"k", b"k1k2"))
            case Opcode.OBSERVE_SEQNO:
                return self._number(self._branch).to_bytes(8, "big")
            case Opcode.HELLO:
                return struct.pack(">4H", *(chance.randrange(0x14) for _ in range(4)))
        return chance.choice(VALUES)

    def _upr(self) -> bytes:
        chance = self.chance
        self._opaque = chance.randrange(6)
        match chance.randrange(10):
            case 0 | 1 | 2:
                flags = chance.choice((0, 1, 1, 4, 8, 9, 0x10, 0x12, 2, 0x20, 0x28, 64))
                start = self._number(self._seqno)
                end = chance.choice((2**64 - 1, 2**64 - 1, start + 3, self._number(self._seqno))) % 2**64
                extras = struct.pack(">IIQQQQ", flags, 0, start, end, self._number(self._branch), 0)
                return packet(0x50, extras=extras, partition=self._where(), opaque=self._opaque)
            case 3:
                return packet(0x51, partition=self._where(), opaque=self._opaque)
            case 4:
                reason = chance.choice((b"", bytes(4), b"xx"))
                return packet(0x53, extras=reason, partition=self._where(), opaque=self._opaque)
            case 5 | 6:
                name = chance.choice((*map(str.encode, SETTINGS), b"?"))
                return packet(0x5E, key=name, value=chance.choice(TEXTS))
            case 7:
                size = chance.choice((1, 64, 1000, 0, 2**32 - 1))
                return packet(0x5D, extras=size.to_bytes(4, "big"))
            case 8:
                return packet(0x5C, magic=chance.choice((0x80, 0x81)))
        return self._kv()

    def _upr0(self) -> bytes:
        chance = self.chance
        if chance.random() < 0.3:
            return self._kv()
        where, opaque = self._where(), chance.randrange(6)
        if chance.random() < 0.3:
            return packet(0x01, data_type=2, partition=where, opaque=opaque)
        start = self._number(self._seqno)
        end = chance.choice((2**64 - 1, start + 9)) % 2**64
        extras = struct.pack(">QQQQ", start, end, self._number(self._branch), 0)
        extras = chance.choice((b"", bytes(8))) + extras
        return packet(0x01, data_type=1, extras=extras, partition=where, opaque=opaque)

    def _tap(self) -> bytes:
        chance = self.chance
        match chance.randrange(8):
            case 0 | 1:
                flags, values = chance.randrange(64), b""
                if flags & 1:
                    values += self._number([1]).to_bytes(8, "big")
                if flags & 4:
                    chosen = [self._where() for _ in range(chance.randrange(4))]
                    values += struct.pack(f">H{len(chosen)}H", len(chosen), *chosen)
                name = chance.choice((b"", b"node1", b"node2", b"\xff\xfe"))
                return packet(0x40, extras=flags.to_bytes(4, "big"), key=name, value=values)
            case 2 | 3 | 4:
                status = chance.choice((0, 0, 0, 0, 0x86))
                return packet(0x41, magic=0x81, partition=status, opaque=chance.choice((*self._asked, 7)))
        return self._kv()

    def _anything(self) -> bytes:
        chance = self.chance
        match chance.randrange(6):
            case 0:
                return chance.randbytes(chance.randrange(1, 200))
            case 1:
                return chance.choice(PRINTED)
            case 2:
                body = [chance.randbytes(chance.choice((0, 0, 4, 8, 20, 32, 40))) for _ in range(3)]
                return packet(
                    chance.randrange(256),
                    extras=body[0],
                    key=body[1],
                    value=body[2],
                    partition=self._where(),
                    data_type=chance.choice((0, 0, 1, 2, 255)),
                    magic=chance.choice((0x80, 0x80, 0x81)),
                )
        return chance.choice((self._kv, self._upr, self._upr0, self._tap))()

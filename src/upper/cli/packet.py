"""Decode packets: every field with its offset, in the format of the specifications.

The packets are hexadecimal, in one or several arguments; spaces, colons and 0x are allowed. `-` reads them
from standard input. Without --dialect the opcodes decide, as on a connection.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from upper.cli.output import ExitCode, Output
from upper.errors import ProtocolError

EXAMPLES = """
upper packet 805100000000000000000000deadbeef0000000000000000
upper packet --dialect tap --json 8040000500000000000000050000000000000000000000006e6f646531
xxd -p capture.bin | upper packet -
"""

SEPARATORS = str.maketrans("", "", " \t\r\n\f\v:,_")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("hex", nargs="+", metavar="HEX", help="packets in hex, or - for standard input")
    parser.add_argument(
        "--dialect",
        choices=("upr", "upr0", "tap", "dcp", "kv"),
        help="the dialect of the packets (from the packets)",
    )


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.wire.session import DIALECTS
    from upper.wire.show import decoded_packets

    given = (sys.stdin.read() if part == "-" else part for part in args.hex)
    data = parse_hex(" ".join(given))
    if not data:
        raise ProtocolError("no packet is given; write one in hex", at=0)
    for number, decoded in enumerate(decoded_packets(data, DIALECTS[args.dialect] if args.dialect else None)):
        text = decoded.table()
        out.show(decoded.record(), text=f"\n{text}" if number else text)
    return ExitCode.OK


def parse_hex(text: str) -> bytes:
    """Parse hex digits with separators."""
    digits = text.replace("0x", " ").replace("0X", " ").translate(SEPARATORS)
    for at, digit in enumerate(digits):
        if digit not in "0123456789abcdefABCDEF":
            raise ProtocolError(f"{digit!r} is not a hex digit", at=at // 2)
    if len(digits) % 2:
        raise ProtocolError("the number of hex digits is odd; add the missing one", at=len(digits) // 2)
    return bytes.fromhex(digits)

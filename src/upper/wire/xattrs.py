"""Extended attributes in front of a value, as Couchbase sends them with data type 0x04.

The length of all attributes, then for each: its own length, the name, a zero byte, the value as JSON, and a
zero byte. The document follows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from upper.errors import BadLength
from upper.record.layout import U32


def split(value: bytes) -> tuple[dict[str, bytes], bytes]:
    """The attributes by name, their values as JSON, and the document."""
    size = _number(value, 0)
    end, at = U32.size + size, U32.size
    if end > len(value):
        raise BadLength(f"{size} bytes of extended attributes do not fit a value of {len(value)}", at=0)
    found: dict[str, bytes] = {}
    while at < end:
        length = _number(value, at)
        at += U32.size
        name, zero, content = value[at : at + length].partition(b"\0")
        if at + length > end or not zero or not content.endswith(b"\0"):
            raise BadLength("an extended attribute is not a name and a value with zero bytes behind", at=at)
        found[name.decode(errors="replace")] = content[:-1]
        at += length
    return found, value[end:]


def as_json(attributes: Mapping[str, bytes]) -> str:
    """The attributes as one JSON object.

    Couchbase stores JSON only, which is kept as received. Any other bytes become a JSON string.
    """
    pairs = (f"{json.dumps(name)}:{_content(content)}" for name, content in attributes.items())
    return "{" + ",".join(pairs) + "}"


def _content(content: bytes) -> str:
    try:
        text = content.decode()
        json.loads(text, parse_constant=_reject)
    except (ValueError, RecursionError):
        return json.dumps(content.decode(errors="replace"))
    return text


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _number(value: bytes, at: int) -> int:
    if at + U32.size > len(value):
        raise BadLength("the extended attributes of a value end inside a length", at=at)
    number: int = U32.unpack_from(value, at)[0]
    return number

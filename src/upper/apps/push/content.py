"""Keys and values of a bucket as JSON. Pure.

A JSON value is passed on as its own text, so that numbers and escapes stay as they are. Records and documents
are joined from texts: a dictionary for each, given to `json`, takes three times as long.
"""

from __future__ import annotations

import json
from base64 import b64encode
from json.encoder import encode_basestring
from typing import Any, NamedTuple

STARTS = frozenset('{["-0123456789tfn \t\r\n')  # first characters of JSON


class JsonField(NamedTuple):
    """A value as one field of JSON."""

    field: str  # "value" for JSON, "text" for other text, "base64" for bytes
    text: str  # the value of the field, as JSON in one line
    parsed: Any = None  # the value, if it was JSON


def content(value: bytes) -> JsonField:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return JsonField("base64", base64(value))
    if text and text[0] not in STARTS:  # avoids an exception, which costs more than parsing most values
        return JsonField("text", quoted(text))
    try:
        parsed = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return JsonField("text", quoted(text))
    # In JSON, line breaks occur only outside of strings.
    return JsonField("value", text.strip().replace("\r", " ").replace("\n", " "), parsed)


def base64(data: bytes) -> str:
    """Bytes as JSON text."""
    return f'"{b64encode(data).decode()}"'


def key_text(key: bytes) -> str:
    """A key as JSON: text, or an object with what is not UTF-8."""
    try:
        return quoted(key.decode())
    except UnicodeDecodeError:
        return f'{{"base64":{base64(key)}}}'


def packed(value: Any) -> bytes:
    """JSON in one line."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
quoted = encode_basestring  # text as JSON: the part of `json.dumps` that is needed

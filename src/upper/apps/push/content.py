"""Keys and values of a bucket as JSON. Pure."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any


def as_base64(data: bytes) -> dict[str, str]:
    return {"base64": b64encode(data).decode()}


def content(value: bytes) -> dict[str, Any]:
    """A JSON value as `value`; other text as `text`, and bytes as `base64`."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return as_base64(value)
    try:
        return {"value": json.loads(text, parse_constant=_no_constant)}
    except (ValueError, RecursionError):
        return {"text": text}


def packed(value: Any) -> bytes:
    """JSON in one line."""
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON has it as an escape only
        return json.dumps(value, separators=(",", ":")).encode()


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")

"""Import rows into a bucket: check each, write the good ones in portions, give the bad ones to the caller.

A row that the node refuses is bad too: a portion that fails is written again, one row at a time. Everything
else is written, and writing a file a second time leaves the same items. `imported_lake` writes to a lake.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from upper.apps.transfer.formats import BITS, RawRow
from upper.client.bucket import Bucket
from upper.client.calls import MAX_KEY, Copy
from upper.errors import NotMyPartition, Refused, TemporaryFailure
from upper.model.values import Cas

PORTION = 4096  # rows that are written together
WHOLE = "."  # the value is the whole row, as JSON


@dataclass(frozen=True)
class ImportOptions:
    key: str = "key"  # the field with the key
    value: str = "value"  # the field with the value, or `.` for the whole row
    prefix: bytes = b""  # put before every key
    metadata: bool = False  # keep CAS and revision


@dataclass(frozen=True)
class BadRow:
    line: int
    error: str
    row: str


@dataclass
class Imported:
    """What was written."""

    rows: int = 0
    written: int = 0
    bad: int = 0
    expired: int = 0  # their time to live has passed; not written
    present: int = 0  # of a lake: an earlier run of the same import has committed them
    commits: int = 0  # of a lake


class RowError(ValueError):
    """What is wrong with a row."""


def import_rows(
    bucket: Bucket,
    rows: Iterable[RawRow],
    options: ImportOptions,
    *,
    reject: Callable[[BadRow], None],
    progress: Callable[[int], None] = lambda count: None,
    done: Imported | None = None,
) -> Imported:
    """Write the rows to the bucket. `reject` receives each bad row; `done` counts, also where this fails."""
    done = Imported() if done is None else done
    source = iter(rows)
    while portion := list(islice(source, PORTION)):
        good: list[tuple[RawRow, Copy]] = []
        now = time.time()
        for row in portion:
            item = checked(row, options, done, reject)
            if isinstance(item, Copy) and not expired(item, now, done):
                good.append((row, item))
        _write(bucket, good, options, done, reject)
        progress(len(portion))
    return done


def checked(
    row: RawRow,
    options: ImportOptions,
    done: Imported,
    reject: Callable[[BadRow], None],
    *,
    check: Callable[[Copy], None] = lambda item: None,
) -> Copy | str:
    """The item of a row, counted; or what is wrong with it. `check` raises RowError as well."""
    done.rows += 1
    try:
        item = item_of(row, options)
        check(item)
    except RowError as error:
        _reject(row, str(error), done, reject)
        return str(error)
    return item


def expired(item: Copy, now: float, done: Imported) -> bool:
    """Whether the time to live of an item has passed, counted."""
    past = 0 < item.expiration <= now
    done.expired += past
    return past


def _reject(row: RawRow, error: str, done: Imported, reject: Callable[[BadRow], None]) -> None:
    done.bad += 1
    text = row.text or json.dumps(row.fields, default=_shown)
    reject(BadRow(row.line, error, text))


def _shown(value: object) -> object:
    return {"hex": value.hex()} if isinstance(value, bytes) else str(value)


def _write(
    bucket: Bucket,
    rows: list[tuple[RawRow, Copy]],
    options: ImportOptions,
    done: Imported,
    reject: Callable[[BadRow], None],
) -> None:
    try:
        _write_items(bucket, (item for _, item in rows), options)
        done.written += len(rows)
    except (NotMyPartition, TemporaryFailure):
        raise
    except Refused as error:
        if len(rows) == 1:
            _reject(rows[0][0], str(error), done, reject)
            return
        for row in rows:
            _write(bucket, [row], options, done, reject)


def _write_items(bucket: Bucket, items: Iterable[Copy], options: ImportOptions) -> None:
    if options.metadata:
        bucket.copy_many(items, force=True)
        return
    now = int(time.time())
    kinds: dict[tuple[int, int], list[tuple[bytes, bytes]]] = {}
    for item in _last(items):
        expiry = max(1, item.expiration - now) if item.expiration else 0
        kinds.setdefault((expiry, item.flags), []).append((item.key, item.value or b""))
    for (expiry, flags), pairs in kinds.items():
        bucket.set_many(pairs, expiry=expiry, flags=flags)


def _last(items: Iterable[Copy]) -> Iterator[Copy]:
    """The last item of each key: writes of different kinds have no order between them."""
    yield from {item.key: item for item in items}.values()


def item_of(row: RawRow, options: ImportOptions) -> Copy:
    """The item of a row; raises RowError with what is wrong."""
    fields = row.fields
    if fields is None:
        raise RowError(row.error)
    encoding = fields.get("encoding") or "text"
    if encoding not in ("text", "hex"):
        raise RowError(f"encoding is {encoding!r}; it is text or hex")
    key = options.prefix + _bytes(options.key, fields.get(options.key), encoding, text_only=True)
    if not 0 < len(key) <= MAX_KEY:
        raise RowError(f"the key has {len(key)} bytes; a key has 1 to {MAX_KEY}")
    if options.value == WHOLE:
        value = json.dumps(fields, default=_shown, ensure_ascii=False, separators=(",", ":")).encode()
    else:
        value = _bytes(options.value, fields.get(options.value), encoding)
    numbers = {name: _number(name, fields.get(name), bits) for name, bits in BITS.items()}
    if options.metadata and not (numbers["cas"] and numbers["revision"]):
        raise RowError("it has no cas and revision, which --metadata keeps")
    return Copy(
        key=key,
        value=value,
        revision=numbers["revision"],
        cas=Cas(numbers["cas"]),
        flags=numbers["flags"],
        expiration=numbers["expiration"],
        data_type=numbers["data_type"] if options.metadata else 0,
    )


def _bytes(name: str, value: Any, encoding: str, *, text_only: bool = False) -> bytes:
    if value is None:
        raise RowError(f"it has no field {name!r}")
    if isinstance(value, bytes):
        return value
    if isinstance(value, Mapping) and set(value) == {"hex"} and isinstance(value["hex"], str):
        value, encoding = value["hex"], "hex"
    if isinstance(value, str):
        try:
            return bytes.fromhex(value) if encoding == "hex" else value.encode()
        except ValueError:
            raise RowError(f"the field {name!r} is not hexadecimal or not UTF-8") from None
    if text_only and not isinstance(value, int):
        raise RowError(f"the field {name!r} is {type(value).__name__}, not text")
    return json.dumps(value, default=_shown, ensure_ascii=False, separators=(",", ":")).encode()


def _number(name: str, value: Any, bits: int) -> int:
    if value is None or value == "":
        return 0
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise RowError(f"the field {name!r} is {value!r}, not a whole number") from None
    if isinstance(value, float) or not 0 <= number < 1 << bits:
        raise RowError(f"the field {name!r} is {value!r}; it is a whole number from 0 to 2^{bits} - 1")
    return number

"""The options of the source and the sink, read once and refused clearly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from upper.errors import InvalidArguments
from upper.spark.columns import DELETION, EXPIRATION, MUTATION, OPERATIONS, Form, Shape
from upper.spark.feed import BucketFeed, Filters
from upper.spark.offsets import Offset

BEGINNING, NOW = ("beginning", "earliest"), ("now", "latest")
BYTES_A_ROW = 256  # what a row is taken for when bytes are limited and no node says how large items are


@dataclass(frozen=True)
class SourceOptions:
    """What `.option(...)` says to the source. docs/guide/spark.md has the same table."""

    url: str
    start: str | Offset = "beginning"
    end: str | Offset = "now"
    partitions: frozenset[int] | None = None
    filters: Filters = Filters()  # noqa: RUF009 (frozen)
    operations: frozenset[str] | None = None
    shape: Shape = Shape()  # noqa: RUF009 (frozen)
    most_rows: int | None = None
    most_bytes: int | None = None
    fail_on_rollback: bool = False
    slices: int | None = None
    patience: float = 60.0

    @classmethod
    def read(cls, options: Mapping[str, str]) -> SourceOptions:
        given = {name.lower(): value for name, value in options.items()}
        known = {name.lower() for name in KNOWN}
        if unknown := sorted(set(given) - known - {"path", "checkpointlocation"}):
            raise InvalidArguments(f"the source has no option {unknown[0]!r}; it has {', '.join(KNOWN)}")
        if not (url := given.get("url")):
            raise InvalidArguments("the source needs the option url, such as upr://127.0.0.1:11210/default")
        operations = _operations(given.get("operations"))
        changes = None
        if operations is not None:
            # Flushes and rollbacks are no changes of items: the node has no filter for them.
            changes = tuple(one for one in (MUTATION, DELETION, EXPIRATION) if one in operations)
            if not changes:
                raise InvalidArguments("operations must name mutation, deletion or expiration at least")
        return cls(
            url=url,
            start=_place(given, "startingOffsets", "start", default="beginning"),
            end=_place(given, "endingOffsets", "end", default="now"),
            partitions=_partitions(given.get("partitions")),
            filters=Filters(
                keys_only=_flag(given, "keysOnly"), key_prefix=given.get("keyprefix"), operations=changes
            ),
            operations=operations,
            shape=Shape(
                key=cast(Form, given.get("keytype", "binary")),
                value=cast(Form, given.get("valuetype", "binary")),
                key_schema=given.get("keyschema", ""),
                value_schema=given.get("valueschema", ""),
            ),
            most_rows=_number(given, "maxRowsPerBatch"),
            most_bytes=_number(given, "maxBytesPerBatch"),
            fail_on_rollback=_flag(given, "failOnRollback"),
            slices=_number(given, "slices"),
            patience=_seconds(given, "patience", default=60.0),
        )

    def feed(self) -> BucketFeed:
        return BucketFeed(self.url, filters=self.filters, patience=self.patience)


KNOWN = (
    "url", "startingOffsets", "endingOffsets", "start", "end", "partitions", "keysOnly", "keyPrefix",
    "operations", "keyType", "valueType", "keySchema", "valueSchema", "maxRowsPerBatch",
    "maxBytesPerBatch", "failOnRollback", "slices", "patience",
)  # fmt: skip


def _place(given: Mapping[str, str], *names: str, default: str) -> str | Offset:
    for name in names:
        text = given.get(name.lower())
        if text is None:
            continue
        if text in BEGINNING:
            return "beginning"
        if text in NOW:
            return "now"
        return Offset.from_json(text)
    return default


def _partitions(text: str | None) -> frozenset[int] | None:
    if not text:
        return None
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        try:
            found.update(range(int(first), int(last or first) + 1))
        except ValueError:
            raise InvalidArguments(f"partitions is {text!r}; write it as 0-15,99") from None
    return frozenset(found)


def _operations(text: str | None) -> frozenset[str] | None:
    if not text:
        return None
    named = frozenset(part.strip() for part in text.split(","))
    if not named <= set(OPERATIONS):
        raise InvalidArguments(f"operations is {text!r}; it names some of {', '.join(OPERATIONS)}")
    return named


def _flag(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name.lower(), "false").lower()
    if text not in ("true", "false"):
        raise InvalidArguments(f"{name} is {text!r}; it is true or false")
    return text == "true"


def _number(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name.lower())
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise InvalidArguments(f"{name} is {text!r}; it is a number from 1 up")
    return int(text)


def _seconds(given: Mapping[str, str], name: str, *, default: float) -> float:
    text = given.get(name.lower())
    try:
        seconds = default if text is None else float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidArguments(f"{name} is {text!r}; it is a number of seconds")
    return seconds

"""The options of the source, read once. An unknown option or a bad value raises an error that names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import cast

from upper.errors import InvalidArguments
from upper.pipeline.changes import DELETION, EXPIRATION, FLUSH, MUTATION, OPERATIONS
from upper.pipeline.source import BucketSource, Filters
from upper.spark.columns import Form, ValueForms
from upper.spark.offsets import Offset

BEGINNING, NOW = ("beginning", "earliest"), ("now", "latest")
BYTES_A_ROW = 256  # bytes that a row counts for when bytes are limited and no node reports the size of items


@dataclass(frozen=True)
class SourceOptions:
    """The options of the source. docs/guide/spark.md has the same table."""

    url: str
    start: str | Offset = "beginning"
    end: str | Offset = "now"
    since: datetime | None = None  # rows that changed before are left out
    partitions: frozenset[int] | None = None
    filters: Filters = Filters()  # noqa: RUF009 (frozen)
    shape: ValueForms = ValueForms()  # noqa: RUF009 (frozen)
    most_rows: int | None = None
    most_bytes: int | None = None
    fail_on_rollback: bool = False
    new_history: bool = False
    name: str = ""  # of the consumer, as the node lists it
    slices: int | None = None
    patience: float = 60.0

    @classmethod
    def read(cls, options: Mapping[str, str]) -> SourceOptions:
        given = known_options(options, "source", KNOWN)
        since = _moment(given.get("startingtimestamp"))
        if since is not None and {"startingoffsets", "start"} & given.keys():
            raise InvalidArguments("startingOffsets and startingTimestamp exclude each other; give one")
        return cls(
            url=given["url"],
            start=_place(given, "startingOffsets", "start", default="beginning"),
            end=_place(given, "endingOffsets", "end", default="now"),
            since=since,
            partitions=_partitions(given.get("partitions")),
            filters=Filters(
                keys_only=_flag(given, "keysOnly"),
                key_prefix=given.get("keyprefix"),
                key_pattern=given.get("keypattern"),
                value_filter=given.get("valuefilter"),
                filter_mode=given.get("filtermode"),
                operations=_operations(given.get("operations")),
            ),
            shape=ValueForms(
                key=cast(Form, given.get("keytype", "binary")),
                value=cast(Form, given.get("valuetype", "binary")),
                key_schema=given.get("keyschema", ""),
                value_schema=given.get("valueschema", ""),
            ),
            most_rows=_number(given, "maxRowsPerBatch"),
            most_bytes=_number(given, "maxBytesPerBatch"),
            fail_on_rollback=_flag(given, "failOnRollback"),
            new_history=_flag(given, "newHistory"),
            name=given.get("name", ""),
            slices=_number(given, "slices"),
            patience=_seconds(given, "patience", default=60.0),
        )

    def source(self) -> BucketSource:
        return BucketSource(
            self.url, filters=self.filters, patience=self.patience, name=self.name or "upper-spark"
        )

    def narrowed(
        self,
        *,
        partitions: frozenset[int] | None = None,
        key_prefix: str | bytes | None = None,
        operations: frozenset[str] | None = None,
    ) -> SourceOptions:
        """With filters that Spark pushes down, besides those of the options."""
        filters = self.filters
        if partitions is not None and self.partitions is not None:
            partitions &= self.partitions
        if key_prefix is not None and filters.key_prefix is None:
            filters = replace(filters, key_prefix=key_prefix)
        if operations is not None:
            wanted = filters.operations or (MUTATION, DELETION, EXPIRATION, FLUSH)
            both = tuple(one for one in wanted if one in operations)
            if not operations.isdisjoint(CHANGES) and not set(both).isdisjoint(CHANGES):
                filters = replace(filters, operations=both)
        return replace(
            self, partitions=self.partitions if partitions is None else partitions, filters=filters
        )


KNOWN = (
    "url", "startingOffsets", "endingOffsets", "start", "end", "startingTimestamp", "partitions", "keysOnly",
    "keyPrefix", "keyPattern", "valueFilter", "filterMode", "operations", "keyType", "valueType", "keySchema",
    "valueSchema", "maxRowsPerBatch", "maxBytesPerBatch", "failOnRollback", "newHistory", "name", "slices",
    "patience",
)  # fmt: skip
CHANGES = (MUTATION, DELETION, EXPIRATION)
SPARKS_OWN = {"path", "checkpointlocation", "queryname"}  # options that Spark passes on


def known_options(options: Mapping[str, str], side: str, known: Sequence[str]) -> dict[str, str]:
    """The options by lower-case name; an unknown one is an error, and so is a missing url."""
    given = {name.lower(): value for name, value in options.items()}
    if unknown := sorted(set(given) - {name.lower() for name in known} - SPARKS_OWN):
        near = get_close_matches(unknown[0], known, 1)
        meant = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
        raise InvalidArguments(f"the {side} has no option {unknown[0]!r}; {meant}")
    if not given.get("url"):
        raise InvalidArguments(f"the {side} needs the option url, such as upr://127.0.0.1:11210/default")
    return given


def _moment(text: str | None) -> datetime | None:
    """ISO 8601, in UTC where it names no zone; or milliseconds since 1970, as in Spark's own sources."""
    if text is None:
        return None
    try:
        if text.isascii() and text.isdigit():
            return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=int(text))
        at = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise InvalidArguments(
            f"startingTimestamp is {text!r}; write it as 2026-01-31T12:00:00Z, or as milliseconds since 1970"
        ) from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


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


def _operations(text: str | None) -> tuple[str, ...] | None:
    if not text:
        return None
    named = {part.strip() for part in text.split(",")}
    if not named <= set(OPERATIONS):
        raise InvalidArguments(f"operations is {text!r}; it names some of {', '.join(OPERATIONS)}")
    if named.isdisjoint(CHANGES):
        raise InvalidArguments("operations must name mutation, deletion or expiration at least")
    # Rollback rows always come: a query that does not see them would keep rows that are no longer true.
    return tuple(one for one in (MUTATION, DELETION, EXPIRATION, FLUSH) if one in named)


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

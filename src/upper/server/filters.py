"""What a stream leaves out: by key, by value, by operation, and values altogether.

A filter is compiled once, when the consumer sets it, and then judges records: the packets that are stored
and sent. What it cannot judge, it lets through: a deletion has no value, so a filter on values never hides
one, and a flush is always sent because it moves the consumer. Patterns are RE2's: matched in time linear in
the key, whoever wrote them.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from upper.errors import InvalidArguments, NotSupported

Judge = Callable[[bytes], bool]

MUTATION, DELETION, EXPIRATION = 0x56, 0x57, 0x58
OPERATIONS: Mapping[str, int] = {"mutation": MUTATION, "deletion": DELETION, "expiration": EXPIRATION}


@dataclass(frozen=True)
class Filter:
    """What the streams of a connection carry. An empty one lets everything through, and costs nothing."""

    prefix: bytes = b""
    pattern: str = ""
    value: str = ""
    operations: frozenset[str] = frozenset(OPERATIONS)
    keys_only: bool = False
    judges: tuple[Judge, ...] = ()

    @property
    def everything(self) -> bool:
        return not self.judges and not self.keys_only

    def with_prefix(self, prefix: bytes) -> Filter:
        return replace(self, prefix=prefix)._judged()

    def with_pattern(self, pattern: str) -> Filter:
        return replace(self, pattern=pattern)._judged()

    def with_value(self, comparison: str) -> Filter:
        return replace(self, value=comparison)._judged()

    def with_operations(self, text: str) -> Filter:
        names = frozenset(name.strip() for name in text.split(",") if name.strip())
        if unknown := names - set(OPERATIONS):
            raise InvalidArguments(
                f"there is no operation {min(unknown)!r}; there are {', '.join(OPERATIONS)}"
            )
        return replace(self, operations=names or frozenset(OPERATIONS))._judged()

    def with_keys_only(self) -> Filter:
        return replace(self, keys_only=True)

    def __call__(self, records: Sequence[bytes]) -> list[bytes]:
        """The records that pass, as they are to be sent."""
        judges = self.judges
        passed = [
            record for record in records if record[1] not in _JUDGED or all(judge(record) for judge in judges)
        ]
        return [without_value(record) for record in passed] if self.keys_only else passed

    def __str__(self) -> str:
        parts = [
            *([f"prefix {self.prefix.decode(errors='replace')}"] if self.prefix else []),
            *([f"pattern {self.pattern}"] if self.pattern else []),
            *([f"value {self.value}"] if self.value else []),
            *([",".join(sorted(self.operations))] if len(self.operations) < len(OPERATIONS) else []),
            *(["keys only"] if self.keys_only else []),
        ]
        return "; ".join(parts)

    def _judged(self) -> Filter:
        judges: list[Judge] = []
        if len(self.operations) < len(OPERATIONS):
            judges.append(_by_operation(self.operations))
        if self.prefix:
            judges.append(_by_prefix(self.prefix))
        if self.pattern:
            judges.append(_by_pattern(self.pattern))
        if self.value:
            judges.append(_by_value(self.value))
        return replace(self, judges=tuple(judges))


EVERYTHING = Filter()
_JUDGED = frozenset(OPERATIONS.values())


def without_value(record: bytes) -> bytes:
    """A mutation without its value; any other record as it is."""
    if record[1] != MUTATION:
        return record
    kept = record[4] + int.from_bytes(record[2:4], "big")
    # The data type describes the value, and goes with it.
    return b"".join((record[:5], b"\0", record[6:8], kept.to_bytes(4, "big"), record[12 : 24 + kept]))


def key_of(record: bytes) -> bytes:
    start = 24 + record[4]
    return record[start : start + (record[2] << 8 | record[3])]


def _by_operation(names: frozenset[str]) -> Judge:
    codes = frozenset(OPERATIONS[name] for name in names)
    return lambda record: record[1] in codes


def _by_prefix(prefix: bytes) -> Judge:
    return lambda record: record.startswith(prefix, 24 + record[4])


def _by_pattern(pattern: str) -> Judge:
    try:
        import re2
    except ImportError:
        raise NotSupported("key patterns need google-re2; install it, or use filter.key.prefix") from None
    try:
        options = re2.Options()
        options.log_errors = False
        options.encoding = re2.Options.Encoding.LATIN1  # keys are bytes, and need not be UTF-8
        search = re2.compile(pattern.encode(), options=options).search
    except re2.error as error:
        raise InvalidArguments(f"the key pattern is not a regular expression of RE2: {error}") from None
    return lambda record: search(key_of(record)) is not None


# ── Values: a JSON path compared with a JSON literal ──────────────────────────────────────────────

_COMPARISON = re.compile(
    r"\s*(\$(?:\.[A-Za-z_][\w-]*|\[\d+\]|\[\"[^\"]*\"\])*)\s*(==|!=|<=|>=|<|>)(.+)", re.S
)
_STEP = re.compile(r"\.([A-Za-z_][\w-]*)|\[(\d+)\]|\[\"([^\"]*)\"\]")
_ORDER: Mapping[str, Callable[[object, object], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,  # type: ignore[dict-item]
    "<=": operator.le,  # type: ignore[dict-item]
    ">": operator.gt,  # type: ignore[dict-item]
    ">=": operator.ge,  # type: ignore[dict-item]
}


def _by_value(comparison: str) -> Judge:
    match = _COMPARISON.fullmatch(comparison)
    if match is None:
        raise InvalidArguments(
            'a value filter is a JSON path, a comparison and a literal, such as $.type == "order"'
        )
    try:
        literal = json.loads(match[3])
    except (ValueError, RecursionError):
        raise InvalidArguments(
            f"{match[3].strip()[:80]!r} is not a JSON literal; text needs double quotes"
        ) from None
    path = [int(number) if number else name or quoted for name, number, quoted in _STEP.findall(match[1])]
    compare = _ORDER[match[2]]

    def judge(record: bytes) -> bool:
        if record[1] != MUTATION:
            return True
        start = 24 + record[4] + (record[2] << 8 | record[3])
        try:
            found = _walk(json.loads(record[start:]), path)
            return _comparable(found, literal) and compare(found, literal)
        except (ValueError, LookupError, RecursionError, TypeError):
            return False  # no JSON, no such place in it, or lists of things that have no order

    return judge


def _walk(value: object, path: Sequence[str | int]) -> object:
    for step in path:
        match step, value:
            case int(), list():
                value = value[step]
            case str(), dict():
                value = value[step]
            case _:
                raise LookupError(step)
    return value


def _comparable(found: object, literal: object) -> bool:
    """Numbers compare with numbers, text with text; another kind matches nothing, "!=" included."""
    if isinstance(found, bool) or isinstance(literal, bool):
        return isinstance(found, bool) and isinstance(literal, bool)
    if isinstance(found, (int, float)) and isinstance(literal, (int, float)):
        return True
    return (
        type(found) is type(literal) and not isinstance(found, (dict, type(None)))
    ) or found is literal is None

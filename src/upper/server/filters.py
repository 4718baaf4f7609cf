"""What a stream carries: filters by key, by operation and by value, and keys without values.

A filter is compiled once, when the consumer sets it, and then applied to records. A filter by value describes
a view: a mutation that does not match is sent as a deletion with its seqno, because the version before it may
have matched. In mode `events` it is left out. A deletion has no value and passes; a flush is always sent,
because it moves the consumer. Patterns are RE2's, which match in time linear in the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from upper.errors import InvalidArguments, NotSupported
from upper.record import layout
from upper.record.change import deletion, key_of, meta_of, partition_of_record, without_value
from upper.record.layout import AT_OPCODE, MUTATION
from upper.server.value_filter import ValueCondition, value_condition

Judge = Callable[[bytes], bool]

VIEW, EVENTS = "view", "events"

OPERATIONS: Mapping[str, int] = {name: layout.MUTATION + at for at, name in enumerate(layout.OPERATIONS)}


@dataclass(frozen=True)
class Filter:
    """What the streams of a connection carry. An empty one passes everything, and costs nothing."""

    prefix: bytes = b""
    pattern: str = ""
    value: str = ""
    operations: frozenset[str] = frozenset(OPERATIONS)
    keys_only: bool = False
    mode: str = VIEW  # of the filter by value
    judges: tuple[Judge, ...] = ()
    matches: Callable[[bytes], object] | None = None  # of the pattern, for a key
    condition: ValueCondition | None = None

    @property
    def everything(self) -> bool:
        return self.complete and not self.keys_only

    @property
    def complete(self) -> bool:
        """True if no change is left out."""
        return not self.judges and self.condition is None

    def with_prefix(self, prefix: bytes) -> Filter:
        return replace(self, prefix=prefix)._judged()

    def with_pattern(self, pattern: str) -> Filter:
        return replace(self, pattern=pattern, matches=_search(pattern) if pattern else None)._judged()

    def with_value(self, comparison: str) -> Filter:
        return replace(self, value=comparison, condition=value_condition(comparison) if comparison else None)

    def with_mode(self, mode: str) -> Filter:
        if mode not in (VIEW, EVENTS):
            raise InvalidArguments(f"filter.mode is {VIEW} or {EVENTS}, not {mode[:80]!r}")
        return replace(self, mode=mode)

    def with_operations(self, text: str) -> Filter:
        names = frozenset(name.strip() for name in text.split(",") if name.strip())
        if unknown := names - set(OPERATIONS):
            raise InvalidArguments(
                f"there is no operation {min(unknown)!r}; there are {', '.join(OPERATIONS)}"
            )
        return replace(self, operations=names or frozenset(OPERATIONS))._judged()

    def with_keys_only(self) -> Filter:
        return replace(self, keys_only=True)

    def __call__(self, records: Sequence[bytes], *, first: bool = False) -> list[bytes]:
        """The records that pass, as they are to be sent. `first`: the consumer has nothing to remove."""
        judges = self.judges
        passed = [
            record
            for record in records
            if record[AT_OPCODE] not in _JUDGED or all(judge(record) for judge in judges)
        ]
        if self.condition is not None:
            removes = self.mode == VIEW and not first and "deletion" in self.operations
            passed = _by_value(self.condition, passed, removes=removes)
        return [without_value(record) for record in passed] if self.keys_only else passed

    @property
    def operation_bits(self) -> int:
        """The operations as the kernel takes them."""
        return sum(1 << OPERATIONS[name] - MUTATION for name in self.operations)

    def __str__(self) -> str:
        parts = [
            *([f"prefix {self.prefix.decode(errors='replace')}"] if self.prefix else []),
            *([f"pattern {self.pattern}"] if self.pattern else []),
            *([f"value {self.value} ({self.mode})"] if self.value else []),
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
        if self.matches is not None:
            judges.append(_by_pattern(self.matches))
        return replace(self, judges=tuple(judges))


EVERYTHING = Filter()
_JUDGED = frozenset(OPERATIONS.values())


def _by_operation(names: frozenset[str]) -> Judge:
    codes = frozenset(OPERATIONS[name] for name in names)
    return lambda record: record[AT_OPCODE] in codes


def _by_prefix(prefix: bytes) -> Judge:
    return lambda record: key_of(record).startswith(prefix)


def _by_pattern(matches: Callable[[bytes], object]) -> Judge:
    return lambda record: matches(key_of(record)) is not None


def _search(pattern: str) -> Callable[[bytes], object]:
    try:
        import re2
    except ImportError:
        raise NotSupported("key patterns need google-re2; install it, or use filter.key.prefix") from None
    try:
        options = re2.Options()
        options.log_errors = False
        options.encoding = re2.Options.Encoding.LATIN1  # keys are bytes, and need not be UTF-8
        search: Callable[[bytes], object] = re2.compile(pattern.encode(), options=options).search
    except re2.error as error:
        why = error.args[0] if error.args else ""
        text = why.decode(errors="replace") if isinstance(why, bytes) else why
        raise InvalidArguments(f"the key pattern is not a regular expression of RE2: {text}") from None
    return search


def _by_value(condition: ValueCondition, records: list[bytes], *, removes: bool) -> list[bytes]:
    """Mutations that match, and other changes; the rest as deletions, where it may have to leave a view."""
    passed: list[bytes] = []
    for record in records:
        if record[AT_OPCODE] != MUTATION or condition.matches(record):
            passed.append(record)
        elif removes:
            cas, seqno, revision = meta_of(record)
            partition = partition_of_record(record)
            passed.append(deletion(partition, key_of(record), seqno=seqno, revision=revision, cas=cas))
    return passed

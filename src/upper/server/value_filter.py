"""Conditions on JSON values: a path, a comparison and a literal, such as `$.type == "order"`.

Parsing runs on the event loop, so it is bounded: values of more than `MAX_VALUE` bytes are not parsed and
match no condition. Each change is parsed once for any number of streams: all conditions in use are evaluated
on the parsed document, and the results are kept for the changes that were seen last.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import count, islice
from weakref import WeakValueDictionary

from upper.errors import InvalidArguments
from upper.record.change import value_at

MAX_VALUE = 256 << 10  # bytes of a value that is parsed
AT_ONCE = 64  # conditions evaluated on a document beside the one asked for
KEPT = 4096  # changes whose results are kept

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
_numbers = count(1)


class ValueCondition:
    """One condition; streams that state the same one share it."""

    __slots__ = ("__weakref__", "_compare", "_literal", "_path", "number")

    def __init__(self, text: str) -> None:
        match = _COMPARISON.fullmatch(text)
        if match is None:
            raise InvalidArguments(
                'a value filter is a JSON path, a comparison and a literal, such as $.type == "order"'
            )
        try:
            self._literal = json.loads(match[3])
        except (ValueError, RecursionError):
            raise InvalidArguments(
                f"{match[3].strip()[:80]!r} is not a JSON literal; text needs double quotes"
            ) from None
        steps = _STEP.findall(match[1])
        self._path = [int(number) if number else name or quoted for name, number, quoted in steps]
        self._compare = _ORDER[match[2]]
        self.number = next(_numbers)

    def holds(self, document: object) -> bool:
        try:
            found = _walk(document, self._path)
            return _comparable(found, self._literal) and self._compare(found, self._literal)
        except (LookupError, RecursionError, TypeError):
            return False  # no such path, or lists of values without an order

    def matches(self, record: bytes) -> bool:
        """True if the value of this mutation is JSON for which the condition holds."""
        if len(record) - value_at(record) > MAX_VALUE:
            return False
        key = hash(record)  # of all its bytes, seqno and CAS among them; computed once per object
        results = _results.get(key)
        if results is None or self.number not in results:
            results = _results[key] = self._evaluate(record)
            if len(_results) > KEPT:
                del _results[next(iter(_results))]
        return results[self.number]

    def _evaluate(self, record: bytes) -> dict[int, bool]:
        try:
            document = json.loads(record[value_at(record) :])
        except (ValueError, RecursionError):
            document = NOT_JSON
        conditions = [self, *islice(_conditions.values(), AT_ONCE)]
        return {condition.number: condition.holds(document) for condition in conditions}


class _NotJson:
    """A value that is not JSON: no path matches it, and it equals no literal."""


NOT_JSON = _NotJson()
_conditions: WeakValueDictionary[str, ValueCondition] = WeakValueDictionary()
_results: dict[int, dict[int, bool]] = {}  # by the hash of a record, then by the number of a condition


def value_condition(text: str) -> ValueCondition:
    """The one condition of this text."""
    found = _conditions.get(text)
    if found is None:
        found = _conditions[text] = ValueCondition(text)
    return found


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

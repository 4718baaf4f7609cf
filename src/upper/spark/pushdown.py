"""Spark's filters as filters of a stream: partitions, one key or a key prefix, operations. Pure.

Only filters that a node can apply are taken, and none is taken as the whole answer: Spark checks the rows
again. Filters of one query are conjunctive, so each of them may only narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pushed:
    """The filters of a query that a stream has too; None where there is no restriction."""

    partitions: frozenset[int] | None = None
    key: str | bytes | None = None  # a single key: its partition is known too
    key_prefix: str | bytes | None = None
    operations: frozenset[str] | None = None


def pushed(filters: Sequence[Any]) -> Pushed:
    partitions: frozenset[int] | None = None
    operations: frozenset[str] | None = None
    key: str | bytes | None = None
    prefix: str | bytes | None = None
    for each in filters:
        kind, column = type(each).__name__, ".".join(getattr(each, "attribute", ()))
        if kind not in ("EqualTo", "EqualNullSafe", "In", "StringStartsWith") or each.value is None:
            continue
        values = frozenset(each.value if kind == "In" else [each.value])
        if column == "key" and kind in ("EqualTo", "EqualNullSafe") and isinstance(each.value, (str, bytes)):
            key = each.value
        elif column == "key" and kind == "StringStartsWith":
            prefix = max(prefix or "", each.value, key=len)
        elif column == "partition" and kind != "StringStartsWith":
            partitions = values if partitions is None else partitions & values
        elif column == "operation" and kind != "StringStartsWith":
            operations = values if operations is None else operations & values
    return Pushed(partitions, key, (prefix if key is None else key) or None, operations)

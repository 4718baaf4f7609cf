"""Searching an index: the best hits of all groups of partitions, at or past a given position."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from upper.apps.index.definitions import IndexDefinition, read
from upper.apps.index.documents import (
    FIELDS,
    ID,
    KIND,
    key_of,
    library,
    open_index,
    position_of,
    rewritten,
    schema_of,
)
from upper.apps.index.output import group_directory
from upper.apps.lake.lake import Lake
from upper.apps.lake.position import LakePosition
from upper.apps.lake.store import Place, open_store
from upper.apps.lake.tokens import POLL, WriteToken, require, tokens_of, wait
from upper.client.calls import Stored
from upper.errors import BadCheckpoint, InvalidArguments, TimedOut

if TYPE_CHECKING:
    from upper.pipeline.source import BucketState


@dataclass(frozen=True)
class Hit:
    """A key that a query found."""

    key: bytes
    score: float
    fields: dict[str, Any] = field(default_factory=dict)  # the --fields of the index


@dataclass(frozen=True)
class Hits:
    """The hits of a query in one snapshot of an index."""

    total: int
    hits: list[Hit]
    position: LakePosition


def search(
    root: Place,
    name: str,
    query: str,
    *,
    limit: int = 10,
    after: Iterable[str | Stored | WriteToken] = (),
    timeout: float = 30.0,
    bucket_state: Callable[[], BucketState] | None = None,
) -> Hits:
    """The best hits of a query, best first.

    `after`: wait until the index has these writes, for up to `timeout` seconds; raises WriteLost if a
    rollback took one back. `bucket_state` helps to recognise that for a write that the lake never had.
    """
    if limit < 1:
        raise InvalidArguments("a search shows at least one hit; use --limit 1 or more")
    library()
    store, tokens = open_store(root), tokens_of(after)
    lake = Lake(store)
    index = read(store, name)
    deadline = time.monotonic() + timeout
    if tokens:
        wait(store, tokens, timeout=timeout, bucket_state=bucket_state)
    while True:
        searchers, position = _open(lake, index)
        missing = require(position, tokens)
        if not missing:
            break
        if time.monotonic() >= deadline:
            at = position.position(missing[0].partition).seqno
            raise TimedOut(
                f"the index {name!r} has not reached the write {missing[0]} in {timeout:g} s, it is at {at}; "
                "check that `upper sync` runs, or give it more time with --timeout"
            )
        time.sleep(POLL)
        index = read(store, name)  # it may be rebuilt
    if not searchers and lake.changes.lake_position.batch:
        raise BadCheckpoint(
            f"the index {name!r} is not built yet; `upper sync` builds it, and `upper index rebuild` does"
        )
    found = [_search(index, *each, query, limit) for each in searchers]
    best = heapq.nlargest(limit, (hit for _, hits in found for hit in hits), key=lambda hit: hit.score)
    return Hits(sum(total for total, _ in found), best, position)


def _open(lake: Lake, index: IndexDefinition) -> tuple[list[tuple[Any, Any]], LakePosition]:
    """Each group at one moment, and the position of all of them."""
    directory, layout = index.directory(lake.root, index.served), lake.layout
    searchers, position = [], LakePosition()
    for group in range(layout.groups):
        own = group_directory(directory, group)
        if not own.is_dir():
            continue
        try:
            opened = open_index(own, index.text)
            searcher = opened.searcher()
        except (OSError, ValueError) as error:
            raise BadCheckpoint(
                f"the index in {own} cannot be opened ({error}); `upper index rebuild` makes another"
            ) from None
        found = position_of(searcher, schema_of(index.text), str(own))
        batch = max(position.batch, found.batch)
        position = replace(position.advanced(frozenset(layout.members(group)), found), batch=batch)
        searchers.append((opened, searcher))
    return searchers, position


def _search(
    index: IndexDefinition, opened: Any, searcher: Any, text: str, limit: int
) -> tuple[int, list[Hit]]:
    query = library().Query
    occur = library().Occur
    try:
        asked = opened.parse_query(
            rewritten(text, index.fields), list(index.text) or [FIELDS], conjunction_by_default=True
        )
    except ValueError as error:
        known = ", ".join((*index.text, *index.fields))
        raise InvalidArguments(
            f"tantivy rejects the query: {str(error).replace(f'{FIELDS}.', '')}; the index has {known}"
        ) from None
    position = query.term_query(opened.schema, KIND, "position")
    result = searcher.search(
        query.boolean_query([(occur.Must, asked), (occur.MustNot, position)]), limit, count=True
    )
    hits = []
    for score, address in result.hits:
        document = searcher.doc(address)
        fields = (document[FIELDS] or [{}])[0] if index.fields else {}
        hits.append(Hit(key_of(document[ID][0]), float(score), fields))
    return int(result.count), hits

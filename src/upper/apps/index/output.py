"""An index as an output of a lake: a tantivy index for each group of partitions.

A worker adds and deletes the documents of one group, and commits them with the position of its partitions. It
does so only if the group is where the plan began, and tantivy allows one writer at a time: a worker that was
abandoned changes nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any

from upper.apps.index.definitions import INDEXES, IndexDefinition, load, read, save
from upper.apps.index.documents import (
    ID,
    KIND,
    PARTITION,
    documents,
    identity,
    open_index,
    position_document,
    position_of,
    schema_of,
)
from upper.apps.lake.derived import DerivedUnit, OutputChange, lack
from upper.apps.lake.lake import Lake
from upper.apps.lake.position import LakePosition
from upper.apps.lake.schema import DataFile, LakeLayout
from upper.apps.lake.store import LocalStore
from upper.apps.lake.tables import FilesReplaced, LakeTable
from upper.apps.lake.tasks import LakeNotVisible
from upper.errors import InvalidArguments
from upper.model.values import Partition

HEAP = 64 * 1024 * 1024  # bytes that a worker collects before it writes a segment
COMPLETE = "built-by-upper"  # a worker that finds this file sees the directory of the driver


def group_directory(directory: Path, group: int) -> Path:
    return directory / str(group)


def read_position(directory: Path, text: Sequence[str], layout: LakeLayout) -> LakePosition:
    """The position of a whole index."""
    whole = LakePosition()
    for group in range(layout.groups):
        own = group_directory(directory, group)
        if own.is_dir():
            searcher = open_index(own, text).searcher()
            found = position_of(searcher, schema_of(text), str(own))
            whole = replace(
                whole.advanced(frozenset(layout.members(group)), found), batch=max(whole.batch, found.batch)
            )
    return whole


class IndexOutput:
    """One build of an index, which follows the lake."""

    whole_groups = from_changes = at_once = False

    def __init__(self, lake: Lake, index: IndexDefinition) -> None:
        self._lake, self._index = lake, index
        self.name = f"index {index.name!r}"
        self.directory = index.directory(lake.root, index.wanted)
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / COMPLETE).touch()
        self._position = read_position(self.directory, index.text, lake.layout)

    def snapshot(self) -> tuple[LakePosition, list[DataFile]]:
        self._serve()
        return self._position, []

    def _serve(self) -> None:
        """A build that has all partitions takes the place of the one before."""
        index, root = self._index, self._lake.root
        if index.served == index.wanted:
            return
        partitions = [Partition(p) for p in range(self._lake.layout.partitions)]
        if not lack(self._position, self._lake.changes.lake_position, partitions).afresh:
            with suppress(InvalidArguments):  # dropped meanwhile
                now = read(root, index.name)
                if now.wanted == index.wanted:
                    save(root, replace(now, served=now.wanted))
                    shutil.rmtree(index.directory(root, index.served), ignore_errors=True)
            self._index = replace(index, served=index.wanted)

    def task(self, unit: DerivedUnit, before: LakePosition, after: LakePosition) -> IndexGroup:
        members = frozenset(self._lake.layout.members(unit.group))
        return IndexGroup(
            unit,
            self.directory,
            self._index.text,
            self._index.fields,
            self._position,
            LakePosition().advanced(members, after),
        )

    def commit(self, results: Sequence[int], before: LakePosition, after: LakePosition) -> None:
        """The workers have committed; other groups advance when there is work for them."""
        layout = self._lake.layout
        done = frozenset(p for group in results for p in layout.members(group))
        if done:
            self._position = self._position.advanced(done, after)
        self._serve()

    def forget(self, partition: Partition, key: bytes) -> None:
        """Remove what was ever written of a group: deleted documents stay in tantivy's files for a while."""
        shutil.rmtree(
            group_directory(self.directory, self._lake.layout.group_of(partition)), ignore_errors=True
        )
        self._position = read_position(self.directory, self._index.text, self._lake.layout)


@dataclass(frozen=True)
class IndexGroup:
    """Bring the index of one group forward; returns the group."""

    unit: DerivedUnit
    directory: Path
    text: tuple[str, ...]
    fields: tuple[str, ...]
    before: LakePosition
    after: LakePosition

    def __call__(self) -> int:
        if not (self.directory / COMPLETE).exists():
            raise LakeNotVisible(
                f"the worker on {gethostname()} does not see the index in {self.directory}; put indexes on "
                "storage that the driver and all workers mount under the same path"
            )
        own = group_directory(self.directory, self.unit.group)
        index = open_index(own, self.text)
        try:
            writer: Any = index.writer(HEAP, 1)
        except ValueError as error:
            raise FilesReplaced(
                f"another process writes to the index in {own} ({error}); try again"
            ) from None
        try:
            index.reload()
            held = position_of(index.searcher(), index.schema, str(own))
            if not self._continues(held):
                raise FilesReplaced(f"the index in {own} was changed meanwhile; try again")
            for piece in self.unit.pieces():
                self._apply(writer, piece)
            writer.delete_documents_by_term(KIND, "position")
            writer.add_document(position_document(self.after))
            writer.commit()
        except BaseException:
            writer.rollback()
            raise
        finally:
            writer.wait_merging_threads()
        return self.unit.group

    def _continues(self, held: LakePosition) -> bool:
        """Whether the partitions of the unit are where the plan began."""
        return all(
            held.known(p) == self.before.known(p)
            and held.rollbacks.get(p, 0) == self.before.rollbacks.get(p, 0)
            for p in self.unit.partitions
            if p not in self.unit.afresh
        )

    def _apply(self, writer: Any, piece: OutputChange) -> None:
        for partition in piece.cleared:
            writer.delete_documents_by_term(PARTITION, int(partition))
        for partition, keys in piece.touched.items():
            for key in keys.to_pylist():
                writer.delete_documents_by_term(ID, identity(partition, key))
        columns = (piece.live[name].to_pylist() for name in ("partition", "key", "value"))
        for document in documents(zip(*columns, strict=True), self.text, self.fields):
            writer.add_document(document)


def outputs(lake: Lake) -> dict[str, Callable[[], IndexOutput]]:
    """How each index is opened, by what identifies its build."""
    return {
        f"index {index.name} {index.wanted}": partial(IndexOutput, lake, index) for index in load(lake.root)
    }


def tables(lake: Lake) -> list[LakeTable]:
    """The Delta tables of indexes: they have none."""
    return []


def remove_orphans(lake: Lake) -> None:
    """Remove builds of indexes that were dropped. The lake must be held."""
    if not isinstance(lake.root, LocalStore):
        return
    kept = {f"{index.name}-{build}" for index in load(lake.root) for build in (index.wanted, index.served)}
    for name in lake.root.names(INDEXES):
        if name not in kept:
            lake.root.remove_all(f"{INDEXES}/{name}")

"""Create, list, rebuild and drop indexes of a lake.

The files of an index belong to the process that holds the lake: a sync that runs builds and removes them;
otherwise `refresh` does.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from upper.apps.index.definitions import (
    IndexDefinition,
    check,
    load,
    read,
    remove,
    save,
)
from upper.apps.index.documents import library, open_index
from upper.apps.index.output import IndexOutput, group_directory, read_position, remove_orphans
from upper.apps.lake.derived import bring_forward, lack
from upper.apps.lake.lake import Lake, held
from upper.apps.lake.store import LakeStore, LocalStore
from upper.errors import DirectoryInUse, InvalidArguments
from upper.model.values import Partition
from upper.pipeline.target import Runner


@dataclass(frozen=True)
class IndexReport:
    name: str
    text: str
    fields: str
    documents: int
    size: int  # bytes
    behind: int  # changes of the bucket that it lacks, at most
    state: str
    directory: str


def create(
    store: LakeStore,
    name: str,
    *,
    text: Sequence[str],
    fields: Sequence[str],
    now: datetime,
    place: Path | None = None,
) -> IndexDefinition:
    """Store the definition of an index. `place`: a directory for its files, outside of the lake."""
    library()
    check(name, text, fields)
    if place is None and not isinstance(store, LocalStore):
        raise InvalidArguments(
            f"tantivy cannot keep an index in {store}; name a directory that the driver and all workers see "
            "with --path DIR"
        )
    if any(index.name == name for index in load(store)):
        raise InvalidArguments(f"there is an index {name!r} already; drop it first, or choose another name")
    build = uuid4().hex[:8]
    made = IndexDefinition(
        name,
        tuple(text),
        tuple(fields),
        now.isoformat(timespec="seconds"),
        build,
        build,
        "" if place is None else str(place.resolve()),
    )
    save(store, made)
    return made


def refresh(lake: Lake, runner: Runner, name: str) -> None:
    """Bring one index to the position of `changes`, built from the start if it must be. Hold the lake."""
    remove_orphans(lake)
    output = IndexOutput(lake, read(lake.root, name))
    bring_forward(lake, output, runner)
    output.snapshot()  # a build that is complete is served


def rebuild(store: LakeStore, name: str) -> None:
    """Request another build, which is served once it is complete."""
    save(store, replace(read(store, name), wanted=uuid4().hex[:8]))


def drop(store: LakeStore, name: str) -> None:
    index = read(store, name)
    remove(store, name)
    with suppress(DirectoryInUse), held(store):
        for build in {index.wanted, index.served}:
            shutil.rmtree(index.directory(store, build), ignore_errors=True)


def reports(lake: Lake, name: str | None = None) -> list[IndexReport]:
    """The indexes of a lake, or one of them."""
    chosen = load(lake.root) if name is None else [read(lake.root, name)]
    return [_report(lake, index) for index in chosen]


def _report(lake: Lake, index: IndexDefinition) -> IndexReport:
    directory, layout = index.directory(lake.root, index.served), lake.layout
    position = read_position(directory, index.text, layout)
    target = lake.changes.lake_position
    found = lack(position, target, [Partition(p) for p in range(layout.partitions)])
    groups = [own for g in range(layout.groups) if (own := group_directory(directory, g)).is_dir()]
    counts = (open_index(own, index.text).searcher().num_docs for own in groups)
    state = "building" if index.served != index.wanted or (not groups and target.batch) else "ready"
    return IndexReport(
        index.name,
        ", ".join(index.text),
        ", ".join(index.fields),
        sum(max(0, count - 1) for count in counts),  # one document of each is the position
        sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()),
        sum(target.position(p).seqno - found.after.get(p, 0) for p in found.partitions),
        state,
        str(directory),
    )

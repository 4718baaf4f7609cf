"""The definitions of indexes, one JSON file each, in LAKE/.indexes.

The files of an index are in a directory that the driver and all workers see, LAKE/indexes or another one:
tantivy maps them into memory, so an object store cannot hold them. Each build of an index has a directory of
its own. A rebuilt index is served once it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from upper.apps.lake.store import LakeStore, LocalStore
from upper.errors import Corrupt, InvalidArguments

VERSION = 1
DIRECTORY = ".indexes"
INDEXES = "indexes"  # where the files are, in a lake that is a directory
NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
PATH = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*")


@dataclass(frozen=True)
class IndexDefinition:
    name: str
    text: tuple[str, ...]  # paths in JSON values whose words are searched
    fields: tuple[str, ...]  # paths whose values are matched exactly, and compared
    created: str  # when, as ISO 8601
    wanted: str  # the id of the build that follows the lake
    served: str  # the id of the build that is searched
    place: str = field(default="")  # a directory outside of the lake

    def base(self, store: LakeStore) -> Path:
        """The directory of all builds."""
        if self.place:
            return Path(self.place)
        assert isinstance(store, LocalStore)
        return store.directory / INDEXES

    def directory(self, store: LakeStore, build: str) -> Path:
        return self.base(store) / f"{self.name}-{build}"


def load(store: LakeStore) -> list[IndexDefinition]:
    """All indexes of a lake, by name."""
    return [read(store, name[: -len(".json")]) for name in store.names(DIRECTORY) if name.endswith(".json")]


def read(store: LakeStore, name: str) -> IndexDefinition:
    path = f"{DIRECTORY}/{name}.json"
    try:
        data: dict[str, Any] = json.loads(store.read(path))
        if data.pop("version") != VERSION:
            raise ValueError("another version of upper wrote it")
        return IndexDefinition(**{**data, "text": tuple(data["text"]), "fields": tuple(data["fields"])})
    except FileNotFoundError:
        raise missing(store, name) from None
    except (ValueError, TypeError, KeyError) as error:
        raise Corrupt(f"the index in {path} of {store} cannot be read ({error}); remove the file") from None


def save(store: LakeStore, index: IndexDefinition) -> None:
    data = json.dumps({"version": VERSION, **asdict(index)}, indent=1)
    store.write(f"{DIRECTORY}/{index.name}.json", data.encode())


def remove(store: LakeStore, name: str) -> None:
    store.remove(f"{DIRECTORY}/{name}.json")


def missing(store: LakeStore, name: str) -> InvalidArguments:
    return InvalidArguments(f"there is no index {name!r}; `upper index list {store}` shows them")


def check(name: str, text: Sequence[str], fields: Sequence[str]) -> None:
    if not NAME.fullmatch(name):
        raise InvalidArguments(
            f"{name!r} is not a name of an index; use small letters, digits and _, at most 63 of them"
        )
    if not text and not fields:
        raise InvalidArguments("an index has at least one path in --text or --fields, such as --text title")
    seen: set[str] = set()
    for path in (*text, *fields):
        if not PATH.fullmatch(path):
            raise InvalidArguments(
                f"{path!r} is not a path in a JSON value; write it as title or address.city"
            )
        if path in seen:
            raise InvalidArguments(f"the path {path!r} is named twice; name it in --text or in --fields")
        seen.add(path)

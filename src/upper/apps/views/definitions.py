"""The definitions of views, one JSON file each, in LAKE/.views.

A view may use the views that were there when it was created, so the order of creation is an order in which
all can be defined. A view that another one uses is not dropped, so every stored view can be queried.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b

from upper.apps.lake.store import LakeStore
from upper.apps.views.shape import ViewShape
from upper.errors import Corrupt, InvalidArguments

VERSION = 1
DIRECTORY = ".views"
VIEWS = "views"  # where the tables of materialised views are
RELATIONS = ("changes", "latest", "lost", "current")
NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
COMMENTS = re.compile(r"--[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class ViewDefinition:
    name: str
    sql: str
    number: int  # in the order of creation
    created: str  # when, as ISO 8601
    shape: ViewShape | None = None  # of a view that is kept as a table

    @property
    def identity(self) -> str:
        """The view that a table belongs to, as the table states it."""
        made = f"{self.sql}\n{self.shape}".encode()
        return blake2b(made, digest_size=16).hexdigest()


def table_of(name: str) -> str:
    """The path of a view's table in the lake."""
    return f"{VIEWS}/{name}"


def load(store: LakeStore) -> list[ViewDefinition]:
    """All views of a lake, in the order of creation."""
    found = []
    for name in store.names(DIRECTORY):
        if not name.endswith(".json"):
            continue
        path = f"{DIRECTORY}/{name}"
        try:
            data = json.loads(store.read(path))
            if data.pop("version") != VERSION:
                raise ValueError("another version of upper wrote it")
            shape = data.pop("shape", None)
            found.append(ViewDefinition(**data, shape=shape and ViewShape.from_json(shape)))
        except (ValueError, TypeError, KeyError) as error:
            raise Corrupt(
                f"the view in {path} of {store} cannot be read ({error}); remove the file"
            ) from None
    return sorted(found, key=lambda view: view.number)


def save(store: LakeStore, view: ViewDefinition) -> None:
    data = {"version": VERSION, **asdict(view)}
    if view.shape is None:
        del data["shape"]  # as older versions of upper read it
    store.write(_file(view.name), json.dumps(data, indent=1).encode())


def remove(store: LakeStore, name: str) -> None:
    store.remove(_file(name))


def _file(name: str) -> str:
    return f"{DIRECTORY}/{name}.json"


def exists(name: str) -> InvalidArguments:
    return InvalidArguments(f"there is a view {name!r} already; drop it first, or choose another name")


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise InvalidArguments(
            f"{name!r} is not a name of a view; use small letters, digits and _, at most 63 of them"
        )
    if name in RELATIONS:
        raise InvalidArguments(f"{name!r} is a relation of every lake; choose another name")


def needed(sql: str, views: Sequence[ViewDefinition]) -> list[ViewDefinition]:
    """The views that a statement may use, directly or through others, in the order of creation.

    A name counts wherever it is a word of the statement: defining a view that is not used costs little.
    """
    known = {view.name: view for view in views}
    found: dict[str, ViewDefinition] = {}
    todo = [sql]
    while todo:
        for name in words(todo.pop()) & known.keys() - found.keys():
            found[name] = known[name]
            todo.append(known[name].sql)
    return sorted(found.values(), key=lambda view: view.number)


def words(sql: str) -> set[str]:
    return {word.lower() for word in re.findall(r"\w+", COMMENTS.sub(" ", sql))}


def users_of(name: str, views: Iterable[ViewDefinition]) -> list[str]:
    """The views that use another one."""
    return [view.name for view in views if view.name != name and name in words(view.sql)]

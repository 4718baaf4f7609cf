"""`upper lake LAKE types`: list the typed tables of a lake, propose some, or drop one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from upper.cli.common import agreed
from upper.cli.output import Output
from upper.errors import InvalidArguments

if TYPE_CHECKING:
    from upper.apps.lake.store import LakeStore

SAMPLE = 50_000  # JSON objects that a proposal is made from


@dataclass(frozen=True)
class TypedTableReport:
    table: str
    keys: str
    rows: int
    history: bool
    columns: str


def run_types(store: LakeStore, words: Sequence[str], out: Output, *, yes: bool) -> None:
    from upper.apps.lake.query import require_lake

    require_lake(store)
    match list(words):
        case []:
            out.show(_listed(store), empty="no typed tables; `types infer` proposes some")
        case ["infer"]:
            _infer(store, out)
        case ["drop", name]:
            from upper.apps.typed.definitions import load, remove

            question = f"Drop {name} with all versions that it keeps? `changes` may not have all of them."
            kept = any(table.name == name and table.history for table in load(store))
            if kept and not yes and not agreed(out, question, unattended=True):
                raise InvalidArguments("nothing was dropped; answer `yes`, or use --yes")
            remove(store, name)
            out.show({"table": name}, text=f"table {name} dropped; the next sync removes its files")
        case _:
            raise InvalidArguments("types takes nothing, `infer`, or `drop NAME`; see `upper lake --help`")


def _listed(store: LakeStore) -> list[TypedTableReport]:
    from upper.apps.lake.derived_table import open_derived
    from upper.apps.typed.definitions import REJECTED, load, table_of

    def rows(name: str) -> int:
        table = open_derived(store, table_of(name))
        return 0 if table is None else sum(file.rows for file in table.files())

    tables = load(store)
    listed = [
        TypedTableReport(
            table.name,
            table.key,
            rows(table.name),
            table.history,
            ", ".join(f"{column.name} {column.kind}" for column in table.columns),
        )
        for table in tables
    ]
    if tables:
        listed.append(TypedTableReport(REJECTED, "", rows(REJECTED), False, "values that do not fit"))
    return listed


def _infer(store: LakeStore, out: Output) -> None:
    from upper.apps.lake.query import query
    from upper.apps.typed.infer import as_yaml, propose

    with out.progress("reading a sample of the JSON objects"):
        # A sample is taken before `where` is applied, so that one of all keys may have none of a few objects.
        objects = r"select key, value from current where regexp_matches(text(value), '^\s*\{')"
        sql = f"from ({objects}) using sample {SAMPLE} rows"
        proposed = propose((row["key"], row["value"]) for row in query(store, sql))
    if not proposed:
        raise InvalidArguments(
            "no live value of the lake is a JSON object, so no table is proposed; write types.yml by hand"
        )
    text = as_yaml(proposed)
    out.show({"types": text}, text=text.rstrip("\n"))

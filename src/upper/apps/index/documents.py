"""The schema of an index, and documents from live keys. The position of an index is a document, too.

tantivy commits added and deleted documents together, so a position that is a document of the same commit
states exactly what the index holds. A value that is not a JSON object has no document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from upper.apps.lake.position import LakePosition
from upper.errors import InvalidArguments

ID, PARTITION, KIND, POSITION, FIELDS = "_id", "_partition", "_kind", "_position", "_fields"
REMEDY = "indexes need tantivy; install it with `pip install 'upper-kv[search]'`"


def library() -> Any:
    """The module tantivy, or an error that names how to install it."""
    try:
        import tantivy  # type: ignore[import-not-found, unused-ignore]
    except ModuleNotFoundError:
        raise InvalidArguments(REMEDY) from None
    return tantivy


def schema_of(text: Sequence[str]) -> Any:
    builder = library().SchemaBuilder()
    exact = {"tokenizer_name": "raw", "index_option": "basic"}
    builder.add_text_field(ID, stored=True, **exact)
    builder.add_text_field(KIND, **exact)
    builder.add_integer_field(PARTITION, indexed=True)
    builder.add_text_field(POSITION, stored=True, **exact)
    builder.add_json_field(FIELDS, stored=True, fast=True, **exact)
    for path in text:
        builder.add_text_field(path)
    return builder.build()


def open_index(directory: Path, text: Sequence[str]) -> Any:
    """The index in a directory, which is made if it does not exist."""
    directory.mkdir(parents=True, exist_ok=True)
    return library().Index(schema_of(text), str(directory))


def position_of(searcher: Any, schema: Any, where: str) -> LakePosition:
    """The position of an index, as one snapshot of it has it."""
    found = searcher.search(library().Query.term_query(schema, KIND, "position"), 1).hits
    if not found:
        return LakePosition()
    return LakePosition.from_json(json.loads(searcher.doc(found[0][1])[POSITION][0]), where=where)


def position_document(position: LakePosition) -> Any:
    document = library().Document()
    document.add_text(KIND, "position")
    document.add_text(POSITION, json.dumps(position.to_json()))
    return document


def identity(partition: int, key: bytes) -> str:
    return f"{partition}/{key.decode('latin-1')}"


def key_of(identity: str) -> bytes:
    return identity.partition("/")[2].encode("latin-1")


def documents(
    rows: Iterable[tuple[int, bytes, bytes | None]], text: Sequence[str], fields: Sequence[str]
) -> Iterator[Any]:
    """The documents of live keys: partition, key and value of each."""
    new = library().Document
    texts = [(path, path.split(".")) for path in text]
    exact = [path.split(".") for path in fields]
    for partition, key, data in rows:
        try:
            value = json.loads(data or b"null")
        except (ValueError, RecursionError):
            continue
        if not isinstance(value, dict):
            continue
        document = new()
        document.add_text(ID, identity(partition, key))
        document.add_integer(PARTITION, partition)
        for path, steps in texts:
            for found in _at(value, steps):
                if isinstance(found, (str, int, float)):
                    document.add_text(path, found if isinstance(found, str) else json.dumps(found))
        if exact:
            document.add_json(FIELDS, json.dumps(_picked(value, exact)))
        yield document


def _at(value: Any, steps: Sequence[str]) -> Iterator[Any]:
    """The values at a path; an array has one for each of its elements."""
    if isinstance(value, list):
        for each in value:
            yield from _at(each, steps)
    elif not steps:
        yield value
    elif isinstance(value, dict) and steps[0] in value:
        yield from _at(value[steps[0]], steps[1:])


def _picked(value: dict[str, Any], paths: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The values at some paths, at the same paths."""
    made: dict[str, Any] = {}
    for steps in paths:
        found = [each for each in _at(value, steps) if isinstance(each, (str, int, float))]
        if found:
            inside = made
            for step in steps[:-1]:
                inside = inside.setdefault(step, {})
            inside[steps[-1]] = found if len(found) > 1 else found[0]
    return made


def rewritten(query: str, fields: Sequence[str]) -> str:
    """A query in which the names of fields are their paths in the index; quoted text stays as it is."""
    if not fields:
        return query
    names = "|".join(re.escape(name) for name in sorted(fields, key=len, reverse=True))
    name = re.compile(rf"(?<![\w.\\])({names})(?=\s*:)")
    parts = re.split(r"(\"(?:\\.|[^\"\\])*\")", query)
    return "".join(
        part if number % 2 else name.sub(rf"{FIELDS}.\1", part) for number, part in enumerate(parts)
    )

"""Sub-documents: several reads or edits of one JSON document by path, as one operation.

Edits of one request are made together or not at all, and are one change. Documents have no extended
attributes here: only `$document`, which describes the document itself, can be read as one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from upper.errors import InvalidArguments, KeyExists, KeyNotFound, NotSupported, SubdocumentError
from upper.model.values import State
from upper.record.change import StoredItem
from upper.server import subdocument as sub
from upper.server.auth import Role
from upper.server.commands.keys import deadline, shown_cas
from upper.server.commands.store import fits, written
from upper.server.table import Call, Reply, handles
from upper.wire.codes import DataType, Opcode, Status
from upper.wire.extras import SUBDOC_EDIT, SUBDOC_READ, SUBDOC_RESULT

MAX_PATHS = 16
PARENTS, ATTRIBUTE = 0x01, 0x04  # flags of a path
MAKE, ADD, DELETED = 0x01, 0x02, 0x04  # flags of the document
ABOUT = "$document"

READ_OPCODES = (Opcode.SUBDOC_GET, Opcode.SUBDOC_EXISTS, Opcode.SUBDOC_GET_COUNT)
EDIT_OPCODES = (
    Opcode.SUBDOC_DICT_ADD,
    Opcode.SUBDOC_DICT_UPSERT,
    Opcode.SUBDOC_DELETE,
    Opcode.SUBDOC_REPLACE,
    Opcode.SUBDOC_ARRAY_PUSH_LAST,
    Opcode.SUBDOC_ARRAY_PUSH_FIRST,
    Opcode.SUBDOC_ARRAY_INSERT,
    Opcode.SUBDOC_ARRAY_ADD_UNIQUE,
    Opcode.SUBDOC_COUNTER,
)
# A request with several paths may also read or replace the whole document.
READS = frozenset((*READ_OPCODES, Opcode.GET))
EDITS = frozenset((*EDIT_OPCODES, Opcode.SET))


class Step(NamedTuple):
    """One read or edit of a request."""

    opcode: int
    flags: int
    path: bytes
    value: bytes = b""


# ── Requests ──────────────────────────────────────────────────────────────────────────────────────


@handles(*READ_OPCODES, role=Role.READ, state=State.ACTIVE, large=True)
def read_one(call: Call) -> Reply:
    step, _, flags = _single(call)
    _known(flags, DELETED)
    item = _item(call)
    return Reply(cas=shown_cas(call, item), value=_read(call, item, step))


@handles(Opcode.SUBDOC_MULTI_LOOKUP, role=Role.READ, state=State.ACTIVE, large=True)
def read_many(call: Call) -> Reply:
    """The outcome of each path: its status, and the value or nothing."""
    _known(_document_flags(call.extras)[1], DELETED)
    item = _item(call)
    out, failed = bytearray(), False
    for step in _steps(call.value, SUBDOC_READ.size):
        try:
            status, value = int(Status.OK), _read(call, item, step)
        except SubdocumentError as error:
            status, value, failed = error.status, b"", True
        out += SUBDOC_RESULT.build(status, len(value)) + value
    status = Status.SUBDOC_PATHS_FAILED if failed else Status.OK
    return Reply(status, cas=shown_cas(call, item), value=bytes(out))


@handles(*EDIT_OPCODES, role=Role.READ | Role.WRITE, state=State.ACTIVE, options=True)
def edit_one(call: Call) -> Reply:
    step, expiration, flags = _single(call)
    item, text = _opened(call, flags, step)
    text, result = _edit(text, step)
    return _stored(call, item, text, expiration, value=result)


@handles(Opcode.SUBDOC_MULTI_MUTATION, role=Role.READ | Role.WRITE, state=State.ACTIVE, options=True)
def edit_many(call: Call) -> Reply:
    """All edits, or the index and the status of the first that cannot be made."""
    expiration, flags = _document_flags(call.extras)
    steps = list(_steps(call.value, SUBDOC_EDIT.size))
    item, text = _opened(call, flags, steps[0])
    results = bytearray()
    for index, step in enumerate(steps):
        try:
            text, result = _edit(text, step)
        except SubdocumentError as error:
            failed = bytes((index,)) + error.status.to_bytes(2, "big")
            return Reply(Status.SUBDOC_PATHS_FAILED, value=failed)
        if result:
            results += bytes((index,)) + SUBDOC_RESULT.build(Status.OK, len(result)) + result
    return _stored(call, item, text, expiration, value=bytes(results))


# ── Their parts ───────────────────────────────────────────────────────────────────────────────────


def _single(call: Call) -> tuple[Step, int | None, int]:
    """The step of a request with one path; expiration and flags may follow in the extras."""
    length, flags = int.from_bytes(call.extras[:2], "big"), call.extras[2]
    if length > len(call.value):
        raise InvalidArguments(f"a path of {length} bytes does not fit the request")
    step = Step(call.opcode, flags, call.value[:length], call.value[length:])
    return step, *_document_flags(call.extras[3:])


def _document_flags(extras: bytes) -> tuple[int | None, int]:
    """The expiration and the flags of the document; each is optional."""
    expiration = int.from_bytes(extras[:4], "big") if len(extras) >= 4 else None
    return expiration, extras[-1] if len(extras) % 4 else 0


def _steps(data: bytes, size: int) -> Iterator[Step]:
    at = count = 0
    while at < len(data):
        count += 1
        if at + size > len(data) or count > MAX_PATHS:
            raise SubdocumentError(
                f"a request has 1 to {MAX_PATHS} whole paths", status=Status.SUBDOC_INVALID_COMBINATION
            )
        opcode, flags = data[at], data[at + 1]
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        value = int.from_bytes(data[at + 4 : at + size], "big")
        at += size
        if at + length + value > len(data):
            raise InvalidArguments("the list of paths ends inside a path")
        known = READS if size == SUBDOC_READ.size else EDITS
        if opcode not in known:
            raise SubdocumentError(
                f"0x{opcode:02x} is not allowed in this list", status=Status.SUBDOC_INVALID_COMBINATION
            )
        yield Step(opcode, flags, data[at : at + length], data[at + length : at + length + value])
        at += length + value
    if not count:
        raise SubdocumentError("a request has at least one path", status=Status.SUBDOC_INVALID_COMBINATION)


def _known(flags: int, known: int) -> None:
    if unknown := flags & ~known:
        raise NotSupported(f"document flags 0x{unknown:x} are not supported; leave them out")


def _item(call: Call) -> StoredItem:
    item = call.store.read(call.key)
    if item is None:
        raise KeyNotFound("Not found")
    return item


def _read(call: Call, item: StoredItem, step: Step) -> bytes:
    if step.flags & ~(PARENTS | ATTRIBUTE):
        raise NotSupported(f"path flags 0x{step.flags:x} are not supported; leave them out")
    path = sub.parse_path(step.path)
    if step.flags & ATTRIBUTE:
        if not path or path[0] != ABOUT:
            sub.refuse(Status.PATH_NOT_FOUND, "documents have no extended attributes here")
        text, path = json.dumps(_about(call, item)), path[1:]
    elif step.opcode == Opcode.GET:
        return item.value
    else:
        text = sub.document(item.value)
    match step.opcode:
        case Opcode.SUBDOC_EXISTS:
            sub.get(text, path)
            return b""
        case Opcode.SUBDOC_GET_COUNT:
            return b"%d" % sub.count(text, path)
    return sub.get(text, path).encode()


def _about(call: Call, item: StoredItem) -> dict[str, object]:
    """The fields of `$document`, under Couchbase's names."""
    return {
        "CAS": f"0x{item.cas:016x}",
        "vbucket_uuid": f"0x{call.store.log.branch:016x}",
        "seqno": f"0x{item.seqno:016x}",
        "revid": str(item.revision),
        "exptime": item.expiration,
        "value_bytes": len(item.value),
        "datatype": ["json"] if item.data_type & DataType.JSON else ["raw"],
        "deleted": False,
        "flags": item.flags,
        "last_modified": str(item.cas // 10**9),
    }


def _opened(call: Call, flags: int, first: Step) -> tuple[StoredItem | None, str]:
    """The document to edit, or an empty one that the flags allow to be made."""
    _known(flags, MAKE | ADD)
    item = call.store.read(call.key)
    if item is not None:
        if flags & ADD:
            raise KeyExists("the document exists already")
        whole = first.opcode == Opcode.SET
        return item, item.value.decode(errors="replace") if whole else sub.document(item.value)
    if not flags & (MAKE | ADD):
        raise KeyNotFound("Not found")
    return None, "[]" if first.path[:1] in (b"", b"[") and first.opcode != Opcode.SET else "{}"


def _edit(text: str, step: Step) -> tuple[str, bytes]:
    """The new text, and what the step returns."""
    if step.flags & ~PARENTS:
        raise NotSupported("documents have no extended attributes and no macros here; leave the flags out")
    if step.opcode == Opcode.SET:
        if step.path:
            sub.refuse(Status.PATH_INVALID, "the whole document has no path")
        return sub.document(step.value), b""
    path, parents = sub.parse_path(step.path), bool(step.flags & PARENTS)
    if step.opcode == Opcode.SUBDOC_COUNTER:
        text, number = sub.add(text, path, step.value, parents=parents)
        return text, number.encode()
    return EDITORS[step.opcode](text, path, step.value, parents), b""


EDITORS: Mapping[int, Callable[[str, sub.Path, bytes, bool], str]] = {
    Opcode.SUBDOC_DICT_ADD: lambda text, path, value, parents: sub.put(
        text, path, sub.fragment(value), parents=parents, only_new=True
    ),
    Opcode.SUBDOC_DICT_UPSERT: lambda text, path, value, parents: sub.put(
        text, path, sub.fragment(value), parents=parents
    ),
    Opcode.SUBDOC_DELETE: lambda text, path, value, parents: sub.remove(text, path),
    Opcode.SUBDOC_REPLACE: lambda text, path, value, parents: sub.replace(text, path, sub.fragment(value)),
    Opcode.SUBDOC_ARRAY_PUSH_LAST: lambda text, path, value, parents: sub.push(
        text, path, sub.fragment(value, several=True), first=False, parents=parents
    ),
    Opcode.SUBDOC_ARRAY_PUSH_FIRST: lambda text, path, value, parents: sub.push(
        text, path, sub.fragment(value, several=True), first=True, parents=parents
    ),
    Opcode.SUBDOC_ARRAY_INSERT: lambda text, path, value, parents: sub.insert(
        text, path, sub.fragment(value, several=True)
    ),
    Opcode.SUBDOC_ARRAY_ADD_UNIQUE: lambda text, path, value, parents: sub.add_unique(
        text, path, sub.fragment(value), parents=parents
    ),
}


def _stored(call: Call, item: StoredItem | None, text: str, expiration: int | None, *, value: bytes) -> Reply:
    """Store the document. Without an expiration in the request it keeps the one that it has."""
    data = text.encode()
    fits(call, len(data))
    expires = 0 if expiration is None else deadline(call, expiration)
    if item is not None and (expiration is None or call.options.preserve_expiry):
        expires = item.expiration
    change = call.store.write(
        call.key,
        data,
        flags=0 if item is None else item.flags,
        expiration=expires,
        cas=call.cas,
        data_type=int(DataType.JSON),
    )
    return written(call, change, value=value)

"""Reading and editing parts of JSON documents, against Python's own JSON and over the wire."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.nodes import Node
from tests.server.peers import Peer
from upper.errors import SubdocumentError
from upper.model.messages import Response
from upper.server import subdocument as sub
from upper.wire.codes import Opcode, Status

NAMES = st.text(max_size=4)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
SPACES = st.sampled_from([None, 1, 4])


def quoted(path: list[str | int]) -> bytes:
    """A path in which every name stands in backticks."""
    parts = [f"[{c}]" if isinstance(c, int) else ".`" + c.replace("`", "``") + "`" for c in path]
    return "".join(parts).removeprefix(".").encode()


def paths(value: Any, so_far: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield so_far
    members = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for name, inner in members:
        yield from paths(inner, (*so_far, name))


def at(value: Any, path: tuple[str | int, ...]) -> Any:
    for name in path:
        value = value[name]
    return value


def same(text: str, value: Any) -> bool:
    return json.dumps(json.loads(text)) == json.dumps(value)


@given(value=VALUES, spaces=SPACES, data=st.data())
def test_what_is_read_is_what_pythons_json_finds(value: Any, spaces: int | None, data: st.DataObject) -> None:
    text = sub.document(json.dumps(value, indent=spaces).encode())
    path = data.draw(st.sampled_from([p for p in paths(value) if len(p) < 30]))
    parsed = sub.parse_path(quoted(list(path)))
    assert parsed == path
    assert same(sub.get(text, parsed), at(value, path))


@given(value=VALUES, spaces=SPACES, new=VALUES, data=st.data())
def test_edits_do_what_assignments_do(value: Any, spaces: int | None, new: Any, data: st.DataObject) -> None:
    value = {"top": value, "list": [1, 2, 3]}
    text = json.dumps(value, indent=spaces)
    path = data.draw(st.sampled_from([p for p in paths(value) if p]))
    fragment = sub.fragment(json.dumps(new).encode())
    home, name = at(value, path[:-1]), path[-1]
    kind = data.draw(st.sampled_from(["replace", "remove", "put", "insert", "push"]))
    match kind:
        case "replace":
            text = sub.replace(text, path, fragment)
            home[name] = new
        case "remove":
            text = sub.remove(text, path)
            del home[name]
        case "put" if isinstance(home, dict):
            added = data.draw(NAMES.filter(bool))
            text = sub.put(text, (*path[:-1], added), fragment, parents=False)
            home[added] = new
        case "insert" if isinstance(home, list):
            text = sub.insert(text, path, fragment)
            home.insert(int(name), new)
        case "push" if isinstance(home, list):
            first = data.draw(st.booleans())
            text = sub.push(text, path[:-1], fragment, first=first, parents=False)
            home.insert(0 if first else len(home), new)
    assert same(text, value)


def test_bytes_that_an_edit_does_not_name_stay_as_they_are() -> None:
    text = '{ "a" : 1.10 ,\n "b":[1e400, 2],"é":"\\u00e9" , "n" : 5 }'
    assert sub.replace(text, ("n",), "6") == text.replace("5", "6")
    assert sub.put(text, ("x",), "1", parents=False) == text[:-2] + ' ,"x":1}'
    assert sub.remove(text, ("b",)) == '{ "a" : 1.10 ,\n "é":"\\u00e9" , "n" : 5 }'
    assert sub.get(text, ("b", 0)) == "1e400"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", ()),
        ("a", ("a",)),
        ("a.b", ("a", "b")),
        ("a[0].b[-1]", ("a", 0, "b", -1)),
        ("[1][2]", (1, 2)),
        ("`a.b`.c", ("a.b", "c")),
        ("`a``b`", ("a`b",)),
        ("with space", ("with space",)),
    ],
)
def test_paths_are_parsed(path: str, expected: tuple[object, ...]) -> None:
    assert sub.parse_path(path.encode()) == expected


@pytest.mark.parametrize(
    "path", [".a", "a.", "a..b", "a.[0]", "a[", "a[x]", "a[-2]", "a]", "`a", "`a`b", "a[0]b", "\xff"]
)
def test_paths_that_mean_nothing_are_refused(path: str) -> None:
    with pytest.raises(SubdocumentError) as refused:
        sub.parse_path(path.encode("latin-1"))
    assert refused.value.status == Status.PATH_INVALID


DOCUMENT = '{"n":1,"s":"x","l":[1,"a",true],"o":{"in":{}},"big":92233720368547758080}'


@pytest.mark.parametrize(
    ("edit", "status"),
    [
        (lambda: sub.get(DOCUMENT, ("zz",)), Status.PATH_NOT_FOUND),
        (lambda: sub.get(DOCUMENT, ("l", 3)), Status.PATH_NOT_FOUND),
        (lambda: sub.get(DOCUMENT, ("n", "a")), Status.PATH_MISMATCH),
        (lambda: sub.get(DOCUMENT, ("l", "a")), Status.PATH_MISMATCH),
        (lambda: sub.count(DOCUMENT, ("n",)), Status.PATH_MISMATCH),
        (lambda: sub.put(DOCUMENT, ("n",), "2", parents=False, only_new=True), Status.PATH_EXISTS),
        (lambda: sub.put(DOCUMENT, ("x", "y"), "2", parents=False), Status.PATH_NOT_FOUND),
        (lambda: sub.put(DOCUMENT, ("l", 0), "2", parents=True), Status.PATH_INVALID),
        (lambda: sub.put(DOCUMENT, (), "2", parents=True), Status.PATH_INVALID),
        (lambda: sub.replace(DOCUMENT, (), "2"), Status.PATH_INVALID),
        (lambda: sub.remove(DOCUMENT, ("zz",)), Status.PATH_NOT_FOUND),
        (lambda: sub.push(DOCUMENT, ("n",), "2", first=True, parents=False), Status.PATH_MISMATCH),
        (lambda: sub.push(DOCUMENT, ("zz",), "2", first=True, parents=False), Status.PATH_NOT_FOUND),
        (lambda: sub.insert(DOCUMENT, ("l", 4), "2"), Status.PATH_NOT_FOUND),
        (lambda: sub.insert(DOCUMENT, ("l", -1), "2"), Status.PATH_INVALID),
        (lambda: sub.add_unique(DOCUMENT, ("l",), '"a"', parents=False), Status.PATH_EXISTS),
        (lambda: sub.add_unique(DOCUMENT, ("l",), "{}", parents=False), Status.VALUE_CANNOT_BE_INSERTED),
        (lambda: sub.add(DOCUMENT, ("s",), b"1", parents=False), Status.PATH_MISMATCH),
        (lambda: sub.add(DOCUMENT, ("n",), b"0", parents=False), Status.DELTA_INVALID),
        (lambda: sub.add(DOCUMENT, ("n",), b"1.5", parents=False), Status.DELTA_INVALID),
        (lambda: sub.add(DOCUMENT, ("big",), b"1", parents=False), Status.NUMBER_OUT_OF_RANGE),
        (lambda: sub.add(DOCUMENT, ("n",), b"9223372036854775807", parents=False), 0xC5),
        (lambda: sub.document(b"{"), Status.DOCUMENT_NOT_JSON),
        (lambda: sub.document(b"{} {}"), Status.DOCUMENT_NOT_JSON),
        (lambda: sub.document(b"NaN"), Status.DOCUMENT_NOT_JSON),
        (lambda: sub.document(b"\xff"), Status.DOCUMENT_NOT_JSON),
        (lambda: sub.document(b"[" * 100_000 + b"]" * 100_000), Status.DOCUMENT_TOO_DEEP),
        (lambda: sub.fragment(b"1,2"), Status.VALUE_CANNOT_BE_INSERTED),
        (lambda: sub.fragment(b""), Status.VALUE_CANNOT_BE_INSERTED),
        (lambda: sub.parse_path(b".".join([b"a"] * 33)), Status.PATH_TOO_DEEP),
    ],
)
def test_what_cannot_be_done_has_the_status_of_couchbase(edit: Callable[[], object], status: int) -> None:
    with pytest.raises(SubdocumentError) as refused:
        edit()
    assert refused.value.status == status


def test_parents_are_created_on_request() -> None:
    made = sub.put(DOCUMENT, ("a", "b", "c"), "1", parents=True)
    assert json.loads(made)["a"] == {"b": {"c": 1}}
    made = sub.push(DOCUMENT, ("o", "new"), "1,2", first=False, parents=True)
    assert json.loads(made)["o"] == {"in": {}, "new": [1, 2]}
    assert sub.add("{}", ("n",), b"-3", parents=False) == ('{"n":-3}', "-3")


# ── Over the wire ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def peer(shared_node: Node) -> Iterator[Peer]:
    with Peer(shared_node, None) as connected:
        yield connected


def one(peer: Peer, opcode: int, key: bytes, path: bytes, value: bytes = b"", *, flags: int = 0) -> Response:
    extras = struct.pack(">HB", len(path), flags)
    return peer.ask(opcode, key, path + value, extras=extras)


def step(opcode: int, path: bytes, value: bytes | None = None, *, flags: int = 0) -> bytes:
    if value is None:
        return struct.pack(">BBH", opcode, flags, len(path)) + path
    return struct.pack(">BBHI", opcode, flags, len(path), len(value)) + path + value


def test_one_path_is_read_and_edited(peer: Peer) -> None:
    peer.set(b"doc", b'{"a": [1, 2]}')
    assert one(peer, Opcode.SUBDOC_GET, b"doc", b"a[1]").value == b"2"
    assert one(peer, Opcode.SUBDOC_EXISTS, b"doc", b"b").status == Status.PATH_NOT_FOUND
    assert one(peer, Opcode.SUBDOC_GET_COUNT, b"doc", b"a").value == b"2"
    assert one(peer, Opcode.SUBDOC_DICT_UPSERT, b"doc", b"b", b'"x"').status == 0
    assert one(peer, Opcode.SUBDOC_COUNTER, b"doc", b"n", b"7").value == b"7"
    assert peer.get(b"doc").value == b'{"a": [1, 2],"b":"x","n":7}'
    assert one(peer, Opcode.SUBDOC_GET, b"absent", b"a").status == Status.KEY_NOT_FOUND
    assert one(peer, Opcode.SUBDOC_GET, b"doc", b"a", flags=0x80).status == Status.NOT_SUPPORTED


def test_many_paths_are_read_each_with_its_status(peer: Peer) -> None:
    peer.set(b"doc", b'{"a": 1}', expiration=1000)
    steps = step(Opcode.SUBDOC_GET, b"a") + step(Opcode.SUBDOC_GET, b"b") + step(Opcode.GET, b"")
    answer = peer.ask(Opcode.SUBDOC_MULTI_LOOKUP, b"doc", steps)
    assert answer.status == Status.SUBDOC_PATHS_FAILED
    assert (
        answer.value
        == bytes.fromhex("0000 00000001") + b"1" + bytes.fromhex("00c0 00000000 0000 00000008") + b'{"a": 1}'
    )
    about = peer.ask(
        Opcode.SUBDOC_MULTI_LOOKUP, b"doc", step(Opcode.SUBDOC_GET, b"$document.exptime", flags=4)
    )
    assert int(about.value[6:]) > 1_000_000_000
    attribute = peer.ask(Opcode.SUBDOC_MULTI_LOOKUP, b"doc", step(Opcode.SUBDOC_GET, b"_sync", flags=4))
    assert attribute.value == bytes.fromhex("00c0 00000000")


def test_edits_of_one_request_are_one_change_or_none(peer: Peer) -> None:
    peer.set(b"doc", b'{"a": 1}', expiration=1000)
    before = peer.ask(Opcode.GET_META, b"doc")
    good = step(Opcode.SUBDOC_DICT_UPSERT, b"b", b"2") + step(Opcode.SUBDOC_COUNTER, b"a", b"4")
    bad = good + step(Opcode.SUBDOC_REPLACE, b"zz", b"1")
    refused = peer.ask(Opcode.SUBDOC_MULTI_MUTATION, b"doc", bad)
    assert (refused.status, refused.value) == (Status.SUBDOC_PATHS_FAILED, b"\x02\x00\xc0")
    assert peer.get(b"doc").value == b'{"a": 1}'
    answer = peer.ask(Opcode.SUBDOC_MULTI_MUTATION, b"doc", good)
    assert (answer.status, answer.value) == (0, b"\x01\x00\x00\x00\x00\x00\x01" + b"5")
    assert peer.get(b"doc").value == b'{"a": 5,"b":2}'
    after = peer.ask(Opcode.GET_META, b"doc")
    assert after.extras[8:12] == before.extras[8:12], "the expiration stays"
    assert struct.unpack(">Q", after.extras[12:20])[0] == struct.unpack(">Q", before.extras[12:20])[0] + 1
    stale = peer.ask(Opcode.SUBDOC_MULTI_MUTATION, b"doc", good, cas=before.cas)
    assert stale.status == Status.KEY_EXISTS


def test_a_document_is_created_where_the_request_asks_for_it(peer: Peer) -> None:
    edit = step(Opcode.SUBDOC_DICT_UPSERT, b"a.b", b"1", flags=1)
    assert peer.ask(Opcode.SUBDOC_MULTI_MUTATION, b"new", edit).status == Status.KEY_NOT_FOUND
    assert peer.ask(Opcode.SUBDOC_MULTI_MUTATION, b"new", edit, extras=b"\1").status == 0
    assert peer.get(b"new").value == b'{"a":{"b":1}}'
    assert peer.ask(Opcode.SUBDOC_MULTI_MUTATION, b"new", edit, extras=b"\2").status == Status.KEY_EXISTS
    push = step(Opcode.SUBDOC_ARRAY_PUSH_LAST, b"", b"1,2")
    assert peer.ask(Opcode.SUBDOC_MULTI_MUTATION, b"list", push, extras=b"\1").status == 0
    assert peer.get(b"list").value == b"[1,2]"
    whole = step(Opcode.SET, b"", b'{"w": 1}')
    assert peer.ask(Opcode.SUBDOC_MULTI_MUTATION, b"new", whole, extras=bytes(4) + b"\1").status == 0
    assert peer.get(b"new").value == b'{"w": 1}'


@pytest.mark.parametrize(
    ("value", "extras", "status"),
    [
        (step(Opcode.SUBDOC_DICT_UPSERT, b"a", b"1", flags=4), b"", Status.NOT_SUPPORTED),
        (step(Opcode.SUBDOC_GET, b"a", b""), b"", Status.SUBDOC_INVALID_COMBINATION),
        (step(Opcode.SUBDOC_DICT_UPSERT, b"a", b"1") * 17, b"", Status.SUBDOC_INVALID_COMBINATION),
        (step(Opcode.SUBDOC_DICT_UPSERT, b"a", b"1")[:-1], b"", Status.INVALID_ARGUMENTS),
        (step(Opcode.SUBDOC_DICT_UPSERT, b"a", b"1"), b"\x08", Status.NOT_SUPPORTED),
        (b"", b"", Status.INVALID_ARGUMENTS),
    ],
)
def test_requests_that_are_not_supported_change_nothing(
    peer: Peer, value: bytes, extras: bytes, status: int
) -> None:
    peer.set(b"kept", b"{}")
    answer = peer.ask(Opcode.SUBDOC_MULTI_MUTATION, b"kept", value, extras=extras)
    # An empty list is a request without the value that it needs.
    assert answer.status in (status, Status.SUBDOC_INVALID_COMBINATION if not value else status)
    assert peer.get(b"kept").value == b"{}"

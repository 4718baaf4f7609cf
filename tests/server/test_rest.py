"""The pages of Couchbase's REST interface that its clients ask for, over real HTTP."""

from __future__ import annotations

import base64
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import pytest

from tests.nodes import Node
from tests.server.peers import Peer
from upper.server.auth import Role, User, Users, save_users
from upper.wire.codes import Opcode, Status

PASSWORD = "a secret: with a colon"


class Rest:
    """A node with a REST port, and how to ask it."""

    def __init__(self, node: Node, user: str = "") -> None:
        self.node, self._user = node, user
        port = node.ready["rest_port"]
        assert isinstance(port, int)
        self.port = port

    def headers(self, password: str = PASSWORD) -> dict[str, str]:
        if not self._user:
            return {}
        return {"Authorization": "Basic " + base64.b64encode(f"{self._user}:{password}".encode()).decode()}

    def get(self, path: str, **headers: str) -> Any:
        url = f"http://127.0.0.1:{self.port}{path}"
        asked = urllib.request.Request(url, headers=headers or self.headers())
        with urllib.request.urlopen(asked, timeout=20) as answer:
            assert answer.headers["Content-Type"] == "application/json"
            return json.loads(answer.read())

    def refused(self, path: str, **headers: str) -> int:
        with pytest.raises(urllib.error.HTTPError) as caught:
            self.get(path, **headers)
        assert json.loads(caught.value.read())["errors"]
        return caught.value.code


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    home: Path = tmp_path_factory.mktemp("rest")
    save_users(home / "users.json", Users({"ann": User.new("ann", PASSWORD, Role.READ)}))
    with Node(home / "data", "--users", str(home / "users.json"), "--rest-port", "0") as node:
        yield Rest(node, "ann")


def test_the_pages_lead_from_the_pool_to_the_map(rest: Rest) -> None:
    """The way that go-couchbase and the tools of Couchbase 3 take."""
    pools = rest.get("/pools")
    assert int(pools["implementationVersion"].split(".")[0]) >= 6
    pool = rest.get(pools["pools"][0]["uri"])
    (bucket,) = rest.get(pool["buckets"]["uri"])
    again = rest.get(bucket["uri"])
    assert again == bucket
    assert (bucket["name"], bucket["bucketType"], bucket["nodeLocator"]) == ("default", "membase", "vbucket")
    (node,) = bucket["nodes"]
    assert (node["status"], node["clusterMembership"]) == ("healthy", "active")
    assert node["hostname"] == f"127.0.0.1:{rest.port}"
    assert node["ports"]["direct"] == rest.node.port
    assert bucket["vBucketServerMap"]["vBucketMap"] == [[0]] * 16
    terse = rest.get("/pools/default/b/default")
    assert terse["vBucketServerMap"] == bucket["vBucketServerMap"]
    assert terse["nodesExt"][0]["services"] == {"kv": rest.node.port, "mgmt": rest.port}
    services = rest.get("/pools/default/nodeServices")
    assert (services["rev"], services["nodesExt"]) == (terse["rev"], terse["nodesExt"])
    assert rest.get("/whoami")["id"] == "ann"


def test_only_users_are_answered(rest: Rest) -> None:
    for headers in (
        {"X": "nothing"},
        {"Authorization": "Basic !!!"},
        {"Authorization": "Bearer token"},
        rest.headers("wrong"),
    ):
        assert rest.refused("/pools/default/b/default", **headers) == 401


def test_what_does_not_exist_is_named(rest: Rest) -> None:
    for path in ("/", "/pools/other", "/pools/default/b/other", "/pools/default/buckets/other"):
        assert rest.refused(path) == 404


def test_too_many_wrong_passwords_are_slowed_down(rest: Rest) -> None:
    codes = {rest.refused("/whoami", **Rest(rest.node, "bob").headers("wrong")) for _ in range(25)}
    assert codes == {401, 503}


@pytest.mark.parametrize("page", ["bs", "bucketsStreaming"])
def test_a_streaming_page_sends_the_map_again_when_it_has_changed(tmp_path: Path, page: str) -> None:
    """The client of the page is Couchbase's: chunks, with four line feeds behind each map."""
    with (
        Node(tmp_path / "data", "--rest-port", "0", partitions=4) as node,
        Peer(node, None) as peer,
        socket.create_connection(("127.0.0.1", Rest(node).port), timeout=20) as client,
    ):
        client.sendall(f"GET /pools/default/{page}/default HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        stream = client.makefile("rb")
        assert stream.readline().startswith(b"HTTP/1.1 200")
        while stream.readline().strip():
            pass
        first = chunk(stream)
        assert first["vBucketServerMap"]["vBucketMap"] == [[0]] * 4
        assert peer.ask(Opcode.SET_VBUCKET_STATE, extras=b"\4", partition=3).status == Status.OK
        second = chunk(stream)
        assert second["vBucketServerMap"]["vBucketMap"] == [[0], [0], [0], [-1]]
        assert page != "bs" or second["rev"] > first["rev"]


def chunk(stream: BufferedReader) -> Any:
    """The next map of a streaming page."""
    data = stream.read(int(stream.readline(), 16))
    assert stream.readline() == b"\r\n"
    assert data.endswith(b"\n\n\n\n")
    return json.loads(data)


def test_without_the_option_there_is_no_port(tmp_path: Path) -> None:
    with Node(tmp_path / "data") as node:
        assert node.ready["rest_port"] is None

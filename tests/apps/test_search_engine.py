"""The HTTP calls to OpenSearch, with a server that answers as a test sets it: busy, broken or silent."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from upper.apps.push.search_engine import DocumentWrite, HttpEngine, parse_opensearch
from upper.apps.push.tasks import TargetUnavailable
from upper.errors import AuthenticationFailed, InvalidArguments


class Server(ThreadingHTTPServer):
    """Answers from a list: a status and a body, or None to hang up."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, Any] | None] = []
        self.requests: list[tuple[str, str | None, bytes]] = []

    def items(self, *statuses: int) -> None:
        reason = {"type": "es_rejected_execution_exception", "reason": "the queue is full"}
        items = [
            {"index": {"status": status} | ({"error": reason} if status >= 300 else {})}
            for status in statuses
        ]
        self.answers.append((200, {"items": items}))


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.server.requests.append((self.path, self.headers.get("Authorization"), body))
        answer = self.server.answers.pop(0)
        if answer is None:
            self.close_connection = True
            return
        status, value = answer
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def engine(server: Server, waits: list[float]) -> Iterator[HttpEngine]:
    engine = parse_opensearch(f"opensearch://ann@127.0.0.1:{server.server_port}", lambda user: f"{user}'s")
    engine.sleep = waits.append
    yield engine
    engine.close()


WRITES = [DocumentWrite(f"k{number}", number, b"{}") for number in range(1, 5)]


def test_only_documents_that_were_refused_are_sent_again_after_growing_waits(
    server: Server, engine: HttpEngine, waits: list[float]
) -> None:
    server.items(201, 429, 409, 503)
    server.items(429, 200)
    server.items(429)
    server.items(200)
    assert [one.status for one in engine.bulk("shop", WRITES)] == [201, 200, 409, 200]
    sent = [body.count(b'"_id"') for _, _, body in server.requests]
    assert sent == [4, 2, 1, 1]
    assert b'"k2"' in server.requests[3][2]
    assert len(waits) == 3
    assert 0.1 <= waits[0] <= 0.2 <= waits[1] <= 0.4 <= waits[2] <= 0.8


def test_a_busy_or_silent_cluster_is_asked_again_and_given_up_in_the_end(
    server: Server, engine: HttpEngine, waits: list[float]
) -> None:
    server.answers += [(429, {}), None, (503, {})]
    server.items(201)
    assert [one.status for one in engine.bulk("shop", WRITES[:1])] == [201]
    assert len(waits) == 3
    server.answers += [(503, {})] * 100
    with pytest.raises(TargetUnavailable, match=r"does not answer \(HTTP status 503\)"):
        engine.bulk("shop", WRITES)
    assert sum(waits) < 2 * engine.patience


def test_documents_that_stay_refused_end_the_call(server: Server, engine: HttpEngine) -> None:
    for _ in range(100):
        server.items(429)
    with pytest.raises(TargetUnavailable, match="the queue is full"):
        engine.bulk("shop", WRITES[:1])


def test_a_document_that_breaks_the_cluster_is_given_back_after_some_tries(
    server: Server, engine: HttpEngine
) -> None:
    for _ in range(4):
        server.items(500)
    assert [one.status for one in engine.bulk("shop", WRITES[:1])] == [500]
    assert not server.answers


def test_a_request_that_is_too_large_is_halved_and_a_single_document_given_back(
    server: Server, engine: HttpEngine
) -> None:
    server.answers += [(413, {}), (413, {})]
    server.items(201)
    server.answers.append((413, {}))
    server.items(201, 201)
    assert [one.status for one in engine.bulk("shop", WRITES)] == [201, 413, 201, 201]


def test_another_node_is_asked_when_one_is_away(server: Server, waits: list[float]) -> None:
    url = f"opensearch://127.0.0.1:1,127.0.0.1:{server.server_port}"
    engine = parse_opensearch(url, lambda user: "")
    engine.sleep = waits.append
    server.items(201)
    assert [one.status for one in engine.bulk("shop", WRITES[:1])] == [201]
    assert len(waits) == 1
    engine.close()


def test_the_password_is_in_a_header_and_in_no_message(server: Server, engine: HttpEngine) -> None:
    server.answers.append((401, {}))
    with pytest.raises(AuthenticationFailed, match="--target-password-file") as error:
        engine.bulk("shop", WRITES)
    assert "ann's" not in str(error.value) + repr(engine)
    assert server.requests[0][1] == "Basic YW5uOmFubidz"
    assert pickle.loads(pickle.dumps(engine)).password == "ann's"


def test_an_answer_of_another_program_is_reported(server: Server, engine: HttpEngine) -> None:
    server.answers.append((404, {"error": "no such page"}))
    with pytest.raises(TargetUnavailable, match="no such page; check the index"):
        engine.bulk("shop", WRITES)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("opensearch://ann:secret@127.0.0.1", "visible to other users"),
        ("opensearch://ann@10.0.0.9", "opensearchs://"),
        ("opensearch://10.0.0.9/shop", "--index"),
        ("opensearch://", "write the target as opensearch://"),
        ("opensearch://10.0.0.9:many", "write the target as opensearch://"),
        ("opensearch://10.0.0.9?ca=a.pem", "which is TLS"),
        ("opensearch://10.0.0.9?cb=a.pem", "write the target as opensearch://"),
    ],
)
def test_a_url_that_is_unsafe_or_wrong_is_refused(url: str, why: str) -> None:
    with pytest.raises(InvalidArguments, match=why) as error:
        parse_opensearch(url, lambda user: "")
    assert "secret" not in str(error.value)

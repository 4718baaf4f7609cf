"""A push to a real OpenSearch node: documents, positions, a rollback, rejected documents, a restore."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

import upper
from tests.apps.push_lake import push_through_a_rollback
from tests.apps.push_story import PARTITIONS, Steps, Story, live_through, stories
from tests.apps.replica_model import ReplicaBucket
from tests.nodes import Node
from tests.search_engines import opensearch
from tests.server.certificate import made
from tests.tls_proxy import tls_proxy
from upper.apps.push import search_engine
from upper.apps.push.opensearch import OURS, IndexOptions, IndexTarget, id_of, key_of
from upper.apps.push.rounds import Push
from upper.apps.push.search_engine import CONFLICT, DocumentWrite, HttpEngine, parse_opensearch
from upper.apps.push.tasks import PushResult
from upper.errors import InvalidArguments
from upper.pipeline.local import LocalRunner
from upper.pipeline.source import BucketSource

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("node"), partitions=16) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with opensearch(tmp_path_factory.mktemp("opensearch")) as address:
        yield address


@pytest.fixture
def engine(server: str) -> Iterator[HttpEngine]:
    engine = engine_of(server)
    yield engine
    engine.close()


def engine_of(server: str) -> HttpEngine:
    return parse_opensearch(f"opensearch://{server}", lambda user: "")


def target(server: str, index: str, partitions: int = 16) -> IndexTarget:
    return IndexTarget(engine_of(server), IndexOptions(index, "test", partitions))


def settle(push: Push) -> list[PushResult]:
    done: list[Any] = []
    for _ in range(6):
        done.append(push.round())
        if not push.incomplete and not done[-1].rows:
            break
    return done


def documents(engine: HttpEngine, index: str) -> dict[bytes, dict[str, Any]]:
    ids = list(engine.find(index, {f"{OURS}.name": "test"}, by=f"{OURS}.key"))
    return {key_of(id_): dict(found.source) for id_, found in engine.get(index, ids).items()}


def test_an_index_follows_a_bucket_through_a_rollback(
    server: str, engine: HttpEngine, node: Node, tmp_path: Path
) -> None:
    with upper.connect(node.url) as bucket:
        bucket.set_many(
            (f"k{n}", json.dumps({"n": n, "title": f"number {n}"})) for n in range(6_000)
        )  # for several workers
        bucket.delete_many(f"k{n}" for n in range(50))
        bucket.set(b"\xff\x00", b"\xfe")
        source = BucketSource(node.url)
        settle(Push(source, target(server, "shop"), LocalRunner()))

        def true() -> dict[bytes, tuple[str, str]]:
            found = bucket.metadata_many(bucket.keys(""))
            return {key: (str(meta.revision), str(meta.cas)) for key, meta in found.items()}

        def indexed() -> dict[bytes, tuple[str, str]]:
            return {
                key: (found[OURS]["revision"], found[OURS]["cas"])
                for key, found in documents(engine, "shop").items()
            }

        assert indexed() == true()
        found = documents(engine, "shop")
        assert {name: found[b"k99"][name] for name in ("n", "title")} == {"n": 99, "title": "number 99"}
        assert found[b"\xff\x00"]["base64"] == "/g=="
        push = Push(source, target(server, "shop"), LocalRunner())
        assert sum(done.rows for done in settle(push)) == 0, "positions are stored: nothing is sent twice"
        kept = bucket.seqnos()
        for _ in range(2):
            bucket.set_many((f"k{n}", '{"n": "lost"}') for n in range(100, 150))
        bucket.set("new", '{"lost": true}')
        bucket.delete("k200")
        settle(push)
        assert indexed() == true()
        for partition, seqno in kept.items():
            bucket.promote(partition, to=seqno)
        settle(Push(source, target(server, "shop"), LocalRunner()))
        assert indexed() == true()
        assert documents(engine, "shop")[b"k120"]["n"] == 120
        source.close()
        # "n" is a number in this index: these are rejected, and what follows them is not.
        bucket.set_many((f"k{n}", '{"n": "no number"}') for n in range(60, 70))
        bucket.set("by the command", '{"n": 7}')
        rejected = tmp_path / "rejected.jsonl"
        command = [
            *(sys.executable, "-m", "upper", "push", node.url, f"opensearch://{server}"),
            *("--index", "shop", "--name", "test", "--once", "--local", "--json"),
            *("--rejected", str(rejected)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["rows"] == 11
        assert json.loads(done.stdout)["rejected"] == 10
        lines = [json.loads(line) for line in rejected.read_text().splitlines()]
        assert {line["key"] for line in lines} == {f"k{n}" for n in range(60, 70)}
        assert all("mapper_parsing_exception" in line["error"] for line in lines)
        assert indexed() == true()
        found = documents(engine, "shop")
        assert found[b"by the command"]["n"] == 7
        assert "n" not in found[b"k65"], "no older version stays"
        assert "mapper_parsing_exception" in found[b"k65"][OURS]["error"]


def test_an_index_that_was_restored_from_a_snapshot_is_brought_to_the_source(
    server: str, engine: HttpEngine, node: Node, tmp_path: Path
) -> None:
    def call(method: str, path: str, **body: Any) -> None:
        status, answer = engine._call(method, path, body)
        assert status == 200, answer

    with upper.connect(node.url) as bucket:
        source = BucketSource(node.url)
        push = Push(source, target(server, "restored"), LocalRunner())
        bucket.set_many((f"r{n}", json.dumps({"n": n})) for n in range(50))
        settle(push)
        call("PUT", "/_snapshot/here", type="fs", settings={"location": "here"})
        call("PUT", "/_snapshot/here/one?wait_for_completion=true", indices="restored")
        bucket.set_many((f"r{n}", '{"n": -1}') for n in range(20))
        bucket.delete_many(f"r{n}" for n in range(20, 40))
        settle(push)
        call("POST", "/restored/_close")
        call("POST", "/_snapshot/here/one/_restore?wait_for_completion=true", indices="restored")
        assert b"r30" in documents(engine, "restored")
        settle(push)
        found = documents(engine, "restored")
        assert {key for key in found if key.startswith(b"r")} == set(bucket.keys("r"))
        assert {found[f"r{n}".encode()]["n"] for n in range(20)} == {-1}
        source.close()


def test_a_lake_is_followed_through_a_rollback(server: str, engine: HttpEngine, tmp_path: Path) -> None:
    def found() -> dict[bytes, int]:
        return {key: int(each[OURS]["cas"]) for key, each in documents(engine, "of-a-lake").items()}

    push_through_a_rollback(tmp_path, [f"opensearch://{server}", "--index", "of-a-lake"], found)


def push_over_tls(node: Node, target: str, index: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "upper", "push", node.url, target, "--index", index, "--name", "test"]
    return subprocess.run(
        [*command, "--once", "--local"], capture_output=True, text=True, timeout=300, check=False
    )


def test_documents_are_pushed_over_tls_to_a_server_that_is_trusted(
    server: str, engine: HttpEngine, node: Node, tmp_path: Path
) -> None:
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
    certificate, key = made(tmp_path / "right", subject="/CN=search")
    other, _ = made(tmp_path / "wrong")
    with upper.connect(node.url) as bucket, tls_proxy(server, certificate, key) as secure:
        bucket.set_many((f"tls{n}", json.dumps({"n": n, "text": "x" * 1000})) for n in range(500))
        done = push_over_tls(node, f"opensearchs://{secure}?ca={certificate}", "secure")
        assert done.returncode == 0, done.stderr
        found = documents(engine, "secure")
        assert {key: each["n"] for key, each in found.items() if key.startswith(b"tls")} == {
            f"tls{n}".encode(): n for n in range(500)
        }
        port = secure.rpartition(":")[2]
        for target_url, printed in (
            (f"opensearchs://{secure}?ca={other}", f"the certificate of {secure} is not trusted ("),
            (f"opensearchs://{secure}", "self-signed certificate); name its authority: ?ca=FILE"),
            (f"opensearchs://localhost:{port}?ca={certificate}", "write the host as its certificate names"),
            (f"opensearchs://{secure}?ca={key}", f"{key} cannot be used (no certificate is in it)"),
            (f"opensearchs://{secure}?ca=/missing", "/missing cannot be used (No such file or directory)"),
            (f"opensearchs://{server}", f"{server} does not accept TLS; write opensearch:// if it is plain"),
        ):
            done = push_over_tls(node, target_url, "refused")
            assert done.returncode == 2, (target_url, done.stderr)
            assert printed in done.stderr
            assert len(done.stderr.splitlines()) == 1
    assert engine.identity("refused") == "", "nothing is sent to a server that is not trusted"


@settings(max_examples=6)
@given(story=stories)
def test_an_index_ends_equal_to_a_source_that_remembers_everything(server: str, story: Story) -> None:
    """The stories of `test_opensearch_model`, without crashes, against the versions of a real index."""
    source, engine = ReplicaBucket(PARTITIONS, first_cas=1000), engine_of(server)
    for index in ("story", "story.upper"):
        engine._call("DELETE", f"/{index}")
    live_through(lambda: target(server, "story", PARTITIONS), Steps(), source, story)
    found = {key: int(each[OURS]["cas"]) for key, each in documents(engine, "story").items()}
    assert found == {key: cas for key, (_, cas, _) in source.live().items()}
    engine.close()


def test_a_plain_seqno_is_refused_after_a_rollback_and_one_with_an_epoch_is_not(engine: HttpEngine) -> None:
    engine.prepare("versions", {"mappings": {}})
    write = [
        DocumentWrite("k", 100, b"{}"),
        DocumentWrite("k", 7, b"{}"),
        DocumentWrite("k", (1 << 48) | 7, b"{}"),
    ]
    assert [one.status for one in engine.bulk("versions", write)] == [201, CONFLICT, 200]


def test_requests_that_are_too_large_are_split(engine: HttpEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.prepare("large", {"settings": {"index.number_of_replicas": 0}, "mappings": {"dynamic": False}})
    monkeypatch.setattr(search_engine, "BULK_BYTES", 1 << 30)
    value = b'{"a":"%s"}' % (b"x" * (4 << 20))
    outcomes = engine.bulk("large", [DocumentWrite(f"k{n}", 1, value) for n in range(4)])  # 10 MB are allowed
    assert [one.status for one in outcomes] == [201] * 4


def test_an_alias_of_two_indexes_and_a_bad_definition_are_refused(engine: HttpEngine) -> None:
    engine.prepare("left", {"mappings": {}})
    engine.prepare("right", {"mappings": {}})
    add = [{"add": {"index": name, "alias": "both"}} for name in ("left", "right")]
    assert engine._call("POST", "/_aliases", {"actions": add})[0] == 200
    with pytest.raises(InvalidArguments, match="stands for 2 indexes"):
        engine.identity("both")
    engine.prepare("other", {"mappings": {"properties": {OURS: {"type": "keyword"}}}})
    with pytest.raises(InvalidArguments, match="cannot be used"):
        IndexTarget(engine, IndexOptions("other", "test", 16)).load()
    assert id_of(b"k") == "k"

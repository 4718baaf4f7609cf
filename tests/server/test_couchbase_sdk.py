"""Couchbase's own Python client, unchanged, against a node: what everyday code does with it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tests.server.certificate as certificates
import upper
from tests.nodes import Node
from upper.server.auth import Role, User, Users, save_users

pytest.importorskip("couchbase", reason="Couchbase's Python client is not installed")

from couchbase import subdocument as sd
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.durability import DurabilityLevel, ServerDurability
from couchbase.exceptions import (
    AuthenticationException,
    CasMismatchException,
    DocumentExistsException,
    DocumentLockedException,
    DocumentNotFoundException,
    PathExistsException,
    PathNotFoundException,
    UnAmbiguousTimeoutException,
    UnsupportedOperation,
)
from couchbase.options import (
    ClusterOptions,
    ClusterTimeoutOptions,
    DeltaValue,
    GetOptions,
    IncrementOptions,
    MutateInOptions,
    RemoveOptions,
    ReplaceOptions,
    SignedInt64,
    UpsertOptions,
)

PASSWORD = "a secret"
SECONDS = timedelta(seconds=30)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    home = tmp_path_factory.mktemp("sdk")
    user = User.new("ann", PASSWORD, Role.everything())
    save_users(home / "users.json", Users({"ann": user}))
    with Node(home / "data", "--users", str(home / "users.json"), partitions=1024) as node:
        yield node


def connected(node: Node, password: str = PASSWORD, wait: timedelta = SECONDS) -> Any:
    limits = ClusterTimeoutOptions(bootstrap_timeout=wait, connect_timeout=wait, kv_timeout=SECONDS)
    options = ClusterOptions(PasswordAuthenticator("ann", password), timeout_options=limits)
    return Cluster(f"couchbase://127.0.0.1:{node.port}", options)


@pytest.fixture(scope="module")
def collection(served: Node) -> Iterator[Any]:
    cluster = connected(served)
    yield cluster.bucket("default").default_collection()
    cluster.close()


def test_a_wrong_password_is_refused(served: Node) -> None:
    with pytest.raises((AuthenticationException, UnAmbiguousTimeoutException)):
        connected(served, "wrong", timedelta(seconds=2)).bucket("default")


def test_over_tls_documents_are_written_and_read(tmp_path: Path) -> None:
    """PLAIN without asking first, and the ports that the map names for TLS."""
    certificate, key = certificates.made(tmp_path)
    save_users(tmp_path / "users.json", Users({"ann": User.new("ann", PASSWORD, Role.everything())}))
    options = ("--users", str(tmp_path / "users.json"), "--tls-cert", str(certificate), "--tls-key", str(key))
    login = PasswordAuthenticator("ann", PASSWORD, cert_path=str(certificate))
    limits = ClusterTimeoutOptions(bootstrap_timeout=SECONDS, connect_timeout=SECONDS, kv_timeout=SECONDS)
    with Node(tmp_path / "data", *options, partitions=64) as node:
        cluster = Cluster(
            f"couchbases://127.0.0.1:{node.port}", ClusterOptions(login, timeout_options=limits)
        )
        collection = cluster.bucket("default").default_collection()
        assert collection.upsert_multi({f"doc-{n}": {"n": n} for n in range(100)}).all_ok
        assert all(collection.get(f"doc-{n}").content_as[dict] == {"n": n} for n in range(100))
        cluster.close()


def test_documents_are_written_read_replaced_and_removed(collection: Any) -> None:
    stored = collection.upsert("doc", {"a": 1})
    assert stored.cas
    assert collection.get("doc").content_as[dict] == {"a": 1}
    with pytest.raises(DocumentExistsException):
        collection.insert("doc", {})
    replaced = collection.replace("doc", {"a": 2}, ReplaceOptions(cas=stored.cas))
    with pytest.raises(CasMismatchException):
        collection.replace("doc", {"a": 3}, ReplaceOptions(cas=stored.cas))
    assert collection.get("doc").cas == replaced.cas
    assert collection.exists("doc").exists
    collection.remove("doc")
    assert not collection.exists("doc").exists
    with pytest.raises(DocumentNotFoundException):
        collection.get("doc")


def test_many_documents_reach_their_partitions(collection: Any, served: Node) -> None:
    assert collection.upsert_multi({f"many{n}": n for n in range(1000)}).all_ok
    found = collection.get_multi([f"many{n}" for n in range(1000)])
    assert found.all_ok
    url = served.url.replace("upr://", "upr://ann@")
    with upper.connect(url, password=PASSWORD) as bucket:
        ours = bucket.get_many(f"many{n}" for n in range(1000))
    assert {key: item.value for key, item in ours.items()} == {f"many{n}": b"%d" % n for n in range(1000)}


def test_expiry_is_set_read_and_kept(collection: Any) -> None:
    collection.upsert("short", {"a": 1}, UpsertOptions(expiry=timedelta(hours=1)))
    with_expiry = collection.get("short", GetOptions(with_expiry=True))
    assert with_expiry.content_as[dict] == {"a": 1}
    assert with_expiry.expiryTime is not None
    collection.touch("short", timedelta(hours=2))
    later = collection.get("short", GetOptions(with_expiry=True)).expiryTime
    assert later > with_expiry.expiryTime
    assert collection.get_and_touch("short", timedelta(hours=3)).content_as[dict] == {"a": 1}


def test_an_expiry_is_preserved_on_request(collection: Any) -> None:
    def expiry() -> Any:
        return collection.get("plain", GetOptions(with_expiry=True)).expiryTime

    collection.upsert("plain", {"n": 1}, UpsertOptions(expiry=timedelta(hours=1)))
    first = expiry()
    collection.upsert("plain", {"n": 2}, UpsertOptions(preserve_expiry=True))
    collection.replace("plain", {"n": 3}, ReplaceOptions(preserve_expiry=True))
    collection.mutate_in("plain", [sd.upsert("n", 4)], MutateInOptions(preserve_expiry=True))
    assert (collection.get("plain").content_as[dict], expiry()) == ({"n": 4}, first)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_node_that_is_alone_is_the_majority(collection: Any, level: int) -> None:
    required = ServerDurability(DurabilityLevel(level))
    collection.upsert("durable", level, UpsertOptions(durability=required))
    collection.replace("durable", -level, ReplaceOptions(durability=required))
    assert collection.get("durable").content_as[int] == -level
    collection.remove("durable", RemoveOptions(durability=required))


def test_what_is_not_supported_is_reported_as_such(collection: Any) -> None:
    collection.upsert("plain", {"n": 1})
    with pytest.raises(UnsupportedOperation):
        collection.mutate_in("plain", [sd.upsert("attribute", 1, xattr=True)])
    assert collection.get("plain").content_as[dict] == {"n": 1}


def test_locks_hold_until_they_are_released(collection: Any) -> None:
    collection.upsert("locked", 1)
    held = collection.get_and_lock("locked", timedelta(seconds=20))
    with pytest.raises((DocumentLockedException, UnAmbiguousTimeoutException)):
        collection.upsert("locked", 2, UpsertOptions(timeout=timedelta(seconds=1)))
    collection.unlock("locked", held.cas)
    collection.upsert("locked", 2)


def test_counters_and_appended_bytes(collection: Any) -> None:
    counter = collection.binary()
    options = IncrementOptions(initial=SignedInt64(5), delta=DeltaValue(2))
    assert counter.increment("visits", options).content == 5
    assert counter.increment("visits", options).content == 7
    assert counter.decrement("visits").content == 6
    counter.append("visits", "0")
    counter.prepend("visits", "1")
    assert collection.get("visits").content_as[int] == 160


def test_parts_of_documents_are_read_and_edited(collection: Any) -> None:
    collection.upsert("parts", {"a": 1, "l": [1, 2], "n": {"x": "y"}})
    found = collection.lookup_in("parts", [sd.get("a"), sd.exists("n.x"), sd.exists("no"), sd.count("l")])
    assert (found.content_as[int](0), found.exists(1), found.exists(2)) == (1, True, False)
    assert found.content_as[int](3) == 2
    collection.mutate_in(
        "parts",
        [
            sd.upsert("n.z", 5),
            sd.array_append("l", 3),
            sd.array_prepend("l", 0),
            sd.increment("a", 3),
            sd.remove("n.x"),
            sd.array_addunique("l", 9),
            sd.insert("q.w", "deep", create_parents=True),
        ],
    )
    expected = {"a": 4, "l": [0, 1, 2, 3, 9], "n": {"z": 5}, "q": {"w": "deep"}}
    assert collection.get("parts").content_as[dict] == expected
    assert collection.get("parts", GetOptions(project=["a", "q.w"])).content_as[dict] == {
        "a": 4,
        "q": {"w": "deep"},
    }
    with pytest.raises(PathNotFoundException):
        collection.mutate_in("parts", [sd.replace("no", 1)])
    with pytest.raises(PathExistsException):
        collection.mutate_in("parts", [sd.insert("a", 1)])
    collection.mutate_in(
        "made", [sd.upsert("a", 1)], MutateInOptions(store_semantics=sd.StoreSemantics.UPSERT)
    )
    assert collection.get("made").content_as[dict] == {"a": 1}


def test_replica_reads_and_other_collections(collection: Any, served: Node) -> None:
    collection.upsert("copied", 1)
    assert collection.get_any_replica("copied").content_as[int] == 1
    cluster = connected(served)
    try:
        with pytest.raises(UnsupportedOperation):
            cluster.bucket("default").scope("other").collection("one").upsert("k", 1)
    finally:
        cluster.close()

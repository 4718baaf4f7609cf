"""The agreement stores, embedded and etcd, also with TLS and a login: the same promises, the same tests."""

from __future__ import annotations

import multiprocessing
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.cluster.etcd import Etcd, SecuredEtcd, free_port
from upper.cluster.agreement import ABSENT, AgreementStore, Unavailable
from upper.cluster.agreement import location as locations
from upper.cluster.agreement.embedded import EmbeddedStore
from upper.cluster.agreement.etcd import EtcdStore
from upper.errors import ClusterError

Open: TypeAlias = Callable[[], AgreementStore]
spawned = multiprocessing.get_context("spawn")


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    etcd = Etcd(tmp_path_factory.mktemp("etcd"))
    yield etcd
    etcd.stop()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredEtcd]:
    etcd = SecuredEtcd(tmp_path_factory.mktemp("secured"))
    yield etcd
    etcd.stop()


def opened(kind: str, place: str) -> AgreementStore:
    if kind == "embedded":
        return EmbeddedStore(Path(place))
    if kind == "etcd":
        return locations.open_store(place)
    place, _, directory = place.partition(" ")
    tls = ssl.create_default_context(cafile=f"{directory}/cert.pem")
    tls.load_cert_chain(f"{directory}/cert.pem", f"{directory}/key.pem")
    return locations.open_store(place, tls=tls, user=SecuredEtcd.user, password=SecuredEtcd.password)


@pytest.fixture(params=["embedded", "etcd", "etcd with TLS and a login"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """The kind of the store, and where it is, as text that another process can be given."""
    if request.param == "embedded":
        return request.param, str(tmp_path / "agreement")
    if request.param == "etcd":
        port = request.getfixturevalue("etcd").port
        return request.param, f"etcd://127.0.0.1:{port}/{tmp_path.name}"
    etcd = request.getfixturevalue("secured")
    return request.param, f"etcds://127.0.0.1:{etcd.port}/one-{tmp_path.name} {etcd.certificate.parent}"


@pytest.fixture
def open_store(place: tuple[str, str]) -> Iterator[Open]:
    stores: list[AgreementStore] = []

    def another() -> AgreementStore:
        stores.append(opened(*place))
        return stores[-1]

    yield another
    for store in stores:
        store.close()


def test_a_key_is_written_only_under_the_revision_that_was_read(open_store: Open) -> None:
    store = open_store()
    first = store.put_if("map", b"one", revision=ABSENT)
    assert first is not None
    assert store.put_if("map", b"other", revision=ABSENT) is None, "it exists by now"
    second = store.put_if("map", b"two", revision=first)
    assert second is not None
    assert second > first
    assert store.put_if("map", b"three", revision=first) is None, "another client wrote since"
    found, revision = store.read("map")
    assert found["map"] == (b"two", second)
    assert revision >= second


def test_reading_a_prefix_returns_its_keys_alone(open_store: Open) -> None:
    store = open_store()
    for key in ("nodes/a", "nodes/b", "nodesx", "map"):
        assert store.put_if(key, key.encode(), revision=ABSENT)
    assert set(store.read("nodes/")[0]) == {"nodes/a", "nodes/b"}


def test_a_key_is_deleted_only_under_the_revision_that_was_read(open_store: Open) -> None:
    store = open_store()
    revision = store.put_if("key", b"", revision=ABSENT)
    assert revision is not None
    assert not store.delete_if("key", revision=revision + 1)
    assert not store.delete_if("key", revision=ABSENT)
    assert store.delete_if("key", revision=revision)
    assert store.read("key")[0] == {}
    assert store.put_if("key", b"again", revision=ABSENT), "it does not exist any more"


def test_a_lease_that_is_not_renewed_ends_with_its_keys(open_store: Open) -> None:
    store, other = open_store(), open_store()
    lease = store.grant(1)
    assert store.put_if("live/a", b"", revision=ABSENT, lease=lease)
    _, revision = other.read("live/")
    assert other.wait("live/", after=revision, seconds=20), "the end of a lease wakes waiting calls"
    assert other.read("live/")[0] == {}
    assert not store.renew(lease)
    with pytest.raises(ClusterError):
        store.put_if("live/a", b"", revision=ABSENT, lease=lease)


def test_a_lease_that_is_renewed_keeps_its_keys(open_store: Open) -> None:
    store = open_store()
    lease = store.grant(2)
    assert store.put_if("live/a", b"", revision=ABSENT, lease=lease)
    ends = time.monotonic() + 4
    while time.monotonic() < ends:
        assert store.renew(lease)
        threading.Event().wait(0.2)
    assert "live/a" in store.read("live/")[0]
    store.revoke(lease)
    assert store.read("live/")[0] == {}
    store.revoke(lease)


def test_waiting_ends_with_a_change_and_without_one(open_store: Open) -> None:
    store, other = open_store(), open_store()
    _, revision = store.read("")
    assert not store.wait("map", after=revision, seconds=0.1)
    writer = threading.Timer(0.2, lambda: other.put_if("map", b"1", revision=ABSENT))
    writer.start()
    assert store.wait("map", after=revision, seconds=20)
    writer.join()
    assert store.read("map")[0]["map"].value == b"1"
    assert store.wait("map", after=revision, seconds=20), "a change before the call counts as well"


def test_closing_ends_a_wait(open_store: Open) -> None:
    store = open_store()
    _, revision = store.read("")
    ended = threading.Event()

    def wait() -> None:
        try:
            store.wait("map", after=revision, seconds=600)
        except ClusterError:
            pass
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    threading.Event().wait(0.2)
    store.close()
    assert ended.wait(20)
    thread.join()
    with pytest.raises(ClusterError):
        store.read("")


def count(kind: str, place: str, times: int) -> None:
    store = opened(kind, place)
    done = 0
    while done < times:
        found, _ = store.read("counter")
        stored = found.get("counter")
        number = int(stored.value) if stored else 0
        if store.put_if("counter", str(number + 1).encode(), revision=stored.revision if stored else ABSENT):
            done += 1
    store.close()


@pytest.mark.slow
def test_processes_that_contend_lose_no_change(place: tuple[str, str], open_store: Open) -> None:
    processes = [spawned.Process(target=count, args=(*place, 50)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        assert process.exitcode == 0
    assert open_store().read("counter")[0]["counter"].value == b"150"


def test_the_embedded_store_is_private_and_survives_reopening(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path / "agreement")
    revision = store.put_if("map", b"1", revision=ABSENT)
    store.close()
    assert (tmp_path / "agreement").stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "agreement").iterdir())
    again = EmbeddedStore(tmp_path / "agreement")
    assert again.read("")[0]["map"] == (b"1", revision)
    again.close()


def test_etcd_that_is_away_is_an_unknown_outcome_and_comes_back(tmp_path: Path) -> None:
    etcd = Etcd(tmp_path / "etcd")
    store = EtcdStore([("127.0.0.1", etcd.port)], "test")
    revision = store.put_if("map", b"1", revision=ABSENT)
    assert revision is not None
    etcd.stop()
    with pytest.raises(Unavailable, match="does not answer"):
        store.put_if("map", b"2", revision=revision)
    with pytest.raises(Unavailable):
        store.wait("map", after=revision, seconds=5)
    etcd.start()
    assert store.read("map")[0]["map"].value == b"1"
    assert store.put_if("map", b"2", revision=revision)
    store.close()
    etcd.stop()


def test_an_endpoint_that_is_down_is_skipped(etcd: Etcd) -> None:
    store = EtcdStore([("127.0.0.1", free_port()), ("127.0.0.1", etcd.port)], "endpoints")
    assert store.put_if("map", b"1", revision=ABSENT), (
        "nothing was sent to the first one, so trying on is safe"
    )
    assert store.read("map")[0]["map"].value == b"1"
    store.close()


def test_a_history_that_was_compacted_ends_a_wait(etcd: Etcd) -> None:
    store = EtcdStore([("127.0.0.1", etcd.port)], "compacted")
    revision = store.put_if("map", b"1", revision=ABSENT)
    for number in range(3):
        revision = store.put_if("map", str(number).encode(), revision=revision or 0)
    store._call("/v3/kv/compaction", {"revision": str(revision)})
    assert store.wait("map", after=1, seconds=20)
    store.close()


@pytest.mark.parametrize(
    ("location", "complaint"),
    [
        ("etcd://", "not a name"),
        ("etcd:///name", "not a host"),
        ("etcd://host:99999/name", "not a host"),
        ("etcd://ann:secret@host/name", "from options"),
        ("etcd://host/../x", "not a name"),
        ("zk://host/name", "not an agreement store"),
    ],
)
def test_a_location_that_means_nothing_is_refused(location: str, complaint: str) -> None:
    with pytest.raises(ClusterError, match=complaint) as refused:
        locations.open_store(location)
    assert "secret" not in str(refused.value)


def test_locations_name_a_directory_or_members_of_etcd(tmp_path: Path, etcd: Etcd) -> None:
    here = locations.open_store(str(tmp_path / "agreement"))
    assert here.read("") == ({}, 0)
    here.close()
    there = locations.open_store(f"etcd://127.0.0.1:{etcd.port},[::1]/one")
    assert there.read("")[0] == {}
    there.close()


def test_a_connection_that_etcd_closed_meanwhile_is_opened_again(etcd: Etcd, tmp_path: Path) -> None:
    store = EtcdStore([("127.0.0.1", etcd.port)], tmp_path.name)
    try:
        assert store.put_if("map", b"one", revision=ABSENT) is not None
        etcd.stop()
        etcd.start()
        assert store.read("map")[0]["map"].value == b"one"
    finally:
        store.close()


# ── etcd with a login ─────────────────────────────────────────────────────────────────────────────


def secured_store(etcd: SecuredEtcd, name: str, user: str = "upper", password: str = "") -> EtcdStore:
    where = [("127.0.0.1", etcd.port)]
    return EtcdStore(where, name, tls=etcd.tls, user=user, password=password or etcd.password)


def test_an_unknown_user_of_etcd_reads_and_writes_nothing_and_gets_the_reason(secured: SecuredEtcd) -> None:
    """What may join a cluster is decided here: a node that cannot write its member record has not joined."""
    for name, user, password, complaint in (
        ("one", "upper", "wrong", "invalid user ID or password; check --etcd-user and its password"),
        ("one", "", "", "permission denied; give --etcd-user a user who may use the keys below"),
        ("two", "upper", "", "permission denied; give --etcd-user a user"),
    ):
        store = secured_store(secured, name, user, password)
        for call in (lambda one: one.read(""), lambda one: one.put_if("members/x", b"", revision=ABSENT)):
            with pytest.raises(ClusterError, match=complaint) as refused:
                call(store)  # type: ignore[no-untyped-call]
            assert not isinstance(refused.value, Unavailable), "a node would try for ever"
        store.close()
    no_certificate = ssl.create_default_context(cafile=str(secured.certificate))
    store = EtcdStore([("127.0.0.1", secured.port)], "one", tls=no_certificate)
    with pytest.raises(Unavailable):
        store.read("")
    store.close()
    with pytest.raises(Unavailable, match="certificate verify failed"):
        locations.open_store(f"etcds://127.0.0.1:{secured.port}/one").read("")


def test_a_login_is_repeated_when_etcd_has_forgotten_its_token(tmp_path: Path) -> None:
    """After a restart of etcd, and after a change of its users; the first call may be of any kind."""
    etcd = SecuredEtcd(tmp_path)
    stores = [secured_store(etcd, "one") for _ in range(4)]
    try:
        revision = stores[0].put_if("map", b"1", revision=ABSENT)
        assert revision is not None
        lease = stores[0].grant(60)
        for restarted in (True, False):
            assert all(store.read("map")[0] for store in stores), "each has a token"
            if restarted:
                etcd.stop()
                etcd.start()
            else:
                etcd.change_password(etcd.password)
            assert stores[0].renew(lease)
            assert stores[1].read("map")[0]["map"].revision == revision
            with suppress(Unavailable):  # the connection is broken, and a write is not repeated by itself
                stores[2].put_if("map", b"1", revision=ABSENT)
            revision = stores[2].put_if("map", b"2", revision=revision)
            assert revision is not None
            assert stores[3].wait("map", after=revision - 1, seconds=20)
    finally:
        for store in stores:
            store.close()
        etcd.stop()

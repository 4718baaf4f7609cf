"""`upper cluster` on an agreement store without running nodes: what it stores, prints and refuses."""

from __future__ import annotations

import io
import json
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from upper.cli.cluster_up import NodeProcess, _place
from upper.cli.main import main
from upper.cli.output import Output
from upper.cluster import administration
from upper.cluster.agreement import ABSENT
from upper.cluster.agreement.embedded import EmbeddedStore
from upper.cluster.bucket_map import BucketMap, BucketSettings, NodeId
from upper.cluster.members import ALIVE, MAP, MEMBERS, MemberRecord, read_state
from upper.errors import ClusterError
from upper.model.values import Partition


class Store(EmbeddedStore):
    """An agreement store whose members the test chooses."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.place = str(directory)

    def add(self, *names: str, alive: bool = True) -> None:
        for name in names:
            member = MemberRecord(NodeId(f"id-{name}"), name, "127.0.0.1:9")  # the discard port: no node
            assert self.put_if(member.key, member.to_bytes(), revision=ABSENT) is not None
            if alive:
                assert self.put_if(ALIVE + member.id, b"process", revision=ABSENT) is not None

    def end(self, name: str) -> None:
        """The lease of a node is over."""
        key = f"{ALIVE}id-{name}"
        assert self.delete_if(key, revision=self.read(key)[0][key].revision)

    @property
    def map(self) -> BucketMap:
        return administration.bucket_of(read_state(self))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "agreement")
    yield store
    store.close()


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["cluster", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["cluster", *words]) in (2, 4)
    return capsys.readouterr().err


def test_a_bucket_is_placed_on_the_live_nodes_and_shown(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.add("n1", "n2", "n3")
    store.add("n4", alive=False)
    created = ("create", store.place, "--bucket", "orders", "--partitions", "8", "--minimum-copies", "2")
    assert output(capsys, *created) == "orders: 8 partitions on 3 nodes, replicas=1\n"
    shown = json.loads(output(capsys, "status", store.place, "--json"))
    assert shown["bucket"] == "orders"
    assert shown["revision"] == read_state(store).map_revision
    assert shown["settings"] == {
        "partitions": 8, "replicas": 1, "acknowledge": "in-sync", "minimum_copies": 2
    }  # fmt: skip
    assert [node["name"] for node in shown["nodes"]] == ["n1", "n2", "n3", "n4"]
    assert [node["alive"] for node in shown["nodes"]] == [True, True, True, False]
    assert sum(node["active"] for node in shown["nodes"]) == 8
    assert sum(node["replica"] for node in shown["nodes"]) == 8
    assert shown["moves"] == []
    for number, partition in enumerate(shown["partitions"]):
        assert partition["id"] == number
        assert partition["epoch"] == 1
        assert set(partition["in_sync"]) == {partition["active"], *partition["replicas"]}
    text = output(capsys, "status", store.place)
    assert "bucket orders: 8 partitions, replicas=1, acknowledge=in-sync" in text
    assert "in sync: 8 of 8 partitions have all 2 copies in sync" in text
    assert "lease and lag of n1, n2, n3 are not known: 127.0.0.1:9 cannot be reached" in text
    assert ["127.0.0.1:9" in (node["problem"] or "") for node in shown["nodes"]] == [True, True, True, False]


def test_status_fails_while_partitions_have_no_live_active_copy(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.add("n1", "n2")
    output(capsys, "create", store.place, "--partitions", "4")
    store.end("n2")
    assert main(["cluster", "status", store.place]) == 1
    assert "UNAVAILABLE: 2 partitions" in capsys.readouterr().out


def test_what_cannot_be_created_is_refused_with_a_remedy(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "start one with `upper serve --join`" in refusal(capsys, "create", store.place)
    store.add("n1")
    assert "replicas=1 needs 2 nodes, and 1 have joined" in refusal(capsys, "create", store.place)
    assert "power of two" in refusal(capsys, "create", store.place, "--partitions", "12", "--replicas", "0")
    assert "minimum-copies must be 1 to 1" in refusal(
        capsys, "create", store.place, "--replicas", "0", "--minimum-copies", "2"
    )
    output(capsys, "create", store.place, "--replicas", "0")
    assert "has the bucket 'default' already" in refusal(capsys, "create", store.place, "--replicas", "0")
    nowhere = tmp_path / "nowhere"
    assert "there is no agreement store in" in refusal(capsys, "status", str(nowhere))
    assert not nowhere.exists(), "a mistyped directory is not created"
    assert "is not an agreement store" in refusal(capsys, "create", "http://127.0.0.1/x")


def test_a_rebalance_is_planned_shown_started_and_cancelled(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.add("n1", "n2")
    output(capsys, "create", store.place, "--partitions", "8")
    assert "nothing moves" in output(capsys, "rebalance", store.place, "--dry-run")
    store.add("n3")
    plan = [
        json.loads(line)
        for line in output(capsys, "rebalance", store.place, "--dry-run", "--json").splitlines()
    ]
    gained = [row for row in plan if "n3" in row["add"]]
    assert len(gained) in (5, 6), "a third of 16 copies"
    assert read_state(store).rebalance is None, "a plan changes nothing"
    output(capsys, "rebalance", store.place, "--no-wait", "--rate", "2M", "--at-once", "7")
    running = read_state(store).rebalance
    assert running is not None
    assert running.total == len(plan)
    shown = json.loads(output(capsys, "status", store.place, "--json"))
    assert shown["rebalance"]["total"] == len(plan)
    assert (shown["rebalance"]["at_once"], shown["rebalance"]["rate"]) == (7, 2 << 20)
    assert "7 at once per node and 2,097,152 bytes per second" in output(capsys, "status", store.place)
    assert len(shown["moves"]) == len(plan)
    assert "a rebalance is running" in refusal(
        capsys, "rebalance", store.place, "--remove", "n3", "--no-wait"
    )
    assert "cancelled" in output(capsys, "rebalance", store.place, "--cancel")
    assert read_state(store).rebalance is None
    assert "no rebalance is running" in output(capsys, "rebalance", store.place, "--cancel")


class EndedProcess:
    """A node of `upper cluster up` that was killed."""

    ended = "was ended by SIGKILL"


@pytest.mark.parametrize("why", ["the user stops the cluster", "a node ends"])
def test_a_cluster_that_grows_does_not_wait_for_a_rebalance_that_cannot_end(store: Store, why: str) -> None:
    """No node runs here, so that nothing moves. The next start finds the rebalance."""
    store.add("n1")
    administration.create(store, BucketSettings(partitions=8, replicas=0))
    store.add("n2")
    stopping, notes = threading.Event(), io.StringIO()
    nodes = [] if "user" in why else cast("list[NodeProcess]", [EndedProcess()])
    if not nodes:
        stopping.set()
    _place(Namespace(), store, nodes, stopping, Output(stdout=io.StringIO(), stderr=notes))
    assert "1 node is new: 8 partitions move" in notes.getvalue()
    assert store.map.settings.replicas == 1
    running = read_state(store).rebalance
    assert running is not None
    assert running.total == 8
    _place(Namespace(), store, nodes, stopping, Output(stdout=io.StringIO(), stderr=notes))
    assert read_state(store).rebalance == running


def test_a_node_that_joined_before_the_cluster_was_stopped_gets_its_share_at_the_next_start(
    store: Store,
) -> None:
    store.add("n1", "n2")
    administration.create(store, BucketSettings(partitions=8))
    stopping = threading.Event()
    stopping.set()
    out = Output(stdout=io.StringIO(), stderr=io.StringIO())
    _place(Namespace(), store, [], stopping, out)
    assert read_state(store).rebalance is None, "every node holds copies"
    store.add("n3")
    _place(Namespace(), store, [], stopping, out)
    assert read_state(store).rebalance is not None


def test_nodes_that_cannot_be_removed_are_refused_with_a_remedy(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.add("n1", "n2", "n3")
    assert "no bucket yet" in refusal(capsys, "rebalance", store.place)
    output(capsys, "create", store.place, "--partitions", "8")
    remove = ("rebalance", store.place, "--remove")
    assert "no node 'n9'; its nodes are: n1, n2, n3" in refusal(capsys, *remove, "n9")
    assert "the last node of a cluster" in refusal(
        capsys, *remove, "n1", *remove[2:], "n2", *remove[2:], "n3"
    )
    assert "replicas=1 needs 2 nodes, and 1 would be left" in refusal(
        capsys, *remove, "n1", *remove[2:], "n2"
    )
    store.end("n3")
    assert "n3 cannot take copies while away; start it, or add --remove n3" in refusal(
        capsys, "rebalance", store.place
    )
    assert "n3 is away and alone holds everything" in refusal(capsys, *remove, "n3"), "before the failover"
    output(capsys, "failover", store.place, "n3")
    output(capsys, *remove, "n3", "--no-wait")
    plan = read_state(store).rebalance
    assert plan is not None
    assert plan.remove == ("id-n3",)
    assert {node for copies in plan.target for node in copies} == {"id-n1", "id-n2"}


def test_a_failover_by_hand_promotes_in_sync_copies_and_by_force_others(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.add("n1", "n2")
    output(capsys, "create", store.place, "--partitions", "4")
    assert "n1 is alive; move its partitions with" in refusal(capsys, "failover", store.place, "n1")
    number = next(p for p, entry in enumerate(store.map.entries) if entry.active == "id-n1")
    behind = Partition(number)
    entry = store.map.entries[behind]
    changed = store.map.changed({behind: entry.shrunk(NodeId("id-n2"))})
    store.put_if(MAP, changed.to_bytes(), revision=read_state(store).map_revision)
    store.end("n1")
    assert main(["cluster", "failover", store.place, "n1", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "node": "n1", "promoted": 1, "lossy": [], "kept": {}, "unavailable": [behind],
    }  # fmt: skip
    assert store.map.entries[behind].active == "id-n1", "a copy that is not in sync is not promoted"
    reported = refusal(capsys, "failover", store.place, "n1", "--force")
    assert f"partition {behind}: n2 is to become active, and is not in sync; acknowledged" in reported
    assert "nothing was changed" in reported
    assert "n2 did not report how far its copies are, and they are promoted last: 127.0.0.1:9" in reported
    store.end("n2")
    assert main(["cluster", "failover", store.place, "n1", "--force", "--yes"]) == 1
    assert "no copy is alive; start a node that has one" in capsys.readouterr().out
    assert store.put_if(f"{ALIVE}id-n2", b"process", revision=ABSENT) is not None
    text = output(capsys, "failover", store.place, "n1", "--force", "--yes")
    assert "1 of them lost what the new copy did not have" in text
    promoted = store.map.entries[behind]
    assert promoted.active == "id-n2"
    assert promoted.branch_epoch == promoted.epoch
    assert promoted.in_sync == {"id-n2"}


def test_settings_are_changed_or_refused(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.add("n1", "n2")
    output(capsys, "create", store.place, "--partitions", "4")
    output(capsys, "set", store.place, "acknowledge=local", "minimum-copies=2")
    assert store.map.settings == BucketSettings(
        partitions=4, replicas=1, acknowledge="local", minimum_copies=2
    )
    assert read_state(store).rebalance is None
    assert "'replicas' is not a setting; write NAME=VALUE" in refusal(capsys, "set", store.place, "replicas")
    assert "there is no setting 'replicaz'" in refusal(capsys, "set", store.place, "replicaz=1")
    assert "replicas is a whole number, not 'two'" in refusal(capsys, "set", store.place, "replicas=two")
    assert "replicas=2 needs 3 nodes, and 2 are alive" in refusal(capsys, "set", store.place, "replicas=2")
    assert "minimum-copies must be 1 to 1" in refusal(capsys, "set", store.place, "replicas=0")
    output(capsys, "set", store.place, "replicas=0", "minimum-copies=1")
    running = read_state(store).rebalance
    assert running is not None
    assert all(len(copies) == 1 for copies in running.target)
    assert "a rebalance is running" in refusal(capsys, "set", store.place, "replicas=1")


def test_a_change_is_decided_again_when_another_one_came_first(store: Store) -> None:
    store.add("n1", "n2")
    administration.create(store, BucketSettings(partitions=4))
    tries = 0

    def shrink(state: object) -> BucketMap:
        nonlocal tries
        tries += 1
        if tries == 1:  # another process changes the map between the read and the write
            store.put_if(MAP, store.map.to_bytes(), revision=read_state(store).map_revision)
        entry = store.map.entries[0]
        return store.map.changed({Partition(0): entry.shrunk(entry.replicas[0])})

    administration.change_map(store, shrink)
    assert tries == 2
    assert len(store.map.entries[0].in_sync) == 1


def test_settings_that_were_changed_meanwhile_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add("n1", "n2")
    administration.create(store, BucketSettings(partitions=4))
    put_if = store.put_if

    def late(*facts: Any, **options: Any) -> int | None:
        """Another administrator is faster, once."""
        monkeypatch.undo()
        administration.change_settings(store, {"minimum_copies": "2"})
        return put_if(*facts, **options)

    monkeypatch.setattr(store, "put_if", late)
    administration.change_settings(store, {"acknowledge": "local"})
    settings = store.map.settings
    assert (settings.acknowledge, settings.minimum_copies) == ("local", 2)


def test_another_number_of_replicas_is_refused_as_a_whole_while_a_node_is_away(store: Store) -> None:
    store.add("n1", "n2", "n3")
    administration.create(store, BucketSettings(partitions=4))
    store.end("n3")
    with pytest.raises(ClusterError, match="n3 cannot take copies while away"):
        administration.change_settings(store, {"replicas": "0"})
    assert store.map.settings.replicas == 1


def test_certificates_and_passwords_of_etcd_are_checked_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UPPER_ETCD_PASSWORD", raising=False)
    reported = refusal(capsys, "status", "etcd://127.0.0.1:9/c", "--etcd-user", "ann")
    assert "give --etcd-password-file FILE, or set UPPER_ETCD_PASSWORD" in reported
    reported = refusal(capsys, "status", "etcd://127.0.0.1:9/c", "--etcd-password-file", str(tmp_path / "p"))
    assert "--etcd-password-file needs --etcd-user" in reported
    reported = refusal(capsys, "status", "etcd://127.0.0.1:9/c", "--etcd-ca", str(tmp_path / "ca"))
    assert "begins with etcds://" in reported
    reported = refusal(capsys, "status", "etcds://127.0.0.1:9/c", "--etcd-cert", str(tmp_path / "cert"))
    assert "--etcd-cert and --etcd-key belong together" in reported
    reported = refusal(capsys, "status", "etcds://127.0.0.1:9/c", "--etcd-ca", str(tmp_path / "ca"))
    assert "cannot be used" in reported


def test_the_directory_of_an_embedded_store_is_for_its_owner_alone(store: Store) -> None:
    directory = Path(store.place)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o077 == 0 for file in directory.iterdir())
    assert [key for key in store.read("")[0] if key.startswith(MEMBERS)] == []

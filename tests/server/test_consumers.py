"""Named consumers stay listed while they are away: their lag, their rollbacks, what they lack."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

from tests.nodes import Node
from tests.server.inside import Running
from tests.server.peers import Peer
from upper.model.messages import RollbackAnswer, StreamEnd, StreamFlag, TapConnect
from upper.server.consumers import Consumers
from upper.server.metrics import page
from upper.server.settings import ServerSettings, StreamSettings
from upper.storage import StorageSettings
from upper.wire.tap import TAP

DAY = 86_400 * 10**9  # nanoseconds


def rows(peer: Peer, name: str) -> dict[str, str]:
    """What the node reports of a consumer."""
    found: dict[str, dict[str, str]] = {}
    for row, value in peer.stats("consumers").items():
        number, _, field = row.partition(":")
        found.setdefault(number, {})[field] = value
    (one,) = [fields for fields in found.values() if fields["name"] == name]
    return one


def read_up_to_now(node: Node | tuple[str, int], name: str, *, start: int = 0, branch: int = 0) -> int:
    """A consumer that reads one batch of partition 0 and leaves, as a job does; the seqno that it reached."""
    with Peer(node) as peer:
        peer.control("name", name)
        peer.accepted(start=start, branch=branch, flags=StreamFlag.UNTIL_NOW)
        peer.wait_for(StreamEnd)
        return int(peer.stats("vbucket-details 0")["vb_0:high_seqno"])


def branch_of(peer: Peer) -> int:
    return int(peer.stats("failovers 0")["vb_0:0:id"])


def test_a_consumer_that_reads_in_batches_has_a_lag_while_it_is_away(node: Node) -> None:
    with Peer(node, None) as writer:
        for number in range(10):
            writer.set(b"k%d" % number, b"v")
        assert read_up_to_now(node, "sync") == 10
        while rows(writer, "sync")["streams"] != "0":
            pass
        assert rows(writer, "sync")["lag"] == "0"
        for number in range(7):
            writer.set(b"k%d" % number, b"w")
        away = rows(writer, "sync")
        assert (away["lag"], away["partitions"], away["dialect"]) == ("7", "0", "upr")
        assert writer.stats()["consumers_lag"] == "7"
        read_up_to_now(node, "sync", start=10, branch=branch_of(writer))
        while rows(writer, "sync")["streams"] != "0":
            pass
        again = rows(writer, "sync")
        assert (again["lag"], again["items"]) == ("0", "17")


def test_rollbacks_are_counted_for_the_consumer_that_gets_them(node: Node) -> None:
    with Peer(node) as peer:
        peer.set(b"k", b"v")
        peer.control("name", "indexer")
        assert isinstance(peer.follow(start=1, branch=99), RollbackAnswer)
        assert rows(peer, "indexer")["rollbacks"] == "1"
        assert rows(peer, "indexer")["lag"] == "1"


def test_a_named_tap_client_is_a_consumer_too(node: Node) -> None:
    with Peer(node, None) as writer, Peer(node, TAP) as client:
        writer.set(b"k", b"v")
        client.send(TapConnect(name=b"old-client", support_ack=True))
        client.changes(1)
        found = rows(writer, "old-client")
        assert (found["dialect"], found["lag"]) == ("tap", "0")


def metric(text: str, name: str) -> dict[str, float]:
    return {
        labels: float(value) for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
    }


def test_metrics_of_a_consumer_keep_their_labels_over_a_reconnect(tmp_path: Path) -> None:
    with Node(tmp_path / "data", "--metrics-port", "0").start() as node, Peer(node, None) as writer:

        def scrape() -> str:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{node.metrics_port}/metrics", timeout=10
            ) as answer:
                return str(answer.read().decode())

        writer.set(b"k", b"v")
        read_up_to_now(node, "sync")
        first = metric(scrape(), "upper_consumer_items_total")
        read_up_to_now(node, "sync")
        text = scrape()
        second = metric(text, "upper_consumer_items_total")
        labels = 'name="sync",dialect="upr",user=""'
        assert first.keys() == second.keys()
        assert (first[labels], second[labels]) == (1, 2)
        writer.set(b"k", b"w")
        assert metric(scrape(), "upper_consumer_remaining")[labels] == 1
        assert "peer=" not in text
        assert list(metric(text, "upper_build_info").values()) == [1]
        assert "upper_disk_batch_seconds_count " in text
        assert "upper_disk_free_bytes " in text


def test_deletions_wait_for_a_named_consumer_that_has_not_seen_them_but_not_for_ever(tmp_path: Path) -> None:
    storage = StorageSettings(purge_age=86_400.0, compact=False)
    with Running(tmp_path / "data", storage=storage) as running, running.peer() as writer:

        def purged() -> int:
            running.call(lambda: running.bucket.compact())
            return int(writer.stats("vbucket-details 0")["vb_0:purge_seqno"])

        address = ("127.0.0.1", running.port)
        writer.set(b"gone", b"v")
        reached = read_up_to_now(address, "sync")
        writer.delete(b"gone")
        writer.set(b"other", b"v")
        running.ahead += int(1.5 * DAY)
        assert purged() == 0, "the consumer has not seen the deletion"
        assert writer.stats()["consumers_at_risk"] in ("0", "1")
        read_up_to_now(address, "sync", start=reached, branch=branch_of(writer))
        assert purged() == 0, "it was sent the deletion, and may ask for it again"
        read_up_to_now(address, "sync", start=3, branch=branch_of(writer))
        assert purged() == 2
        writer.set(b"gone", b"v")
        writer.delete(b"gone")
        writer.set(b"other", b"w")
        running.ahead += int(2.5 * DAY)
        assert purged() == 5, "after twice the age it is purged, although a consumer lacks it"
        assert writer.stats()["consumers_at_risk"] == "1"
        with Peer(address) as late:
            assert isinstance(late.follow(start=3, branch=branch_of(writer)), RollbackAnswer)


def test_consumers_that_are_away_are_forgotten_after_a_while_and_bounded_in_number(tmp_path: Path) -> None:
    settings = ServerSettings(port=0, streams=StreamSettings(consumers=2))
    with Running(tmp_path / "data", settings) as running:
        assert running.node is not None
        node = running.node
        registry: Consumers = node.consumers
        for name in ("first", "second", "third"):
            read_up_to_now(("127.0.0.1", running.port), name)
        while running.call(lambda: len([one for one in registry if one.name])) > 2:
            pass
        assert [one.name for one in registry if one.name] == ["second", "third"]
        text = running.call(lambda: "".join(page(node)))
        assert 'name="first"' not in text

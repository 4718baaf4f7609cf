"""Verbs on a cluster: sums and lists over the nodes that answer, and names of those that do not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import upper
from tests.client.several import Several
from tests.client.test_cluster import beside, eventually
from upper.cli.load_generator import LoadResult, LoadSettings, load


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    """Three nodes, of which the second is down and has handed its partitions to the third."""
    with Several(tmp_path_factory.mktemp("several")) as nodes:
        nodes.stop(1)
        nodes.place([1, 4, 7], 2)
        with upper.connect(nodes.url, timeout=60) as bucket:
            bucket.set_many({f"key{number}": "v" for number in range(100)})
        yield nodes


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "upper", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def test_top_shows_sums_and_names_the_node_that_is_silent(cluster: Several) -> None:
    done = run("top", cluster.url_of([0]), "--json", "--count", "1", "--every", "0.1")
    assert done.returncode == 0, done.stderr
    moment = json.loads(done.stdout)
    assert (moment["nodes"], moment["items"]) == (2, 100)
    assert moment["silent_nodes"] == [f"127.0.0.1:{cluster.map.ports[1]}"]


def test_stats_are_listed_by_node_and_a_missing_one_is_named(cluster: Several) -> None:
    done = run("stats", cluster.url_of([0]), "--json")
    assert done.returncode == 0, done.stderr
    found = {line["node"]: line["curr_items"] for line in map(json.loads, done.stdout.splitlines())}
    assert list(found) == [f"127.0.0.1:{cluster.map.ports[number]}" for number in (0, 2)]
    assert sum(found.values()) == 100
    assert (
        done.stderr
        == f"upper: 127.0.0.1:{cluster.map.ports[1]} does not answer; its statistics are missing\n"
    )


def test_load_follows_partitions_that_move_and_leave_a_node(tmp_path: Path) -> None:
    with Several(tmp_path) as nodes, upper.connect(nodes.url, timeout=60) as bucket:
        done = 0

        def progress(count: int) -> None:
            """Two moves while many operations are on their way, the second with the end of a node."""
            nonlocal done
            before, done = done, done + count
            if before < 500 <= done:
                nodes.move(2, 0)
            if before < 1000 <= done:
                for partition in [p for p, owner in enumerate(nodes.map.owners) if owner == 1]:
                    nodes.move(partition, 2)
                nodes.stop(1)

        settings = LoadSettings(items=2000, deletes=0.1, connections=2, depth=50)
        result = load(bucket, settings, progress)
        assert (result.sets, result.deletes, done) == (2000, 200, 2200)
        live = set(bucket.keys())
        deleted = sum(bucket.metadata(f"key:{n:09d}").deleted for n in range(2000))
        assert len(live) == 2000 - deleted
        assert deleted == 200 - result.missing


def test_load_begins_while_a_node_is_down_and_waits_for_its_successor(tmp_path: Path) -> None:
    with Several(tmp_path) as nodes, upper.connect(nodes.url, timeout=60) as bucket:
        nodes.stop(1)
        asked = nodes.maps[0].asked + nodes.maps[2].asked
        results: list[LoadResult] = []
        with beside(lambda: results.append(load(bucket, LoadSettings(items=500)))):
            eventually(lambda: nodes.maps[0].asked + nodes.maps[2].asked > asked + 1)
            nodes.place([1, 4, 7], 2)
        assert results[0].sets == 500
        assert len(list(bucket.keys())) == 500


def test_promote_acts_on_the_node_that_holds_the_partition(cluster: Several) -> None:
    done = run("promote", cluster.url_of([0]), "-p", "4", "--json")
    assert done.returncode == 0, done.stderr
    branch = json.loads(done.stdout)["branch"]
    assert str(cluster.buckets[2].partitions[4].log.branch) == branch

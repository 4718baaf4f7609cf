"""A cluster is upgraded one node at a time: nodes of an earlier commit and of this one work together."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from tests.cluster.running import History, RunningCluster
from upper.cluster import administration

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
# The commit whose formats this version still works with: on disk, between nodes and in the agreement store.
# A change that ends that names a later commit here, and the changelog describes the upgrade.
BEFORE = "0ff9830744b49f66807179182bb7d67d3cfdf33d"


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that runs the earlier commit."""
    packed = subprocess.run(["git", "archive", BEFORE, "src"], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode != 0:
        pytest.skip(f"the history of the repository is not here: {packed.stderr.decode().strip()}")
    directory = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as files:
        files.extractall(directory, filter="data")
    env = {"PYTHONPATH": str(directory / "src"), "UPPER_KERNEL": "plain"}
    where = [sys.executable, "-c", "import upper; print(upper.__file__)"]
    found = subprocess.run(where, env=env, cwd=directory, capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(directory)), "the earlier commit would not be what runs"
    return env


def test_nodes_of_an_earlier_commit_are_replaced_one_by_one_without_interruption(
    tmp_path: Path, earlier: dict[str, str]
) -> None:
    """Copies are made, moved and taken over between the two, in both directions; then one goes back."""
    with RunningCluster(tmp_path, lease=5.0) as cluster:
        cluster.env = earlier
        cluster.create(3)
        history = History(cluster)
        with history.running():
            history.until_acknowledged(50)
            for name in ("n1", "n2"):
                replaced(cluster, name, {})
                history.until_acknowledged(50)
            # One node of the three is still an earlier one: moves from it and to it, and a failover.
            state = cluster.state()
            plan = administration.planned(state)
            assert plan.total, "the restarts moved active copies, and this moves them back"
            administration.start_rebalance(cluster.store, plan, state)
            cluster.until_in_sync()
            cluster.kill("n1")
            history.until_acknowledged(2 * len(history.keys))
            cluster.start("n1")
            cluster.until_in_sync()
            replaced(cluster, "n3", {})
            history.until_acknowledged(50)
            replaced(cluster, "n2", earlier)
            history.until_acknowledged(50)
        history.check()


def replaced(cluster: RunningCluster, name: str, env: dict[str, str]) -> None:
    """Stop a node and start it with another version, as the page on upgrades describes."""
    cluster.nodes[name].stop()
    cluster.nodes[name].env = env
    cluster.start(name)
    cluster.until_in_sync()

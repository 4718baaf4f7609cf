"""Real processes under random faults. `UPPER_SEED=N` repeats a schedule, `make soak` runs many for hours."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.etcd import Etcd
from tests.cluster.torture import torture
from tests.conftest import Summarise

SEED = os.environ.get("UPPER_SEED")
HOURS = float(os.environ.get("UPPER_TORTURE_HOURS", "0"))  # of each test; 0: one short run
pytestmark = [pytest.mark.slow, pytest.mark.timeout(0 if HOURS else 600)]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    etcd = Etcd(tmp_path / "etcd")
    yield etcd
    etcd.stop()


def check(tmp_path: Path, summarise: Summarise, acknowledge: str, etcd: Etcd | None = None) -> None:
    """One run of the seed, or runs of random seeds for as long as is wanted."""
    ends = time.monotonic() + HOURS * 3600
    while True:
        seed = int(SEED or (random.randrange(10**6) if HOURS else 1))
        directory = tmp_path / f"cluster-{seed}"
        directory.mkdir()
        done = torture(directory, seed, episodes=10 if HOURS else 3, etcd=etcd, acknowledge=acknowledge)
        summarise(f"seed {seed}: {done}")
        if time.monotonic() >= ends:
            return


def test_with_an_embedded_store_nothing_acknowledged_is_lost_whatever_fails(
    tmp_path: Path, summarise: Summarise
) -> None:
    check(tmp_path, summarise, "in-sync")


def test_with_etcd_nothing_acknowledged_is_lost_whatever_fails(
    tmp_path: Path, summarise: Summarise, etcd: Etcd
) -> None:
    check(tmp_path, summarise, "in-sync", etcd)


def test_with_local_acknowledgement_consumers_and_copies_end_equal_whatever_fails(
    tmp_path: Path, summarise: Summarise
) -> None:
    check(tmp_path, summarise, "local")

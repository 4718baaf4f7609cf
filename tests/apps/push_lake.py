"""A lake that is pushed to a real system, through a rollback of its bucket."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import upper
from tests.nodes import Node


def push_through_a_rollback(
    directory: Path, target: list[str], found: Callable[[], dict[bytes, int]]
) -> None:
    """Check that a target equals the bucket after each sync and push. `found`: the CAS of each key in it."""

    def upper_does(*arguments: str) -> None:
        command = [sys.executable, "-m", "upper", *arguments, "--once", "--local"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr

    lake = str(directory / "lake")
    with Node(directory / "node", partitions=4) as node, upper.connect(node.url) as bucket:

        def follow() -> None:
            upper_does("sync", node.url, lake)
            upper_does("push", lake, *target, "--name", "test")
            true = {key: int(meta.cas) for key, meta in bucket.metadata_many(bucket.keys("")).items()}
            assert found() == true

        bucket.set_many((f"k{n}", json.dumps({"n": n})) for n in range(100))
        follow()
        kept = bucket.seqnos()
        bucket.set_many((f"k{n}", '{"n": -1}') for n in range(50, 120))
        bucket.delete("k7")
        follow()
        for partition, seqno in kept.items():
            bucket.promote(partition, to=seqno)
        bucket.set("after", '{"n": 1}')
        follow()
        assert len(found()) == 101

"""What a verb that runs for long logs meanwhile: lines with the time, and none when it is stopped."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import upper
from tests.nodes import Node

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}"


def test_tail_logs_with_the_time_that_a_node_is_away_and_back(tmp_path: Path) -> None:
    with Node(tmp_path / "data", partitions=16).start() as node:
        with upper.connect(node.url) as bucket:
            bucket.set("k", "v")
        with subprocess.Popen(
            [sys.executable, "-m", "upper", "tail", node.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as tail:
            assert tail.stdout is not None
            assert tail.stderr is not None
            assert "k  v" in tail.stdout.readline()
            node.kill()
            assert re.fullmatch(TIME + r" .*trying again until it is back\n", tail.stderr.readline())
            node.restart()
            back = tail.stderr.readline()
            tail.send_signal(signal.SIGINT)
            _, printed = tail.communicate(timeout=60)
            assert re.fullmatch(TIME + r" 127\.0\.0\.1:\d+: (reconnected|back again)\n", back)
            assert tail.returncode == 130
    assert printed == "", "an interrupt is no trouble to report"

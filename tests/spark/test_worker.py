"""What workers do before their first task leaves nothing behind at their end."""

from __future__ import annotations

import subprocess
import sys


def test_a_process_that_has_settled_ends_without_a_complaint_of_a_library() -> None:
    program = "import duckdb; from upper.spark.worker import settle; settle(); settle()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

"""What workers do before their first task leaves nothing behind at their end."""

from __future__ import annotations

import subprocess
import sys


def test_a_worker_process_ends_without_a_warning_of_a_library() -> None:
    program = "import duckdb; from upper.spark.worker import settle; settle(); settle()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def output_of(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout


def test_arrow_does_without_pandas_in_a_worker_of_ours_and_others_can_still_import_it() -> None:
    program = """if True:
        import sys
        import pyarrow as pa
        from upper.spark.worker import leave_pandas_out

        finders = list(sys.meta_path)
        leave_pandas_out()
        pa.array([1, None]), pa.scalar("a")
        print("pandas" in sys.modules, sys.meta_path == finders)
        import pandas
    """
    assert output_of(program).split() == ["False", "True"]


def test_the_program_upper_imports_no_pandas_and_a_program_that_calls_it_may() -> None:
    program = """if True:
        import contextlib, sys
        from upper.cli.main import main

        sys.argv = ["upper", "--version"]
        with contextlib.suppress(SystemExit):
            {call}
        import pyarrow as pa

        pa.scalar("a")
        print("pandas" in sys.modules)
    """
    assert output_of(program.format(call="main(['--version'])")).split()[-1] == "True"
    assert output_of(program.format(call="main()")).split()[-1] == "False"

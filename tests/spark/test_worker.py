"""What workers do before their first task: what it saves, and that it leaves nothing behind."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest


def test_a_worker_process_ends_without_a_warning_of_a_library() -> None:
    program = (
        "import duckdb; from upper.spark.worker import prepare_process; prepare_process(); prepare_process()"
    )
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is one of glibc")
def test_a_prepared_process_uses_the_memory_of_one_batch_for_the_next() -> None:
    program = """if True:
        import resource
        from upper.spark.worker import prepare_process

        def pages() -> int:
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

        def batch() -> list[bytes]:
            return [b"x" * 2_500_000 for _ in range(8)]

        prepare_process()
        batch()
        before = pages()
        for _ in range(10):
            batch()
        print(pages() - before)
    """
    assert int(output_of(program)) < 2_500, "pages of 4 kB that were new; a batch has 4,900"

"""The command: every verb is complete, imports little, and ends with a sentence and an exit code."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import Run
from upper.cli import verbs as frame
from upper.cli.common import URL
from upper.cli.output import ExitCode, Output
from upper.errors import Corrupt, Refused, Unreachable, UpperError
from upper.wire.codes import ALIASES, SCHEMES

PIPELINE = {"pyspark", "pyarrow", "numpy", "pandas", "deltalake", "duckdb", "matplotlib"}
HEAVY = PIPELINE | {"rich", "re2", "uvloop"}


def modules_after(*arguments: str) -> set[str]:
    """The modules that are loaded once `upper` has run with these arguments."""
    program = (
        "import sys\n"
        "from upper.cli.main import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit:\n"
        "    pass\n"
        "print('\\n'.join(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stderr.split())


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_upper_itself_starts_without_anything_heavy(argument: str) -> None:
    assert not modules_after(argument) & (HEAVY | {"asyncio", "subprocess", "ssl"})


@pytest.mark.parametrize("verb", frame.VERBS)
def test_the_help_of_a_verb_loads_nothing_heavy_and_no_other_verb(verb: str) -> None:
    loaded = modules_after(verb, "--help")
    assert not loaded & HEAVY
    others = {module for name, (module, _) in frame.VERBS.items() if name != verb}
    assert not loaded & others


@pytest.mark.parametrize("verb", frame.VERBS)
def test_a_verb_has_a_help_text_and_examples(verb: str) -> None:
    module = frame.load(verb)
    assert module.__doc__, "the docstring of a verb is its help"
    examples = module.EXAMPLES.strip().splitlines()
    assert any(f"upper {verb}" in line for line in examples)
    frame.parser_of(verb, module).format_help()


def test_help_names_every_verb_once(upper: Run) -> None:
    text = upper("--help").stdout
    assert all(text.count(f"\n  {verb} ") == 1 for verb in frame.VERBS)


@pytest.mark.parametrize("verb", ["", *frame.VERBS])
def test_help_fits_80_columns(verb: str, upper: Run) -> None:
    shown = upper(*([verb] if verb else []), "--help", COLUMNS="80").stdout
    text, _, examples = shown.partition("\nexamples:\n")
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert [line for line in text.splitlines() if line.endswith("-")] == [], "a name is cut at its hyphen"
    assert [line for line in examples.splitlines() if len(line) > 110] == [], "examples are not wrapped"


def test_the_version_names_python_and_the_kernel(upper: Run) -> None:
    from upper import kernel
    from upper.version import VERSION

    shown = upper("--version")
    python = ".".join(map(str, sys.version_info[:3]))
    assert shown.stdout == f"upper {VERSION} (Python {python}, {kernel.NAME} kernel)\n"
    assert shown.returncode == ExitCode.OK


def test_without_a_verb_the_usage_is_printed(upper: Run) -> None:
    asked = upper()
    assert asked.returncode == ExitCode.USAGE
    assert "usage: upper VERB" in asked.stderr
    assert asked.stdout == ""


def test_an_unknown_verb_names_the_nearest(upper: Run) -> None:
    asked = upper("compltion")
    assert asked.returncode == ExitCode.USAGE
    assert asked.stderr == "upper: there is no verb 'compltion'; did you mean 'completion'?\n"


def verb_that(raises: BaseException) -> ModuleType:
    class Failing(ModuleType):
        EXAMPLES = ""

        def add_arguments(self, parser: ArgumentParser) -> None:
            pass

        def run(self, args: Namespace, out: Output) -> ExitCode:
            raise raises

    return Failing("failing", "Fails.")


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (
            Unreachable("no node answers at a:1; is it running?"),
            ExitCode.UNREACHABLE,
            "no node answers at a:1",
        ),
        (Refused("the node refused"), ExitCode.REFUSED, "the node refused"),
        (Corrupt("segment 3 is damaged"), ExitCode.CORRUPT, "segment 3 is damaged"),
        (UpperError("it did not work"), ExitCode.DIFFERENT, "it did not work"),
        (ConnectionRefusedError(111, "Connection refused"), ExitCode.UNREACHABLE, "Connection refused"),
        (FileNotFoundError(2, "No such file", "here.txt"), ExitCode.USAGE, "here.txt: No such file"),
    ],
)
def test_an_error_is_one_sentence_and_an_exit_code(
    error: Exception,
    code: ExitCode,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "upper.cli.completion", verb_that(error))
    monkeypatch.delenv("UPPER_DEBUG", raising=False)
    assert frame.run(["completion"]) == code
    printed = capsys.readouterr().err
    assert printed.startswith(f"upper: {sentence}")
    assert printed.count("\n") == 1

    monkeypatch.setenv("UPPER_DEBUG", "1")
    assert frame.run(["completion"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_is_not_an_error_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "upper.cli.completion", verb_that(KeyboardInterrupt()))
    assert frame.run(["completion"]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == ""


def test_an_internal_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "upper.cli.completion", verb_that(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError):
        frame.run(["completion"])


def test_a_reader_that_goes_away_ends_the_program_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "upper", "completion", "bash"],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert done.returncode == ExitCode.BROKEN_PIPE
    assert done.stderr == b""


def test_every_scheme_is_recognised_as_a_url() -> None:
    for scheme in (*SCHEMES, *ALIASES):
        assert URL.match(f"{scheme}://a")
        assert URL.match(f"{scheme}s://a")
    assert not URL.match("etcd://a")


LARGE_ANSWER = """
import sys
from types import SimpleNamespace
from upper.cli.main import main
sys.modules["upper.cli.completion"] = SimpleNamespace(
    __doc__="", EXAMPLES="", add_arguments=lambda parser: None,
    run=lambda args, out: out.raw(b"v" * 100_000) or 0,
)
sys.exit(main(["completion"]))
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_the_disk_takes_in_part_is_an_error(tmp_path: Path, unbuffered: str) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    with (tmp_path / "value").open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", LARGE_ANSWER],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            preexec_fn=limit,
            check=False,
        )
    assert (done.returncode, "the output cannot be written" in done.stderr) == (ExitCode.USAGE, True)


PROGRAM = """
import sys
from upper.cli.main import main
own = sys.stdout
main(["completion", "bash"])
sys.stdout = own
print("the end")
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_program_that_runs_a_verb_keeps_its_standard_output(unbuffered: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("the end\n")

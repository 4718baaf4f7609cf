"""Every command on every page works, and prints what the page shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
import time
from argparse import _SubParsersAction
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, STARTS_SPARK, TOP, Block, Step, blocks_of, pattern_of
from tests.docs.shell import Shell, Trouble
from tests.docs.test_make import RUN_BY_CI, TARGETS
from upper.cli.verbs import VERBS, load, parser_of

BLOCKS = {page: [block for block in blocks_of(page) if block.asks] for page in PAGES}
PIECES = [block for page in PAGES for block in blocks_of(page) if block.option("of")]
INLINE = re.compile(r"`((?:upper|make) [^`]+)`")


def name(page: Path) -> str:
    return str(page.relative_to(TOP))


def steps_of(page: Path) -> list[Step]:
    return [step for block in BLOCKS[page] for step in block.steps() if step.make not in RUN_BY_CI]


def marked(page: Path) -> object:
    spark = any(STARTS_SPARK.search(step.text) for step in steps_of(page))
    marks = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(900)] if spark else []
    return pytest.param(page, id=name(page), marks=marks)


@pytest.mark.parametrize("page", [marked(page) for page in PAGES if steps_of(page)])
def test_every_command_of_a_page_works_as_shown(page: Path, tmp_path: Path) -> None:
    with Shell(tmp_path) as shell:
        for step in steps_of(page):
            trouble = shell.trouble_with(step)
            if trouble is not None:
                pytest.fail(f"{name(page)}, {trouble}", pytrace=False)


@pytest.mark.parametrize("block", PIECES, ids=str)
def test_a_quoted_piece_of_a_program_is_in_it(block: Block) -> None:
    program = textwrap.dedent((TOP / str(block.option("of"))).read_text())
    piece = "\n".join(block.lines)
    indents = {re.match(" *", line)[0] for line in program.splitlines()}  # type: ignore[index]
    assert any(textwrap.indent(piece, indent) in program for indent in indents), f"{block} is not in it"


# ── Commands that are only named ──────────────────────────────────────────────────────────────────


def commands_in(text: str) -> list[list[str]]:
    """The words of each `upper` command in a piece of shell."""
    found = []
    for command in text.replace("\\\n", " ").splitlines():
        words = shlex.split(command, comments=True)
        while "upper" in words:
            words = words[words.index("upper") :]
            ends = [at for at, word in enumerate(words) if word in ("|", "&", "&&", "||", ";", ">", "<")]
            found.append([word.rstrip(";") for word in words[: min(ends, default=len(words))]])
            words = words[1:]
    return found


def understood(words: list[str]) -> None:
    """The parser of the verb takes these words."""
    parser = parser_of(words[1], load(words[1]))
    try:
        parser.parse_args(words[2:])
    except SystemExit as end:
        if end.code:
            pytest.fail(f"{shlex.join(words)} is not understood")


def prose_of(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def options_of(verb: str) -> set[str]:
    parsers = [parser_of(verb, load(verb))]
    for action in parsers[0]._actions:
        if isinstance(action, _SubParsersAction):
            parsers += action.choices.values()
    return {option for parser in parsers for action in parser._actions for option in action.option_strings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_named_in_prose_exist(page: Path) -> None:
    prose = prose_of(page)
    for command in INLINE.findall(prose):
        program, what, *words = command.split()
        if program == "make":
            assert what in TARGETS or "=" in what, f"{name(page)}: there is no `make {what}`"
        elif what in VERBS:
            unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - options_of(what)
            assert not unknown, f"{name(page)}: `upper {what}` has no {', '.join(sorted(unknown))}"
        else:
            assert what.startswith("--") or not what.islower(), f"{name(page)}: there is no `upper {what}`"


@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_of_a_verb_are_understood_by_it(verb: str) -> None:
    for words in commands_in(load(verb).EXAMPLES):
        understood(words)


def test_commands_are_in_blocks_that_tests_run() -> None:
    command = re.compile(r"(\$ |upper |make |pip )")
    for page in PAGES:
        hidden = [
            number
            for number, line in enumerate(prose_of(page).splitlines())
            if re.match(" {4,}", line) and command.match(line.strip())
        ]
        assert not hidden, (
            f"{name(page)}: put the commands of indented blocks into fences, so that a test runs them"
        )
        if page.name != "cli.md":  # examples of help, which are tried below
            for block in blocks_of(page):
                if not block.asks and any(map(command.match, block.lines)):
                    pytest.fail(f"{block}: call this block console or sh, so that a test runs it")


# ── The reader itself ─────────────────────────────────────────────────────────────────────────────


def took(tmp_path: Path, *steps: Step) -> None:
    with Shell(tmp_path) as shell:
        for step in steps:
            shell.take(step)


def test_a_command_that_fails_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(Trouble, match="line 3: ended with 7"):
        took(tmp_path, Step(3, "(exit 7)"))


def test_output_that_is_not_what_the_page_shows_is_noticed(tmp_path: Path) -> None:
    took(tmp_path, Step(1, "echo one; echo two 22", shown=("one", "two ...")))
    (tmp_path / "again").mkdir()
    with pytest.raises(Trouble, match="the page shows"):
        took(tmp_path / "again", Step(1, "echo one; echo two", shown=("one",)))


def test_a_program_that_raises_is_noticed_and_names_are_shared(tmp_path: Path) -> None:
    first, second = Step(1, "n = 1", "python"), Step(5, "assert n == 2", "python")
    with pytest.raises(Trouble, match="line 5"):
        took(tmp_path, first, second)


def test_a_command_that_would_go_on_is_interrupted_once_its_output_is_there(tmp_path: Path) -> None:
    program = "import signal; print('ready', flush=True); signal.pause()"
    took(tmp_path, Step(1, f'python -c "{program}" || true', shown=("ready", "^C")), Step(2, "true"))


def test_what_runs_in_the_background_ends_with_the_page(tmp_path: Path) -> None:
    with Shell(tmp_path) as shell:
        shell.take(Step(1, "sleep 1000 &"))
        while len(shell.running()) < 2:
            pass
    assert shell.running() == []


def test_processes_of_a_page_end_although_the_test_was_killed(tmp_path: Path) -> None:
    reader = f"""if True:
        import sys
        from pathlib import Path
        from tests.docs.blocks import Step
        from tests.docs.shell import Shell
        shell = Shell(Path({str(tmp_path)!r}))
        shell.take(Step(1, "sleep 1000 &"))
        shell.take(Step(2, "setsid sleep 1000 &"))  # a daemon leaves the session; Spark starts such
        def asleep():
            names = [(pid, Path(f"/proc/{{pid}}/comm")) for pid in shell.running()]
            return [pid for pid, name in names if name.exists() and name.read_text() == "sleep\\n"]
        while len(started := asleep()) < 2:
            pass
        print(*started, flush=True)
        sys.stdin.read()
    """
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", reader], stdin=pipe, stdout=pipe, cwd=TOP) as process:
        assert process.stdout is not None
        started = list(map(int, process.stdout.readline().split()))
        assert sum(map(alive, started)) == 2
        process.kill()
    deadline = time.monotonic() + 30
    while any(map(alive, started)):
        assert time.monotonic() < deadline, "something outlived its page"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_numbers_match_themselves_or_any_number() -> None:
    strict, loose = (pattern_of(("at 12,000 in 3.5 s.",), loose=loose) for loose in (False, True))
    assert strict.fullmatch("at 12,000 in 3.5 s.\n")
    assert not strict.fullmatch("at 12,001 in 3.5 s.\n")
    assert loose.fullmatch("at 7 in 12 s.\n")
    assert not loose.fullmatch("at seven in 12 s.\n")

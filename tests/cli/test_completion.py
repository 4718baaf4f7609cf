"""Completion scripts: what the shells themselves make of them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.conftest import Run
from upper.cli import completion
from upper.cli.verbs import VERBS


def bash_completes(script: str, *line: str) -> list[str]:
    """What bash would offer for the last word of this line."""
    words = " ".join(f"'{word}'" for word in line)
    program = f"{script}\nCOMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; _upper; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_verbs_and_their_arguments(upper: Run) -> None:
    script = upper("completion", "bash").stdout
    assert set(VERBS) <= set(bash_completes(script, "upper", ""))
    assert bash_completes(script, "upper", "comp") == ["completion"]
    assert bash_completes(script, "upper", "completion", "z") == ["zsh"]
    assert bash_completes(script, "upper", "completion", "--j") == ["--json"]
    assert bash_completes(script, "upper", "completion", "--json", "b") == ["bash"]
    assert bash_completes(script, "upper", "load", "upr://x", "--pattern", "") == ["uniform", "zipf"]
    assert bash_completes(script, "upper", "tail", "upr://x", "--checkpoint", "") == [], (
        "bash completes a file"
    )


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
def test_fish_completes_verbs_and_their_arguments(upper: Run) -> None:
    script = upper("completion", "fish").stdout

    def offers(line: str) -> list[str]:
        program = f"{script}\ncomplete -C {line!r}"
        done = subprocess.run(["fish", "-c", program], capture_output=True, text=True, check=True, timeout=60)
        return [offer.partition("\t")[0] for offer in done.stdout.splitlines()]

    assert set(VERBS) <= set(offers("upper "))
    assert offers("upper completion z") == ["zsh"]
    assert offers("upper completion --js") == ["--json"]
    assert offers("upper load upr://x --pattern ") == ["uniform", "zipf"]


@pytest.mark.parametrize("shell", completion.RENDER)
def test_a_script_names_every_verb_and_every_option(shell: str, upper: Run) -> None:
    script = upper("completion", shell).stdout
    for word in completion.words():
        assert word.text.lstrip("-") in script
    assert "SUPPRESS" not in script, "argparse's mark of an option that help leaves out"


@pytest.mark.parametrize("shell", completion.RENDER)
def test_the_shell_accepts_its_script(shell: str, upper: Run) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    script = upper("completion", shell).stdout
    check = subprocess.run(
        [shell, "-n"], input=script, capture_output=True, text=True, timeout=60, check=False
    )
    assert (check.returncode, check.stderr) == (0, "")

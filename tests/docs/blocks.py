"""The commands of a page, read from its fenced blocks.

    console   `$ command` lines, each followed by what it prints; `...` stands for anything, in a line or as
              a line; `^C` ends a command that would go on
    sh        commands without their output
    python    programs; those of one page share their names. With `file=NAME` it is saved, not run; with
              `of=FILE` it is a piece of that file of the project, and must be found there

`any-numbers` after `console` lets every number in the output stand for any number. Blocks in other languages
are no commands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).parents[2]
PAGES = sorted([*TOP.glob("*.md"), *(TOP / "docs").rglob("*.md")])

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*) *(?P<options>.*)$")
COMPOUND = re.compile(r"<<|^\s*(for|while|until|if|case)\b|^\w+\(\)", re.MULTILINE)
STARTS_SPARK = re.compile(
    r"upper (sync|verify|restore)\b|upper backup (verify|prune)\b|upper lake .*\b(compact|trim)\b"
    r"|spark-submit|pyspark|upper\.spark|examples/spark"
)


@dataclass(frozen=True)
class Step:
    """One command, or one program, and what the page shows of its output."""

    line: int
    text: str
    language: str = "sh"
    shown: tuple[str, ...] = ()
    loose: bool = False  # numbers in the output stand for any number
    file: str | None = None  # a program to save under this name

    @property
    def interrupted(self) -> bool:
        """The reader presses Ctrl-C once everything above is there."""
        return bool(self.shown) and self.shown[-1].strip() == "^C"

    @property
    def make(self) -> str | None:
        """The `make` command that this is, without the comment behind it."""
        command = self.text.partition("#")[0].strip()
        return command if command.split()[:1] == ["make"] else None

    @property
    def background(self) -> bool:
        """The reader goes on while it runs: a node that has no `&` has a terminal of its own."""
        alone = self.text.startswith("upper serve") and not self.interrupted
        return self.language == "sh" and (alone or self.text.rstrip().endswith("&"))


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    options: tuple[str, ...]
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(TOP)}:{self.line}"

    @property
    def asks(self) -> bool:
        """True for what a reader would type."""
        return self.language in ("console", "sh", "python") and self.option("of") is None

    def option(self, name: str) -> str | None:
        """What stands behind `name=` in the line that opens the block."""
        return next((word.partition("=")[2] for word in self.options if word.startswith(f"{name}=")), None)

    def steps(self) -> list[Step]:
        match self.language:
            case "console":
                return list(_conversation(self))
            case "sh":
                return list(_commands(self))
            case "python":
                return [Step(self.line + 1, "\n".join(self.lines), "python", file=self.option("file"))]
            case _:
                return []


def blocks_of(page: Path) -> list[Block]:
    return list(_blocks(page, page.read_text().splitlines()))


def _blocks(page: Path, lines: list[str]) -> Iterator[Block]:
    opening: re.Match[str] | None = None
    start = 0
    for number, line in enumerate(lines, 1):
        fence = FENCE.match(line)
        if opening is None:
            if fence:
                opening, start = fence, number
        elif fence and not fence["language"]:
            indent = len(opening["indent"])
            inside = tuple(text[indent:] for text in lines[start : number - 1])
            language = "sh" if opening["language"] in ("shell", "bash") else opening["language"]
            yield Block(page, start, language, tuple(opening["options"].split()), inside)
            opening = None
    assert opening is None, f"{page}:{start}: this block has no end"


def _conversation(block: Block) -> Iterator[Step]:
    loose = "any-numbers" in block.options
    asked: list[str] = []
    shown: list[str] = []
    line = block.line

    def step() -> Step:
        return Step(line, "\n".join(asked), "sh", tuple(shown), loose)

    for number, text in enumerate(block.lines, block.line + 1):
        if text.startswith("$ "):
            if asked:
                yield step()
            asked, shown, line = [text[2:]], [], number
        elif asked and not shown and (text.startswith("> ") or asked[-1].endswith("\\")):
            asked.append(text.removeprefix("> "))
        else:
            assert asked, f"{block}: output before the first `$ command`"
            shown.append(text)
    if asked:
        yield step()


def _commands(block: Block) -> Iterator[Step]:
    text = "\n".join(block.lines)
    if COMPOUND.search(text):
        yield Step(block.line + 1, text)
        return
    lines: list[str] = []
    for number, line in enumerate(block.lines, block.line + 1):
        lines.append(line)
        if not line.endswith("\\"):
            command = "\n".join(lines)
            if command.strip() and not command.lstrip().startswith("#"):
                yield Step(number - len(lines) + 1, command)
            lines = []
    assert not lines, f"{block}: the last line goes on nowhere"


def pattern_of(shown: tuple[str, ...], *, loose: bool) -> re.Pattern[str]:
    """What output must look like to be what the page shows."""
    parts: list[str] = []
    for line in shown:
        if line.strip() in ("...", "…"):
            parts.append(r"(?:.*\n)*?")
        else:
            parts.append(_line_pattern(line, loose=loose) + r"[ \t]*\n")
    return re.compile("".join(parts) + r"\s*")


def _line_pattern(line: str, *, loose: bool) -> str:
    pieces = []
    for piece in re.split(r"(\.\.\.|…|\s+|\d[\d,.]*)", line.rstrip()):
        if piece in ("...", "…"):
            pieces.append(".*")
        elif piece.isspace():
            pieces.append(r"\s+" if loose else re.escape(piece))
        elif loose and piece[:1].isdigit():
            # The full stop after a number belongs to the sentence.
            pieces.append(r"\d[\d,.]*" if piece[-1].isdigit() else r"\d[\d,.]*" + re.escape(piece[-1]) + "?")
        else:
            pieces.append(re.escape(piece))
    return "".join(pieces)

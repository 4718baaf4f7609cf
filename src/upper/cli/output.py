"""How verbs speak: the same value as text for people and, with `--json`, as one object a line for programs.

A verb hands over values and never formats twice. Standard output carries answers and nothing else;
what is said *about* the work (notes, progress) goes to standard error, and only where somebody looks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from enum import Enum, IntEnum
from typing import Protocol, TextIO, TypeVar

T = TypeVar("T")


class ExitCode(IntEnum):
    """What a verb tells the shell. docs/reference/exit-codes.md says the same."""

    OK = 0
    DIFFERENT = 1  # the answer is no: things differ, are missing, or the work could not be finished
    USAGE = 2  # arguments or input that cannot be used; nothing was done
    UNREACHABLE = 3  # no node answered in time
    REFUSED = 4  # a node answered, and said no
    CORRUPT = 5  # data at rest is damaged, or cannot be used as asked
    INTERRUPTED = 130  # Ctrl-C, as shells count it
    BROKEN_PIPE = 141  # whoever read our output has gone


class Progress(Protocol):
    """What a verb may do with a progress bar, whether or not there is one to see. Cheap to call often."""

    def advance(self, steps: int = 1) -> None:
        """So much more is done."""

    def reached(self, done: int, total: int | None = None) -> None:
        """So much is done altogether, of so much where that is known only now."""


class _Unseen:
    def advance(self, steps: int = 1) -> None:
        pass

    def reached(self, done: int, total: int | None = None) -> None:
        pass


class Output:
    """Where the answers of one run of a verb go."""

    def __init__(
        self, *, as_json: bool = False, stdout: TextIO | None = None, stderr: TextIO | None = None
    ) -> None:
        self.as_json = as_json
        self._stdout = sys.stdout if stdout is None else stdout
        self._stderr = sys.stderr if stderr is None else stderr

    def show(self, value: object, *, text: str | None = None, empty: str = "nothing") -> None:
        """One answer, or many.

        A mapping or a dataclass is one object, shown as a line a field; any other iterable is many,
        shown as a table, or as `empty` when there are none. `text` replaces the text form of one.
        With `--json` each object is a line, written as soon as it is known.
        """
        if self.as_json:
            import json

            for item in _items(value):
                self._line(json.dumps(plain(item)))
        elif text is not None:
            self._line(text)
        elif isinstance(value, str) or is_record(value):
            self._line(_listing(value) if is_record(value) else str(value))
        else:
            rows = [plain(item) for item in _items(value)]
            self._line("\n".join(_table(rows)) if rows else empty)

    def say(self, sentence: str) -> None:
        """A line for people that is no answer by itself; programs do not get it."""
        if not self.as_json:
            self._line(sentence)

    def note(self, sentence: str) -> None:
        """A line about the work, on standard error."""
        print(sentence, file=self._stderr, flush=True)

    def draw(self, line: str) -> None:
        """A line on standard error that the next one replaces, cut to the width of the terminal."""
        from shutil import get_terminal_size

        width = get_terminal_size().columns
        print(f"\r\x1b[K{line[: width - 1]}", end="", file=self._stderr, flush=True)

    def raw(self, data: bytes) -> None:
        """Bytes as they are, for values that go into a file or a pipe; a terminal gets its last newline."""
        self._stdout.flush()
        self._stdout.buffer.write(data)
        if self.on_screen and not data.endswith(b"\n"):
            self._stdout.buffer.write(b"\n")
        self._stdout.buffer.flush()

    @property
    def on_screen(self) -> bool:
        """True when a person sees the answers."""
        return self._stdout.isatty()

    @property
    def watched(self) -> bool:
        """True when a person sees standard error, so that progress is worth drawing."""
        return self._stderr.isatty()

    @contextmanager
    def progress(self, what: str, total: int | None = None, *, answering: bool = False) -> Iterator[Progress]:
        """A bar on the terminal while the block runs; nothing at all where nobody looks.

        `answering`: answers are shown meanwhile. On the same terminal they are progress enough, and a bar
        would run into them, so there is one only where they go elsewhere.
        """
        if not self.watched or (answering and self.on_screen):
            yield _Unseen()
            return
        from upper.cli.bar import bar

        with bar(what, total, self._stderr) as seen:
            yield seen

    def each(
        self, what: str, items: Iterable[T], total: int | None = None, *, answering: bool = False
    ) -> Iterator[T]:
        """The items, with a bar that moves a step with each."""
        if total is None and isinstance(items, Sized):
            total = len(items)
        with self.progress(what, total, answering=answering) as progress:
            for item in items:
                yield item
                progress.advance()

    def _line(self, text: str) -> None:
        # Flushed each time: whoever follows a stream through a pipe wants the line when it happens.
        print(text, file=self._stdout, flush=True)


def is_record(value: object) -> bool:
    """True for what is one object: a mapping or an instance of a dataclass."""
    return isinstance(value, Mapping) or _is_dataclass(value)


def plain(value: object) -> object:
    """The value in terms of JSON. Bytes are text where they are UTF-8, else hex; enums are their names."""
    match value:
        case Enum():
            return value.value if isinstance(value, str) else value.name.lower()
        case None | bool() | int() | float() | str():
            return value
        case bytes() | bytearray() | memoryview():
            return text_of(bytes(value))
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case os.PathLike():
            return os.fspath(value)
        case Iterable():
            return [plain(item) for item in value]
        case _ if _is_dataclass(value):
            from dataclasses import fields

            return {field.name: plain(getattr(value, field.name)) for field in fields(value)}  # type: ignore[arg-type]
        case _:
            return str(value)


def _is_dataclass(value: object) -> bool:
    # Asked like this, a verb that has none to show need not load what makes them.
    return hasattr(type(value), "__dataclass_fields__")


def text_of(data: bytes) -> str:
    """Bytes as text where they are UTF-8, else as hex."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.hex()


def _items(value: object) -> Iterable[object]:
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) and not is_record(value):
        return value
    return (value,)


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case str():
            # A newline or an escape sequence inside a key must not reach the terminal.
            return value if value.isprintable() else value.encode("unicode_escape").decode()
        case list():
            return ", ".join(map(_cell, value)) or "-"
        case dict():
            return ", ".join(f"{_cell(name)}={_cell(item)}" for name, item in value.items()) or "-"
        case _:
            return str(value)


def _listing(record: object) -> str:
    content = plain(record)
    assert isinstance(content, dict)
    shown = {_cell(name): _cell(item) for name, item in content.items()}
    width = max(map(len, shown), default=0)
    return "\n".join(f"{name:<{width}}  {item}" for name, item in shown.items())


def _table(rows: Sequence[object]) -> Iterator[str]:
    """Rows as aligned columns under their names; numbers to the right."""
    if not all(isinstance(row, dict) for row in rows):
        yield from (_cell(row) for row in rows)
        return
    records = [row for row in rows if isinstance(row, dict)]
    names = list(dict.fromkeys(name for record in records for name in record))
    lines = [
        [_cell(name) for name in names],
        *([_cell(record.get(name)) for name in names] for record in records),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numeric = [
        all(isinstance(record.get(name), (int, float, type(None))) for record in records) for name in names
    ]
    for line in lines:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        )
        yield "  ".join(padded).rstrip()

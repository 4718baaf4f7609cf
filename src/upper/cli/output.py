"""The output of verbs: one value, shown as text or, with `--json`, as one JSON object per line.

Standard output carries results and nothing else. Notes and progress go to standard error; progress is drawn
only on a terminal. Bytes are shown without ambiguity: text that is not printable UTF-8 is quoted as bash's
$'...', and in JSON bytes that are not UTF-8 are the object {"hex": "..."}.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from enum import Enum, IntEnum
from typing import Protocol, TextIO, TypeVar

T = TypeVar("T")
INFINITY = float("inf")
SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\", "'": "\\'"}  # escapes that have a short form


class ExitCode(IntEnum):
    """The exit codes of `upper`; docs/reference/exit-codes.md lists them too."""

    OK = 0
    DIFFERENT = 1  # the result is negative: data differs, a key does not exist, or work is unfinished
    USAGE = 2  # invalid arguments or input; nothing was done
    UNREACHABLE = 3  # no node answered in time
    REFUSED = 4  # a node rejected the request
    CORRUPT = 5  # stored data is damaged or cannot be used as requested
    INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT
    BROKEN_PIPE = 141  # the reader of the output has gone: 128 + SIGPIPE


class ProgressBar(Protocol):
    """A progress bar, drawn or not. Calls are cheap: each only adds to a counter."""

    def advance(self, steps: int = 1) -> None:
        """Count more steps as done."""

    def reached(self, done: int, total: int | None = None) -> None:
        """Set the number of steps done, and the total once it is known."""


class _Unseen:
    def advance(self, steps: int = 1) -> None:
        pass

    def reached(self, done: int, total: int | None = None) -> None:
        pass


class Output:
    """The output streams of one run of a verb."""

    def __init__(
        self, *, as_json: bool = False, stdout: TextIO | None = None, stderr: TextIO | None = None
    ) -> None:
        self.as_json = as_json
        self._stdout = sys.stdout if stdout is None else stdout
        self._stderr = sys.stderr if stderr is None else stderr

    def show(self, value: object, *, text: str | None = None, empty: str = "nothing") -> None:
        """Write one result, or many.

        A mapping or a dataclass is one object, shown as one line per field. Any other iterable is shown as a
        table, or as `empty` when it has no rows. `text` replaces the text form of one object. With `--json`
        each object is one line, written as soon as it is produced.
        """
        if self.as_json:
            import json

            for item in _items(value):
                self._line(json.dumps(plain(item), allow_nan=False))
        elif text is not None:
            self._line(text)
        elif isinstance(value, str) or is_record(value):
            self._line(_listing(value) if is_record(value) else str(value))
        else:
            rows = [plain(item, binary=bytes) for item in _items(value)]
            self._line("\n".join(_table(rows)) if rows else empty)

    def print_line(self, sentence: str) -> None:
        """Write a sentence to standard output; with `--json` it is left out."""
        if not self.as_json:
            self._line(sentence)

    def note(self, sentence: str) -> None:
        """Write a line about the work to standard error."""
        print(sentence, file=self._stderr, flush=True)

    def draw(self, line: str) -> None:
        """Write a line to standard error that the next one replaces, cut to the width of the terminal."""
        from shutil import get_terminal_size

        width = get_terminal_size().columns
        print(f"\r\x1b[K{line[: width - 1]}", end="", file=self._stderr, flush=True)

    def raw(self, data: bytes) -> None:
        """Write bytes unchanged; on a terminal a missing final newline is added."""
        self._stdout.flush()
        self._stdout.buffer.write(data)
        if self.on_screen and not data.endswith(b"\n"):
            self._stdout.buffer.write(b"\n")
        self._stdout.buffer.flush()

    @property
    def on_screen(self) -> bool:
        """True when standard output is a terminal."""
        return self._stdout.isatty()

    @property
    def watched(self) -> bool:
        """True when standard error is a terminal, so that progress can be drawn."""
        return self._stderr.isatty()

    @contextmanager
    def progress(
        self, what: str, total: int | None = None, *, answering: bool = False
    ) -> Iterator[ProgressBar]:
        """A progress bar while the block runs, if standard error is a terminal.

        `answering`: the block writes results. On the same terminal they would mix with a bar, so there is a
        bar only if standard output goes elsewhere.
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
        """Yield the items, and advance a progress bar with each."""
        if total is None and isinstance(items, Sized):
            total = len(items)
        with self.progress(what, total, answering=answering) as progress:
            for item in items:
                yield item
                progress.advance()

    def _line(self, text: str) -> None:
        # Flushed each time: a reader of a live stream gets each line without delay.
        print(text, file=self._stdout, flush=True)


def is_record(value: object) -> bool:
    """True for what is one object: a mapping or an instance of a dataclass."""
    return isinstance(value, Mapping) or _is_dataclass(value)


def json_bytes(data: bytes) -> object:
    """Bytes in terms of JSON: text if they are UTF-8, else {"hex": ...}."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"hex": data.hex()}


def plain(value: object, *, binary: Callable[[bytes], object] = json_bytes) -> object:
    """The value in terms of JSON. Enums become their names; `binary` converts bytes.

    JSON has no NaN and no infinity: they become the text "NaN", "Infinity" and "-Infinity", as in PostgreSQL.
    """
    match value:
        case Enum():
            return value.value if isinstance(value, str) else value.name.lower()
        case float() if value != value or value in (INFINITY, -INFINITY):
            return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
        case None | bool() | int() | float() | str():
            return value
        case bytes() | bytearray() | memoryview():
            return binary(bytes(value))
        case Mapping():
            return {str(key): plain(item, binary=binary) for key, item in value.items()}
        case os.PathLike():
            return os.fspath(value)
        case Iterable():
            return [plain(item, binary=binary) for item in value]
        case _ if _is_dataclass(value):
            from dataclasses import fields

            found = ((field.name, getattr(value, field.name)) for field in fields(value))  # type: ignore[arg-type]
            return {name: plain(item, binary=binary) for name, item in found}
        case _:
            return str(value)


def _is_dataclass(value: object) -> bool:
    # `dataclasses.is_dataclass` would import a module that most verbs do not need.
    return hasattr(type(value), "__dataclass_fields__")


def text_of(data: bytes | str) -> str:
    """Bytes or text on one line, without ambiguity and without control characters.

    Printable UTF-8 is shown unchanged. Anything else is quoted as bash quotes it, $'a\\nb' or $'\\xff', and
    can be pasted into a shell; so is text that already looks quoted.
    """
    text = data if isinstance(data, str) else data.decode(errors="surrogateescape")
    if text.isprintable() and not text.startswith("$'"):
        return text
    return "$'" + "".join(map(_escaped, text)) + "'"


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    if character in SHORT:
        return SHORT[character]
    if character.isprintable():
        return character
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


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
        case str() | bytes():
            return text_of(value)
        case list():
            return ", ".join(map(_cell, value)) or "-"
        case dict():
            return ", ".join(f"{_cell(name)}={_cell(item)}" for name, item in value.items()) or "-"
        case _:
            return str(value)


def _listing(record: object) -> str:
    content = plain(record, binary=bytes)
    assert isinstance(content, dict)
    shown = {_cell(name): _cell(item) for name, item in content.items()}
    width = max(map(len, shown), default=0)
    return "\n".join(f"{name:<{width}}  {item}" for name, item in shown.items())


def _table(rows: Sequence[object]) -> Iterator[str]:
    """Rows as aligned columns under their names; numbers are aligned to the right."""
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

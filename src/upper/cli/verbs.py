"""The verbs of `upper`: finds one, parses its arguments, converts errors to messages and exit codes.

A verb is a module of this package with

- a docstring, which is its help;
- `EXAMPLES`, lines that are shown below the help;
- `add_arguments(parser)`, which imports only light modules;
- `run(args, out) -> ExitCode`.

Only the module of the requested verb is imported, so the start-up time of a verb depends on its own imports
alone. To add a verb, write the module and add its row to `VERBS`.
"""

from __future__ import annotations

import os
import sys
from argparse import Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from errno import EDQUOT, EFBIG, ENOSPC
from importlib import import_module
from io import FileIO, TextIOWrapper
from textwrap import wrap
from typing import NoReturn, Protocol, cast

from upper.cli.common import URL
from upper.cli.output import ExitCode, Output
from upper.errors import NotInstalled, UpperError

# verb -> (module, what it does in one line), in the order of help
VERBS: Mapping[str, tuple[str, str]] = {
    "serve": ("upper.cli.serve", "start a node"),
    "cluster": ("upper.cli.cluster", "create and operate a cluster of nodes"),
    "users": ("upper.cli.users", "create and change a users file"),
    "tail": ("upper.cli.tail", "print changes, stored and live"),
    "get": ("upper.cli.get", "read keys"),
    "set": ("upper.cli.set", "store a value under a key"),
    "delete": ("upper.cli.delete", "delete keys"),
    "exists": ("upper.cli.exists", "print whether keys exist"),
    "touch": ("upper.cli.touch", "set the expiry of a key"),
    "keys": ("upper.cli.keys", "print the keys with a prefix"),
    "scan": ("upper.cli.scan", "print keys with a prefix, and their values"),
    "incr": ("upper.cli.incr", "add to a number"),
    "load": ("upper.cli.load", "write many items, and measure"),
    "stats": ("upper.cli.stats", "print the statistics of a node"),
    "top": ("upper.cli.top", "show rates, streams, lag and memory, live"),
    "failover-log": ("upper.cli.failover_log", "print the branches of histories"),
    "promote": ("upper.cli.promote", "start a new branch by hand, for drills"),
    "check": ("upper.cli.check", "check or repair a data directory"),
    "dump": ("upper.cli.dump", "print the items in a data directory"),
    "packet": ("upper.cli.packet", "decode packets of the protocol"),
    "sync": ("upper.cli.sync", "copy changes to a lake of Delta tables"),
    "verify": ("upper.cli.verify", "compare a lake with its bucket"),
    "lake": ("upper.cli.lake", "show or maintain a lake, erase a key"),
    "query": ("upper.cli.query", "query a lake in SQL"),
    "view": ("upper.cli.view", "create, list, refresh or drop views of a lake"),
    "index": ("upper.cli.index", "create, list, rebuild or drop indexes of a lake"),
    "search": ("upper.cli.search", "search an index of a lake"),
    "backup": ("upper.cli.backup", "list, verify or prune the commits of a lake"),
    "restore": ("upper.cli.restore", "bring a bucket to a commit of a lake"),
    "replicate": ("upper.cli.replicate", "replicate a bucket to another one"),
    "push": ("upper.cli.push", "push changes to Kafka or OpenSearch"),
    "export": ("upper.cli.export", "write items to JSON lines, CSV or Parquet"),
    "import": ("upper.cli.import_", "store the rows of such a file"),
    "completion": ("upper.cli.completion", "print a completion script for a shell"),
}


# The verbs of `upper --help`, by subject.
GROUPS: Mapping[str, Sequence[str]] = {
    "keys": ("get", "set", "delete", "exists", "touch", "incr", "keys", "scan", "load", "export", "import"),
    "changes": ("tail", "failover-log", "replicate", "push"),
    "a lake of Delta tables": ("sync", "query", "view", "verify", "lake", "backup", "restore"),
    "an index of a lake": ("index", "search"),
    "nodes": ("serve", "cluster", "users", "stats", "top", "promote"),
    "a data directory": ("check", "dump"),
    "other": ("packet", "completion"),
}

# Packages that only the pipeline needs; the base installation has none of them.
PIPELINE = {"deltalake", "duckdb", "numpy", "pandas", "pyarrow", "pyspark"}


class Verb(Protocol):
    """The interface of the module of a verb."""

    __doc__: str | None
    EXAMPLES: str

    def add_arguments(self, parser: ArgumentParser, /) -> None: ...
    def run(self, args: Namespace, out: Output, /) -> ExitCode: ...


def load(name: str) -> Verb:
    """The module of a verb."""
    return cast(Verb, import_module(VERBS[name][0]))


def parser_of(name: str, verb: Verb) -> ArgumentParser:
    """The parser of a verb: its own arguments and those that all verbs have."""
    parser = _Parser(
        prog=f"upper {name}",
        description=verb.__doc__,
        epilog=f"examples:\n{_indented(verb.EXAMPLES)}",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    verb.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    return parser


def top_parser() -> ArgumentParser:
    """The parser of `upper` without a verb."""
    width = max(map(len, VERBS))
    verbs = "\n".join(
        line
        for group, names in GROUPS.items()
        for line in (f"\n{group}:", *(f"  {name:<{width}}  {VERBS[name][1]}" for name in names))
    )
    parser = _Parser(
        prog="upper",
        usage="upper VERB [ARGUMENT ...]",
        description="A durable key-value store with built-in change data capture.",
        epilog=f"{verbs.lstrip()}\n\n`upper VERB --help` describes a verb and shows examples.",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the version and exit")
    return parser


def run(arguments: list[str], *, begin: Callable[[], None] = lambda: None) -> int:
    """Run `upper` with these arguments and return the exit code. `begin` is called before the verb runs."""
    # Python has none of them where the shell closed them.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # for as long as we run
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        if isinstance(raw := sys.stdout.buffer, FileIO):
            # PYTHONUNBUFFERED: a write that the disk takes in part would count as complete. The file stays
            # open when this object goes: a program that runs a verb has its own standard output.
            sys.stdout = open(raw.fileno(), "w", 1, sys.stdout.encoding, closefd=False)  # noqa: SIM115
        sys.stdout.reconfigure(errors="backslashreplace")  # show what the terminal cannot encode
    try:
        code = _run(arguments, begin)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.BROKEN_PIPE
    except UpperError as error:
        return _print_error(error, str(error), code=error.exit_code)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in PIPELINE:
            raise
        return _print_error(
            error,
            f"this verb needs {error.name}, which is not installed; run: pip install 'upper-kv[spark]'",
            code=NotInstalled.exit_code,
        )
    except OSError as error:
        lost = isinstance(error, (ConnectionError, TimeoutError))
        return _print_error(error, _sentence(error), code=ExitCode.UNREACHABLE if lost else ExitCode.USAGE)


def _run(arguments: list[str], begin: Callable[[], None]) -> int:
    if not arguments or arguments[0].startswith("-"):
        parser = top_parser()
        parser.parse_args(arguments)
        parser.print_help(sys.stderr)
        return ExitCode.USAGE
    name, *rest = arguments
    if name not in VERBS:
        return _unknown(name)
    verb = load(name)
    parser = parser_of(name, verb)
    args = parser.parse_args(_with_url(parser, rest))
    begin()
    return verb.run(args, Output(as_json=args.json))


def _with_url(parser: ArgumentParser, words: list[str]) -> list[str]:
    """The arguments, with the URL of the environment where a verb needs one and none is given."""
    positional = [action.dest for action in parser._actions if not action.option_strings]
    given = any(map(URL.match, words)) or (words and "://" in words[0])
    named = any(word.partition("=")[0] == "--config" for word in words)  # the file has the URLs
    if "url" not in positional or given or named or {"-h", "--help"} & set(words):
        return words
    if _places(parser, words) >= len(positional):
        return words  # what stands for the URL is a lake
    if url := os.environ.get("UPPER_URL"):
        return [url, *words] if positional[0] == "url" else [*words, url]
    if not words or words[0].startswith("-"):
        parser.error("no URL is given; write upr://HOST:PORT/BUCKET, or set UPPER_URL")
    return words


def _places(parser: ArgumentParser, words: list[str]) -> int:
    """How many of the words are neither options nor values of options."""
    found, rest = 0, iter(words)
    for word in rest:
        if word == "-" or not word.startswith("-"):
            found += 1
        elif (option := parser._option_string_actions.get(word)) is not None and option.nargs != 0:
            next(rest, None)
    return found


def _unknown(name: str) -> int:
    from difflib import get_close_matches

    near = get_close_matches(name, VERBS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "`upper --help` lists the verbs"
    print(f"upper: there is no verb {name!r}; {hint}", file=sys.stderr)  # noqa: T201
    return ExitCode.USAGE


def _print_error(error: Exception, sentence: str, *, code: int) -> int:
    if os.environ.get("UPPER_DEBUG"):
        import traceback

        traceback.print_exception(error)
    print(f"upper: {sentence}", file=sys.stderr)  # noqa: T201
    return code


def _sentence(error: OSError) -> str:
    what = error.strerror or str(error) or type(error).__name__
    if error.errno in (ENOSPC, EDQUOT, EFBIG) and error.filename is None:
        return f"the output cannot be written ({what}); free some space there"
    return f"{error.filename}: {what}" if error.filename is not None else what


class _Parser(ArgumentParser):
    """Reports a mistake as one sentence, without the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(ExitCode.USAGE, f"{self.prog}: {message}; see `{self.prog} --help`\n")


class _HelpFormatter(RawDescriptionHelpFormatter):
    """Wraps the paragraphs of a description to the terminal; lists and examples keep their lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(
            part if "\n  " in part else "\n".join(self._split_lines(part, width)) for part in paragraphs
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width, break_on_hyphens=False)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines())


class _ShowVersion(Action):
    """`--version`; imports what it shows only when used."""

    def __call__(self, parser: ArgumentParser, *_: object) -> None:
        from upper.version import VERSION

        kernel = import_module("upper.kernel").NAME
        python = ".".join(map(str, sys.version_info[:3]))
        print(f"upper {VERSION} (Python {python}, {kernel} kernel)")  # noqa: T201
        parser.exit()

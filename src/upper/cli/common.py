"""Arguments that several verbs share: the URL, credentials, timeouts, partitions; and their log format.

A password never has to be on the command line, where other users see it: it comes from --password-file, from
UPPER_PASSWORD, or from a prompt. The URL may be in UPPER_URL.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from upper.cli.durations import some_seconds
from upper.cli.output import Output
from upper.errors import AuthenticationFailed, InvalidArguments

if TYPE_CHECKING:
    from upper.apps.lake.store import LakeStore
    from upper.client.bucket import Bucket

URL = re.compile(r"(upr0?|tap|dcp|couchbase)s?://")  # the schemes of `wire.codes`, without loading it


def add_url(parser: ArgumentParser) -> None:
    """The arguments of a verb that connects to a bucket."""
    add_bucket(parser)
    add_timeout(parser)


def add_timeout(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--timeout", type=some_seconds, metavar="TIME", help="how long a node may take to answer (10s)"
    )


def agreed(out: Output, question: str, *, unattended: bool = False) -> bool:
    """The answer to a question before data is removed; `unattended` if there is no terminal to answer."""
    if not sys.stdin.isatty():
        return unattended
    out.note(f"{question} [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def add_lake(parser: ArgumentParser, *, optional: bool = False) -> None:
    """LAKE, and options of its object store."""
    parser.add_argument(
        "lake",
        metavar="LAKE",
        nargs="?" if optional else None,
        help="the lake: a directory, or a URL such as s3://BUCKET/PATH",
    )
    add_storage_options(parser)


def add_storage_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--storage-option",
        action="append",
        type=setting,
        default=[],
        metavar="NAME=VALUE",
        help="an option of the object store, such as AWS_REGION=eu-west-1, instead of the environment's",
    )


def lake_of(args: Namespace) -> LakeStore:
    """The store of the lake that was named."""
    from upper.apps.lake.store import open_store

    return open_store(args.lake, dict(args.storage_option))


def is_lake(place: str) -> bool:
    """Whether this is a path or the URL of an object store, and not the URL of a bucket."""
    from upper.apps.lake.store import SCHEMES

    return "://" not in place or place.partition("://")[0] in SCHEMES


def setting(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        # Not the value: it may be a secret.
        raise ArgumentTypeError(
            "expected NAME=VALUE, such as spark.executor.memory=2g or AWS_REGION=eu-west-1"
        )
    return name, value


def add_bucket(parser: ArgumentParser, *, optional: bool = False) -> None:
    """The URL of a bucket, and credentials."""
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?" if optional else None,
        help="upr://[USER@]HOST[:PORT][,HOST...][/BUCKET]; not needed if UPPER_URL is set",
    )
    add_credentials(parser)


def add_credentials(parser: ArgumentParser) -> None:
    parser.add_argument("--user", metavar="NAME", help="log in as this user, instead of the one in the URL")
    parser.add_argument(
        "--password-file",
        type=Path,
        metavar="FILE",
        help="read the password from the first line of FILE (UPPER_PASSWORD, else a prompt)",
    )


def add_prefix(parser: ArgumentParser) -> None:
    """Which keys, and how many of them."""
    parser.add_argument(
        "prefix", metavar="PREFIX", nargs="?", default="", help="how the keys begin (any key)"
    )
    parser.add_argument("--limit", type=number(1, 2**48), metavar="N", help="stop after N keys")


def reach(args: Namespace, name: str) -> Bucket:
    """Connect to the bucket that the arguments name."""
    from upper.client.bucket import connect

    return connect(url_of(args), timeout=args.timeout, name=name)


def url_of(args: Namespace) -> str:
    """The URL of the arguments with the password in it: this process and Spark's workers log in with it."""
    from dataclasses import replace

    from upper.client.url import parse_url

    address = parse_url(args.url)
    if args.user is not None and args.user != address.user:
        address = replace(address, user=args.user, password=None)
    if args.password_file is not None:
        address = replace(address, password=args.password_file)
    if address.user is None:
        if args.password_file is not None:
            raise InvalidArguments("--password-file needs a user; give --user NAME, or write upr://NAME@HOST")
        return str(args.url)
    password = address.read_password() if address.password is not None else ask_password(address.user)
    return with_login(str(args.url), address.user, password)


def with_login(url: str, user: str, password: str) -> str:
    """The URL of a bucket with this user and password, instead of those that it has."""
    from urllib.parse import quote

    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    host = authority.rpartition("@")[2]
    return f"{scheme}://{quote(user, safe='')}:{quote(password, safe='')}@{host}{slash}{path}"


def ask_password(user: str, *, variable: str = "UPPER_PASSWORD", option: str = "--password-file") -> str:
    """The password in the environment, or what a prompt gets."""
    if (password := os.environ.get(variable)) is not None:
        return password
    if not sys.stdin.isatty():
        raise AuthenticationFailed(f"no password for the user {user}; give {option} FILE, or set {variable}")
    from getpass import getpass

    return getpass(f"password of {user}: ")


def log_to_stderr(out: Output) -> None:
    """Show what the library logs, with the time, for verbs that run for long."""
    import logging

    # On a terminal, first erase the line that shows progress.
    erase = "\r\x1b[K" if out.watched else ""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{erase}%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%S%z"))
    logger = logging.getLogger("upper")
    logger.handlers = [handler]  # one, also where a program runs several verbs
    logger.propagate = False


def as_typed(text: str) -> bytes:
    """A key or a value as the shell passed it; it need not be UTF-8."""
    return os.fsencode(text)


def number(first: int, last: int) -> Callable[[str], int]:
    """A parser of whole numbers in this range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not first <= value <= last:
            raise ArgumentTypeError(f"{text} is not a number from {first} to {last}")
        return value

    return parse


def partitions(text: str) -> list[int]:
    """Parse partition numbers such as `0-15,99`."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ArgumentTypeError(f"{part!r} is not a partition or a range of them; write 0-15,99")
        low, high = int(first), int(last or first)
        if high < low:
            raise ArgumentTypeError(f"{part!r} is not a range of partitions; write the smaller number first")
        if high > 65535:
            raise ArgumentTypeError(f"there is no partition {high}; a bucket has at most 65536 of them")
        found.update(range(low, high + 1))
    return sorted(found)

"""Create and change a users file, for `upper serve --users FILE`.

`add` creates a user. `password` changes the password and keeps the roles; `roles` changes the roles and keeps
the password. Passwords are read from the terminal, or as one line from standard input. The file does not hold
them: it holds salted hashes (SCRAM).
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from upper.cli.output import ExitCode, Output, text_of

if TYPE_CHECKING:
    from upper.server.auth import User, Users

EXAMPLES = """
upper users users.json add ann --roles read,write
upper users users.json add bob < password.txt
upper users users.json password ann
upper users users.json roles ann --roles read,stream
upper users users.json list
upper users users.json remove ann
"""
DEFAULT_ROLES = "read,write,stream"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="the users file; `add` creates it")
    parser.add_argument("what", choices=("add", "password", "roles", "remove", "list"), help="what to do")
    parser.add_argument("name", metavar="NAME", nargs="?", help="the name of the user")
    parser.add_argument(
        "--roles", metavar="LIST", help=f"any of read,write,stream,admin (for add: {DEFAULT_ROLES})"
    )


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.errors import InvalidArguments
    from upper.server.auth import Users, load_users, save_users

    users = load_users(args.file) if args.file.exists() or args.what != "add" else Users()
    if args.what == "list":
        rows = [{"name": user.name, "roles": user.roles.names} for user in users.users.values()]
        out.show(rows, empty="no users")
        return ExitCode.OK
    if not args.name:
        raise InvalidArguments(
            f"{args.what} needs the name of a user: upper users {args.file} {args.what} NAME"
        )
    user = users.find(args.name)
    if args.what == "add":
        changed, done = _added(users, user, args), "was added"
    elif user is None:
        raise InvalidArguments(
            f"there is no user {text_of(args.name)} in {args.file}; `upper users {args.file} list` shows all"
        )
    elif args.what == "remove":
        changed, done = users.without(args.name), "was removed"
    else:
        changed, done = users.with_user(_changed(user, args)), "was changed"
    save_users(args.file, changed)
    after = changed.find(args.name)
    roles = "" if after is None else f"; roles: {', '.join(after.roles.names)}"
    out.print_line(f"{args.file}: {text_of(args.name)} {done}{roles}")
    return ExitCode.OK


def _added(users: Users, user: User | None, args: Namespace) -> Users:
    from upper.errors import InvalidArguments
    from upper.server.auth import Role, User

    if user is not None:
        raise InvalidArguments(
            f"{args.name} exists already, with the roles {', '.join(user.roles.names)}; change it with "
            f"`upper users {args.file} password {args.name}` or `roles {args.name} --roles LIST`"
        )
    if not args.name.isprintable() or args.name.startswith("@"):
        raise InvalidArguments(
            f"{text_of(args.name)} is not a user name; use printable characters, and no @ at the beginning"
        )
    roles = Role.named(_names(args.roles or DEFAULT_ROLES))
    return users.with_user(User.new(args.name, _password(), roles))


def _changed(user: User, args: Namespace) -> User:
    from dataclasses import replace

    from upper.errors import InvalidArguments
    from upper.server.auth import Role, User

    if args.what == "password":
        if args.roles is not None:
            raise InvalidArguments("`password` keeps the roles; change them with `roles`")
        return User.new(user.name, _password(), user.roles)
    if args.roles is None:
        raise InvalidArguments("`roles` needs --roles LIST, such as --roles read,stream")
    return replace(user, roles=Role.named(_names(args.roles)))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _password() -> str:
    from upper.errors import InvalidArguments

    if sys.stdin.isatty():
        from getpass import getpass

        password = getpass("password: ")
        if password != getpass("repeat password: "):
            raise InvalidArguments("the two passwords differ; nothing was changed")
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        raise InvalidArguments("the password is empty; nothing was changed")
    return password

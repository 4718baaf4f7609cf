"""Make and change the file that says who may come in: `upper serve --users FILE`.

Passwords are asked for on the terminal, or read as one line from standard input. They are not kept: the
file holds what proves them, salted and hashed. A running node reads the file when it starts.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from upper.cli.output import ExitCode, Output

EXAMPLES = """
upper users users.json add ann --roles read,write
upper users users.json list
upper users users.json remove ann
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the users file; made when the first user is added")
    parser.add_argument("what", choices=("add", "remove", "list"), help="what to do")
    parser.add_argument("name", nargs="?", help="of the user")
    parser.add_argument(
        "--roles", default="read,write,stream", help="any of read, write, stream, admin (%(default)s)"
    )


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.server.auth import BadUsersFile, Role, User, Users, load_users, save_users

    users = load_users(args.file) if args.file.exists() or args.what != "add" else Users()
    if args.what == "list":
        rows = [{"name": user.name, "roles": user.roles.names} for user in users.users.values()]
        out.show(rows, empty="no users")
        return ExitCode.OK
    if not args.name:
        raise BadUsersFile(f"whom to {args.what}? Give a name")
    if args.what == "remove":
        if users.find(args.name) is None:
            raise BadUsersFile(f"there is no user {args.name!r} in {args.file}; `upper users` lists them")
        save_users(args.file, users.without(args.name))
    else:
        roles = Role.named(name.strip() for name in args.roles.split(","))
        save_users(args.file, users.with_user(User.new(args.name, _password(), roles)))
    out.say(f"{args.file}: {args.name} {'removed' if args.what == 'remove' else 'may come in'}")
    return ExitCode.OK


def _password() -> str:
    from upper.server.auth import BadUsersFile

    if sys.stdin.isatty():
        from getpass import getpass

        password = getpass("password: ")
        if password != getpass("again: "):
            raise BadUsersFile("the two passwords differ; nothing was changed")
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        raise BadUsersFile("a password cannot be empty; nothing was changed")
    return password

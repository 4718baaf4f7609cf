"""Arguments that name an agreement store, and how it is opened. Passwords come from files or variables."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from upper.errors import InvalidArguments

if TYPE_CHECKING:
    import ssl

    from upper.cluster.agreement import AgreementStore

STORE_HELP = "the agreement store: etcd://HOST[:PORT][,HOST...]/NAME, etcds://... for TLS, or a directory"


def add_store_options(parser: ArgumentParser | _ArgumentGroup) -> None:
    """Credentials and certificates for etcd."""
    parser.add_argument("--etcd-user", metavar="NAME", help="log in to etcd as this user")
    parser.add_argument(
        "--etcd-password-file",
        type=Path,
        metavar="FILE",
        help="read its password from the first line of FILE (UPPER_ETCD_PASSWORD)",
    )
    parser.add_argument("--etcd-ca", type=Path, metavar="FILE", help="certificates that sign etcd's, PEM")
    parser.add_argument("--etcd-cert", type=Path, metavar="FILE", help="client certificate for etcd, PEM")
    parser.add_argument("--etcd-key", type=Path, metavar="FILE", help="its key, PEM")


def store_opener(args: Namespace, location: str, *, create: bool = False) -> Callable[[], AgreementStore]:
    """A function that opens the store; each thread of a node opens its own.

    Only a node that joins may `create` an embedded one.
    """
    from upper.cluster.agreement.embedded import FILE
    from upper.cluster.agreement.location import open_store

    if not create and "://" not in location and not (Path(location) / FILE).exists():
        raise InvalidArguments(
            f"there is no agreement store in {location}; give the directory that the nodes joined with --join"
        )
    user, password, tls = args.etcd_user or "", _password(args), _tls(args, location)
    return lambda: open_store(location, user=user, password=password, tls=tls)


def _password(args: Namespace) -> str:
    if args.etcd_password_file is not None:
        if args.etcd_user is None:
            raise InvalidArguments("--etcd-password-file needs --etcd-user NAME")
        try:
            return str(args.etcd_password_file.read_text().partition("\n")[0].rstrip("\r"))
        except OSError as error:
            raise InvalidArguments(
                f"{args.etcd_password_file} cannot be read ({error.strerror}); check the path"
            ) from None
    if args.etcd_user is None:
        return ""
    password = os.environ.get("UPPER_ETCD_PASSWORD")
    if password is None:
        raise InvalidArguments(
            f"no password for the etcd user {args.etcd_user}; "
            "give --etcd-password-file FILE, or set UPPER_ETCD_PASSWORD"
        )
    return password


def _tls(args: Namespace, location: str) -> ssl.SSLContext | None:
    given = {name for name in ("etcd_ca", "etcd_cert", "etcd_key") if getattr(args, name) is not None}
    if not location.startswith("etcds://"):
        if given:
            raise InvalidArguments("certificates for etcd need an address that begins with etcds://")
        return None
    import ssl

    if (args.etcd_cert is None) != (args.etcd_key is None):
        raise InvalidArguments("--etcd-cert and --etcd-key belong together; give both")
    try:
        context = ssl.create_default_context(cafile=args.etcd_ca)
        if args.etcd_cert is not None:
            context.load_cert_chain(args.etcd_cert, args.etcd_key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArguments(
            f"the certificates for etcd cannot be used ({error.strerror or error}); give PEM files"
        ) from None
    return context

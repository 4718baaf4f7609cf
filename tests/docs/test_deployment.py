"""The unit and the compose file of examples/cluster: every option that they use exists and is accepted."""

from __future__ import annotations

import json
import re
import shlex
from argparse import Namespace
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.docs.blocks import TOP
from upper.cli.verbs import load, parser_of
from upper.cluster.agreement.location import open_store
from upper.cluster.identity import check_security
from upper.server.settings import ServerSettings, Tls

FILES = TOP / "examples" / "cluster"
COMPOSE = (FILES / "compose.yaml").read_text()
SERVICE = re.compile(r"^  (?P<name>\w+):\n(?P<body>(?:    .*\n)+)", re.MULTILINE)


def node_of(words: list[str]) -> Namespace:
    """The arguments of `upper serve`, once the node accepts their security options."""
    args = parser_of("serve", load("serve")).parse_args(words)
    check_security(
        ServerSettings(
            host=args.host,
            port=args.port,
            users=args.users,
            cluster_secret=args.cluster_secret,
            insecure=args.insecure,
            tls=args.tls_cert and Tls(certificate=args.tls_cert, key=args.tls_key),
        )
    )
    open_store(args.join).close()
    return args


def services() -> dict[str, str]:
    return {found["name"]: found["body"] for found in SERVICE.finditer(COMPOSE.partition("\nservices:\n")[2])}


def command_of(body: str) -> list[str]:
    words: list[str] = json.loads(body.partition("command: ")[2].partition("\n")[0])
    return words


def test_the_unit_starts_a_node_that_is_safe_on_a_network() -> None:
    unit = ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(FILES / "upper@.service")
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    line = unit["Service"]["ExecStart"]
    for name, value in (("%i", "n1"), ("${STORE}", "etcds://10.0.0.1,10.0.0.2/c"), ("${ZONE}", "a")):
        line = line.replace(name, value)
    program, verb, *words = shlex.split(line.replace("${ADDRESS}", "10.0.0.7"))
    assert (Path(program).name, verb) == ("upper", "serve")
    args = node_of(words)
    assert args.advertise == "10.0.0.7:11210"
    assert not args.insecure, "TLS and users protect it"
    assert args.data.is_relative_to("/var/lib/" + unit["Service"]["StateDirectory"])


def test_the_compose_file_has_three_nodes_in_different_zones_and_three_etcd_members() -> None:
    found = services()
    assert set(found) == {"etcd1", "etcd2", "etcd3", "n1", "n2", "n3"}
    nodes = {name: node_of(command_of(found[name])[1:]) for name in ("n1", "n2", "n3")}
    assert all(command_of(found[name])[0] == "serve" for name in nodes)
    assert {args.zone for args in nodes.values()} == {"a", "b", "c"}
    assert len({args.join for args in nodes.values()}) == 1
    for name, args in nodes.items():
        assert args.name == name
        assert args.advertise == f"{name}:11210"
        assert f'volumes: ["{name}:/data"]' in found[name]
        assert args.data.is_relative_to("/data")


@pytest.mark.parametrize("name", ["etcd1", "etcd2", "etcd3"])
def test_every_etcd_member_names_all_members_and_itself(name: str) -> None:
    words = command_of(services()[name])
    options = dict(zip(words[1::2], words[2::2], strict=True))
    assert options["--name"] == name
    assert options["--advertise-client-urls"] == f"http://{name}:2379"
    members = dict(part.split("=") for part in options["--initial-cluster"].split(","))
    assert members == {f"etcd{number}": f"http://etcd{number}:2380" for number in (1, 2, 3)}


def test_the_commands_in_the_comments_exist() -> None:
    typed = [line.removeprefix("#     ") for line in COMPOSE.splitlines() if line.startswith("#     ")]
    assert len(typed) == 4
    users = parser_of("users", load("users")).parse_args(shlex.split(typed[1])[2:])
    assert users.what == "add"
    created = parser_of("cluster", load("cluster")).parse_args(shlex.split(typed[3])[6:])
    assert created.do == "create"
    assert created.store == node_of(command_of(services()["n1"])[1:]).join

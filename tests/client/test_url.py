"""What a URL contains, and the errors for invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from upper.client.url import NodeAddress, address_of, parse_url
from upper.errors import AuthenticationFailed, BadUrl
from upper.model.messages import MutationMessage
from upper.wire.codes import ALIASES, SCHEMES
from upper.wire.session import DIALECTS


def test_every_part_but_the_host_may_be_left_out() -> None:
    address = parse_url("upr://example")
    assert address.nodes == (NodeAddress("example", 11210),)
    assert (address.bucket, address.user, address.password, address.tls) == ("default", None, None, False)


def test_all_parts_are_understood() -> None:
    address = parse_url("upr0://ann:s%3Acret@a:1,[::1]:2,b/carts?tls=on&timeout=2.5&ca=x.pem")
    assert address.dialect == "upr0"
    assert address.nodes == (NodeAddress("a", 1), NodeAddress("::1", 2), NodeAddress("b"))
    assert (address.bucket, address.user, address.password) == ("carts", "ann", "s:cret")
    assert (address.tls, address.timeout, address.settings["ca"]) == (True, 2.5, "x.pem")


def test_a_secure_scheme_is_the_setting_in_short() -> None:
    assert parse_url("uprs://a").tls
    assert parse_url("taps://a").dialect == "tap"


def test_a_password_is_not_shown() -> None:
    address = parse_url("upr://ann:secret@a/b")
    assert "secret" not in str(address)
    assert "secret" not in repr(address)


@pytest.mark.parametrize(
    "url",
    [
        "ann:secret@a",
        "ann:secret@a:11210/default",
        "ann:se://secret@a",
        "upr://ann:secret",
        "upr://ann:secret/x@a",
        "upr://ann:secret?x@a",
        "upr://x/ann:secret@a",
        "http://ann:secret@a",
        "upr://ann:secret@a:port",
        "upr://ann:secret@a/b/c",
        "upr://ann:secret@a?color=red",
    ],
)
def test_no_error_about_a_url_quotes_its_password(url: str) -> None:
    with pytest.raises(BadUrl) as error:
        parse_url(url)
    assert "secret" not in str(error.value)


def test_the_environment_supplies_the_url_and_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPPER_URL", "upr://ann@a/carts")
    monkeypatch.setenv("UPPER_PASSWORD", "from outside")
    address = address_of(None)
    assert (address.bucket, address.user, address.read_password()) == ("carts", "ann", "from outside")
    assert address_of("upr://ann:given@a").read_password() == "given"
    assert address_of("upr://ann@a", password="given").read_password() == "given"
    assert address_of("upr://a").password is None, "without a user there is nothing to log in with"


def test_a_password_is_read_from_a_function_or_a_file_at_every_login(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("first\n")
    address = address_of("upr://ann@a", password=file)
    assert address.read_password() == "first"
    file.write_text("second")
    assert address.read_password() == "second"
    assert address_of("upr://a", user="ann", password=lambda: "made").read_password() == "made"
    file.unlink()
    with pytest.raises(AuthenticationFailed, match="cannot be read"):
        address.read_password()


def test_a_password_without_a_user_is_rejected_without_quoting_it() -> None:
    with pytest.raises(BadUrl, match="without a user") as error:
        address_of("upr://a", password="secret")
    assert "secret" not in str(error.value)


def test_another_user_does_not_inherit_the_password_of_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UPPER_PASSWORD", raising=False)
    assert address_of("upr://ann:secret@a", user="bob").password is None


def test_without_a_url_the_error_names_both_ways_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UPPER_URL", raising=False)
    with pytest.raises(BadUrl, match="set UPPER_URL"):
        address_of(None)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.1.2.3"])
def test_loopback_is_known_as_private(host: str) -> None:
    assert parse_url(f"upr://{host}").nodes[0].local


def test_other_hosts_are_not_private() -> None:
    assert not parse_url("upr://127.0.0.1.example.org").nodes[0].local
    assert not parse_url("upr://10.0.0.1").nodes[0].local


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("127.0.0.1:11210", "is not a URL; write it as upr://HOST:PORT/BUCKET"),
        ("http://a", "is not known; use one of upr://"),
        ("couchbase+srv://a", "is not a URL"),
        ("upr://", "names no host"),
        ("upr:///bucket", "names no host"),
        ("upr://a,,b", "names no host"),
        ("upr://a:port", "the port of 'a' is not a number"),
        ("upr://a:0", "'0' is not a port"),
        ("upr://a:70000", "'70000' is not a port"),
        ("upr://::1", "write an IPv6 host as"),
        ("upr://[::1", "write an IPv6 host as"),
        ("upr://@a", "no user before it"),
        ("upr://a/b/c", "names one bucket"),
        ("upr://a?color=red", "no setting 'color'"),
        ("upr://a?tls=perhaps", "neither on nor off"),
        ("upr://a?timeout=0", "not a number of seconds"),
        ("upr://a?timeout=soon", "not a number of seconds"),
    ],
)
def test_an_invalid_url_gets_a_sentence_that_names_the_correct_form(url: str, sentence: str) -> None:
    with pytest.raises(BadUrl, match=sentence.replace("[", r"\[")):
        parse_url(url)


def test_the_schemes_of_urls_are_the_dialects_with_streams() -> None:
    assert {name for name, dialect in DIALECTS.items() if dialect.rows.get(MutationMessage)} == {*SCHEMES}
    assert {*ALIASES.values()} <= {*SCHEMES}


@pytest.mark.parametrize(
    ("url", "port", "tls"),
    [
        ("couchbase://ann:pw@a/carts", 11210, False),
        ("couchbases://ann:pw@a/carts", 11207, True),
        ("couchbases://ann:pw@a:5/carts", 5, True),
        ("dcp://ann:pw@a/carts", 11210, False),
        ("dcps://ann:pw@a/carts", 11210, True),
    ],
)
def test_couchbase_is_followed_by_dcp(url: str, port: int, tls: bool) -> None:
    address = parse_url(url)
    assert (address.dialect, address.bucket, address.user) == ("dcp", "carts", "ann")
    assert (address.nodes[0].port, address.tls) == (port, tls)

"""What a URL says, and what is said about one that says nothing sensible."""

from __future__ import annotations

import pytest

from upper.client.url import Node, parse_url
from upper.errors import BadUrl


def test_every_part_but_the_host_may_be_left_out() -> None:
    address = parse_url("upr://example")
    assert address.nodes == (Node("example", 11210),)
    assert (address.bucket, address.user, address.password, address.tls) == ("default", None, None, False)


def test_all_parts_are_understood() -> None:
    address = parse_url("upr0://ann:s%3Acret@a:1,[::1]:2,b/carts?tls=on&timeout=2.5&ca=x.pem")
    assert address.dialect == "upr0"
    assert address.nodes == (Node("a", 1), Node("::1", 2), Node("b"))
    assert (address.bucket, address.user, address.password) == ("carts", "ann", "s:cret")
    assert (address.tls, address.timeout, address.settings["ca"]) == (True, 2.5, "x.pem")


def test_a_secure_scheme_is_the_setting_in_short() -> None:
    assert parse_url("uprs://a").tls
    assert parse_url("taps://a").dialect == "tap"


def test_a_password_is_not_shown() -> None:
    address = parse_url("upr://ann:secret@a/b")
    assert "secret" not in str(address)
    assert "secret" not in repr(address)
    with pytest.raises(BadUrl) as error:
        parse_url("ann:secret@a")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.1.2.3"])
def test_loopback_is_known_as_private(host: str) -> None:
    assert parse_url(f"upr://{host}").nodes[0].local


def test_other_hosts_are_not_private() -> None:
    assert not parse_url("upr://127.0.0.1.example.org").nodes[0].local
    assert not parse_url("upr://10.0.0.1").nodes[0].local


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("127.0.0.1:11210", "is no URL; write it as upr://HOST:PORT/BUCKET"),
        ("http://a", "is not known; use one of upr://"),
        ("dcp://a", "not spoken here yet; use upr://"),
        ("upr://", "names no host"),
        ("upr:///bucket", "names no host"),
        ("upr://a,,b", "names no host"),
        ("upr://a:port", "'port' is not a port"),
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
def test_nonsense_gets_a_sentence_that_says_what_to_write(url: str, sentence: str) -> None:
    with pytest.raises(BadUrl, match=sentence.replace("[", r"\[")):
        parse_url(url)

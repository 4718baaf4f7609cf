"""Durations on the command line: plain seconds, or a number with its unit."""

from __future__ import annotations

from argparse import Action, ArgumentParser, ArgumentTypeError, _SubParsersAction
from collections.abc import Callable, Iterator

import pytest

from upper.cli.durations import seconds, some_seconds, whole_seconds
from upper.cli.verbs import VERBS, load, parser_of

FORMS = [("3", 3.0), ("0.5", 0.5), (".5", 0.5), ("1e3", 1000.0), ("500ms", 0.5), ("2s", 2.0), ("5 m", 300.0),
         ("1.5h", 5400.0), ("7d", 604800.0), ("0", 0.0), ("0s", 0.0)]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), FORMS)
def test_a_duration_has_a_unit_or_is_in_seconds(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("parse", [seconds, some_seconds, whole_seconds(2**32)])
@pytest.mark.parametrize(
    "text", ["", "s", "-1", "-1s", "nan", "inf", "1e999", "1 s s", "five", "1w", "1.2.3"]
)
def test_anything_else_is_refused(parse: Callable[[str], float], text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is not a duration"):
        parse(text)


def test_a_duration_that_cannot_be_zero_refuses_zero() -> None:
    assert some_seconds("1ms") == 0.001
    with pytest.raises(ArgumentTypeError, match="above 0"):
        some_seconds("0ms")


def test_whole_seconds_are_not_rounded_and_have_a_limit() -> None:
    assert whole_seconds(3600)("1h") == 3600
    for text in ("1500ms", "3601", "2h"):
        with pytest.raises(ArgumentTypeError, match="0 to 3600 whole seconds"):
            whole_seconds(3600)(text)


def actions_of(parser: ArgumentParser) -> Iterator[Action]:
    """Of a parser and of those of its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, _SubParsersAction):
            for choice in action.choices.values():
                yield from actions_of(choice)


def test_every_option_that_takes_a_time_takes_both_forms() -> None:
    """`--at` takes a point in time, under the same word in the help."""
    times = set()
    for name in VERBS:
        for action in actions_of(parser_of(name, load(name))):
            assert "SECONDS" not in str(action.metavar)
            if action.metavar == "TIME" and "--at" not in action.option_strings:
                parse = action.type
                assert callable(parse)
                assert parse("90") == parse("90s") == parse("1.5m") == 90
                times.add((name, *action.option_strings))
    assert {("serve", "--lease"), ("cluster", "--lease"), ("set", "--expiry"), ("touch",)} <= times

"""The pages of verbs and settings equal the parsers and the classes."""

from __future__ import annotations

import pkgutil
from dataclasses import fields, is_dataclass
from importlib import import_module

import pytest

import upper
from tests.docs.blocks import TOP
from tools.reference import SETTINGS, cli_page, settings_page
from upper.cli.verbs import VERBS, load, parser_of

REFERENCE = TOP / "docs" / "reference"


def test_the_page_of_verbs_equals_the_parsers() -> None:
    reported = "docs/reference/cli.md is out of date: python -m tools.reference cli > docs/reference/cli.md"
    assert (REFERENCE / "cli.md").read_text() == cli_page(), reported


def test_the_page_of_settings_equals_the_classes() -> None:
    reported = (
        "docs/reference/settings.md is out of date: "
        "python -m tools.reference settings > docs/reference/settings.md"
    )
    assert (REFERENCE / "settings.md").read_text() == settings_page(), reported


def test_every_verb_and_every_option_is_on_the_page() -> None:
    page = cli_page()
    for verb in VERBS:
        part = page.partition(f"\n## upper {verb}\n")[2].partition("\n## ")[0]
        for action in parser_of(verb, load(verb))._actions:
            for option in action.option_strings:
                assert option in part or option in ("-h", "--help", "--json")


@pytest.mark.parametrize("path", SETTINGS)
def test_an_option_of_a_setting_exists_and_so_does_the_setting(path: str) -> None:
    module, _, name = path.rpartition(".")
    kind = getattr(import_module(module), name)
    _, verb, options = SETTINGS[path]
    known = {option for action in parser_of(verb, load(verb))._actions for option in action.option_strings}
    assert set(options.values()) <= known
    assert set(options) <= {field.name for field in fields(kind)}


def test_every_class_of_settings_is_on_the_page() -> None:
    found = set()
    for module in pkgutil.walk_packages(upper.__path__, "upper."):
        if ".settings" in module.name or module.name.split(".")[1] in ("client", "storage"):
            for name, thing in vars(import_module(module.name)).items():
                if name.endswith("Settings") and is_dataclass(thing) and thing.__module__ == module.name:
                    found.add(f"{module.name}.{name}")
    # What `upper load` does is on its own part of the page of verbs.
    assert found - {"upper.cli.load_generator.LoadSettings"} <= set(SETTINGS)

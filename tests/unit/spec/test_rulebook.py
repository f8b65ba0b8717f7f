"""The table of rules: each id well formed, each made into an error of its class, each in use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import estream_loader
import estream_spec
from estream_spec.errors import EmoeError, FormatError, TrustError
from estream_spec.rulebook import RULES, refusal

SOURCES = {
    path: path.read_text()
    for package in (estream_spec, estream_loader)
    for path in Path(str(package.__file__)).parent.rglob("*.py")
    if path.name != "rulebook.py"
}


@pytest.mark.parametrize("rule", RULES)
def test_id(rule: str) -> None:
    assert re.fullmatch(r"EMOE-[A-Z]{3}-\d{3}", rule)


@pytest.mark.parametrize(("rule", "kind"), RULES.items(), ids=RULES)
def test_refusal(rule: str, kind: type[EmoeError]) -> None:
    error = refusal(rule, "found 1, expected 2", path="a.b", offset=64, hint="look")
    assert type(error) is kind
    assert (error.message, error.path, error.offset, error.hint) == ("found 1, expected 2", "a.b", 64, "look")
    assert error.rule == rule
    assert str(error) == f"found 1, expected 2 (at offset 0x40, a.b) [{rule}]"


def test_classes() -> None:
    """What a package is refused for is its own fault, but for signatures, which are a matter of the caller's."""
    others = {rule: kind for rule, kind in RULES.items() if not issubclass(kind, FormatError)}
    assert others == {"EMOE-SIG-002": TrustError, "EMOE-SIG-003": TrustError}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_in_use(rule: str) -> None:
    assert any(f'"{rule}"' in text for text in SOURCES.values())


def test_no_source_names_a_rule_that_is_not_there() -> None:
    """Rules of readers, writers, editors and arithmetic judge programs, not packages."""
    named = {rule for text in SOURCES.values() for rule in re.findall(r"EMOE-[A-Z]{3}-\d{3}", text)}
    assert {rule for rule in named - RULES.keys() if rule[5:8] not in {"RDR", "WRI", "EDT", "NUM"}} == set()

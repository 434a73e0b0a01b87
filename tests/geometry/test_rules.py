"""The table of rules: every op once, and a way to add one."""

import pytest

from unstride.errors import OptionError
from unstride.geometry.rules import RULES, register


@pytest.fixture(autouse=True)
def table_as_it_was():
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def nothing(walk, node, value):
    return None, []


def test_a_rule_of_ones_own_goes_into_the_table():
    register("acme.thin", nothing)
    assert RULES["acme.thin"] is nothing


def test_no_op_has_two_rules():
    register("acme.thin", nothing)
    with pytest.raises(OptionError, match=r"'acme.thin' has a rule already \(nothing\).*RULES.pop\('acme.thin'\)"):
        register("acme.thin", nothing)
    own = RULES["conv2d"]
    with pytest.raises(OptionError, match="'conv2d' has a rule already"):
        register("conv2d", nothing)
    assert RULES["conv2d"] is own


def test_a_rule_is_a_function():
    with pytest.raises(OptionError, match=r"'acme.thin': got str, expected a function \(walk, node, value\)"):
        register("acme.thin", "conv2d")
    assert "acme.thin" not in RULES


@pytest.mark.parametrize("family", ["elementwise", "layout", "windows", "resize", "contractions"])
def test_every_family_enters_its_rules(family):
    assert [op for op, rule in RULES.items() if rule.__module__ == f"unstride.geometry.rules.{family}"]

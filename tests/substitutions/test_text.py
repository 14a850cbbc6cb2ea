"""The text of rules: what is printed parses to the same rule, and what is wrong is said with its place."""

import pytest
from hypothesis import given
from rule_cases import plain_terms

from unity.base.errors import RuleError
from unity.substitutions.language.axioms import axioms
from unity.substitutions.language.rule import Different, EqualSizes, HasState, Rank, Rule
from unity.substitutions.language.text import parse_rule, parse_rules, parse_term, print_rule, print_term


@given(plain_terms())
def test_terms_round_trip(term):
    assert parse_term(print_term(term)) == term


def test_rules_round_trip():
    for rule in axioms():
        assert parse_rule(print_rule(rule)) == rule
    line = "r   (x, concat(d, x, y)) = (x, x)   where x: d@a, y: partial@a, x.0 = y.-1, rank x = 2, d != -1, x: -2@b"
    with pytest.raises(RuleError, match="no such variable"):
        parse_rule(line)
    where = "x: d@a, y: partial@a, x.0 = y.-1, rank x = 2, d != -1"
    text = f"r   (x, combine(d, a, replicate(b, concat(d, x, y)))) = (x, x)   where {where}"
    rule = parse_rule(text)
    assert print_rule(rule) == text
    assert [type(c) for c in rule.conditions] == [HasState, HasState, EqualSizes, Rank, Different]


WRONG = {
    "x": "column 1: expected the rule's name",
    "a relu(x) = x": "column 3: expected an operator of the vocabulary, found relu",
    "a map(relu, x) = ": "column 18: expected a variable or an operator, found the end of the line",
    "a concat(x, y) = x": 'column 14: expected ",", found \\)',
    "a add(x y) = x": 'column 9: expected ",", found y',
    "a conv2d(1, 1, full, x, w) = x": "column 16: expected same, valid or a letter",
    "a split(-1, x).2 = x": "column 16: expected a result of split, 0 to 1, found 2",
    "a add = x": 'column 7: expected "\\(" after operator add',
    "a add(x, y) = x $": "column 17: expected a name, a number or a sign, found \\$",
    "a add(x, y) = x y": "column 17: expected the end of the rule, found y",
    "a add(x, y) = x where z: 0@a": "the condition on z has no such variable",
    "a (x, y) = x": "one side has 2 outputs, the other 1",
}


@pytest.mark.parametrize("line", WRONG)
def test_errors_say_where(line):
    with pytest.raises(RuleError, match=f"line 3.*{WRONG[line]}"):
        parse_rules(f"# a comment\n\n{line}\n")


def test_names_differ():
    with pytest.raises(RuleError, match="line 2: there is a rule a already"):
        parse_rules("a x = x\na y = y\n")


def test_a_rule_knows_its_variables():
    rule = parse_rule("r combine(d, a, map(f, partition(d, a, x))) = map(f, x)")
    assert isinstance(rule, Rule)
    assert rule.variables == ("x",)
    assert rule.attributes == {"d": "dim", "a": "axis", "f": "function"}
    assert rule.parallel
    assert rule.instances == 6

"""Bounded checks: what is false is refuted with numbers, small ones, and every attribute is looked at."""

import itertools

import pytest
from rule_cases import A

from unity.substitutions.axioms import axioms
from unity.substitutions.text import parse_rule
from unity.substitutions.typecheck import tensor
from unity.verify.bounded import executed
from unity.verify.first_order import Prover
from unity.verify.instances import satisfies
from unity.verify.library import verified
from unity.verify.small import small_instances, small_sizes

FALSE = {
    "another window": "r maxpool(k, m, p, partition(d, a, x)) = partition(d, a, maxpool(1, m, p, x))",
    "another stride": "r conv2d(1, k, p, x, replicate(a, y)) = conv2d(1, 2, p, x, replicate(a, y))   where x: -4@a",
    "indices swapped": "r concat(-2, embedding(x, y), embedding(x, z)) = embedding(x, concat(-1, z, y))",
    "one index for two": "r concat(-2, embedding(x, y), embedding(x, z)) = embedding(x, concat(-1, y, y))",
}


@pytest.mark.parametrize("name", FALSE)
def test_what_is_false_is_refuted(name):
    check = executed(parse_rule(FALSE[name]))
    assert check.status == "refuted", check


def test_a_counterexample_says_the_indices():
    check = executed(parse_rule(FALSE["indices swapped"]))
    assert check.counterexample is not None
    values = check.counterexample.values
    assert {name[0] for name in values} == {"x", "y", "z"}
    assert [v for n, v in values.items() if n[0] == "y"] != [v for n, v in values.items() if n[0] == "z"]


def test_every_attribute_is_looked_at():
    rule = parse_rule("r maxpool(k, s, p, map(relu, x)) = map(relu, maxpool(k, s, p, x))")
    found = {tuple(i.attributes.values()) for i in small_instances(rule, (), small_sizes(rule, 2), 40)}
    assert found == {(k, s, p) for k, s, p in itertools.product((1, 2, 3), (1, 2, 3), ("same", "valid")) if (k, p) != (3, "valid")}
    rule = parse_rule("r map(f, concat(d, x, y)) = concat(d, map(f, x), map(f, y))")
    found = small_instances(rule, (), small_sizes(rule, 2), 24)
    assert {i.attributes["d"] for i in found} == {-1, -2, -3}
    assert {len(i.types["x"].shape) for i in found} == {1, 2, 3}
    assert [i.elements for i in found] == sorted(i.elements for i in found)


def test_conditions_choose_instances():
    rule = parse_rule("r map(f, x) = map(f, x)   where rank x = 2")
    assert {len(i.types["x"].shape) for i in small_instances(rule, (), (1, 2), 100)} == {2}
    assert not satisfies(rule, {"x": tensor((4,))})
    rule = parse_rule("r map(f, combine(-1, a, x)) = combine(-1, a, map(f, x))   where x: -1@a")
    assert all(i.types["x"].states[0].kind == "P" for i in small_instances(rule, (A,), (2, 4), 100))


LOST = (
    "r sum(-1, split(-1, concat(-1, x, y)).0) = sum(-1, split(-1, matmul(concat(-1, x, y), identity(concat(-1, x, y)))).0)",
    "r sum(-1, split(-1, concat(-1, x, y)).1) = "
    "sum(-1, split(-1, conv2d(1, 1, same, concat(-1, x, y), identity_kernel(1, concat(-1, x, y)))).1)",
)


@pytest.mark.parametrize("text", LOST)
def test_an_axiom_that_loses_a_seam_proves_nothing_of_a_split(text):
    """The product with the identity is the matrix, but is split in halves: where its parts were joined is not known of it."""
    rule = parse_rule(text)
    assert Prover(axioms()).prove(rule).status == "open"
    assert Prover(axioms(), cores=True).prove(rule).status == "open"
    assert verified(rule, Prover(axioms(), cores=True)).status in ("refuted", "open")

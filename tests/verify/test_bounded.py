"""Bounded checks refute false rules with small numbers, and check every attribute."""

import itertools

import pytest
from rule_cases import A

from unity.pcg.types.factors import Window
from unity.substitutions.language.axioms import axioms
from unity.substitutions.language.text import parse_rule
from unity.substitutions.language.typecheck import tensor
from unity.verify.proofs.bounded import executed
from unity.verify.proofs.first_order import Prover
from unity.verify.proofs.instances import satisfies
from unity.verify.proofs.library import verified
from unity.verify.proofs.small_instances import small_instances, small_sizes
from unity.verify.proofs.window_sizes import least_side

FALSE = {
    "another window": "r maxpool(k, m, p, partition(d, a, x)) = partition(d, a, maxpool(1, m, p, x))",
    "another stride": "r conv2d(1, k, p, x, replicate(a, y)) = conv2d(1, 2, p, x, replicate(a, y))   where x: -4@a",
    "indices swapped": "r concat(-2, embedding(x, y), embedding(x, z)) = embedding(x, concat(-1, z, y))",
    "one index for two": "r concat(-2, embedding(x, y), embedding(x, z)) = embedding(x, concat(-1, y, y))",
}


@pytest.mark.parametrize("name", FALSE)
def test_a_false_rule_is_refuted(name):
    check = executed(parse_rule(FALSE[name]))
    assert check.status == "refuted", check


def test_a_counterexample_names_the_indices():
    check = executed(parse_rule(FALSE["indices swapped"]))
    assert check.counterexample is not None
    values = check.counterexample.values
    assert {name[0] for name in values} == {"x", "y", "z"}
    assert [v for n, v in values.items() if n[0] == "y"] != [v for n, v in values.items() if n[0] == "z"]


def test_every_attribute_is_checked():
    rule = parse_rule("r maxpool(k, s, p, map(relu, x)) = map(relu, maxpool(k, s, p, x))")
    found = {tuple(i.attributes.values()) for i in small_instances(rule, (), small_sizes(rule, 2), 60)}
    assert found == set(itertools.product((1, 2, 3), (1, 2, 3), ("same", "valid")))
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
    """The product with the identity equals the matrix, but has lost its seams: a split divides it in halves."""
    rule = parse_rule(text)
    assert Prover(axioms()).prove(rule).status == "open"
    assert Prover(axioms(), cores=True).prove(rule).status == "open"
    assert verified(rule, Prover(axioms(), cores=True)).status in ("refuted", "open")


TRUE = {
    "two convolutions of one image": "r (conv2d(1, 2, valid, x, w), conv2d(1, 2, valid, x, v))"
    " = (split(-3, conv2d(1, 2, valid, x, concat(-4, w, v))).0, split(-3, conv2d(1, 2, valid, x, concat(-4, w, v))).1)",
    "a pool of joined channels": "r maxpool(3, 2, valid, concat(-3, x, y))"
    " = concat(-3, maxpool(3, 2, valid, x), maxpool(3, 2, valid, y))",
    "a wide pool": "r avgpool(5, 1, valid, add(x, y)) = add(avgpool(5, 1, valid, x), avgpool(5, 1, valid, y))",
    "four groups": "r conv2d(4, 1, same, add(x, y), w) = add(conv2d(4, 1, same, x, w), conv2d(4, 1, same, y, w))",
    "a dimension in four": "r merge(-1, unmerge(-1, 4, x)) = x",
    "a sum of the fifth dimension": "r transpose(transpose(sum(-5, x))) = sum(-5, x)",
    "stacked tensors of rank 4": "r map(relu, concat(-4, x, y)) = concat(-4, map(relu, x), map(relu, y))",
}
HIDDEN = {
    "a centre": "r conv2d(1, 1, same, x, mul(w, enlarge(3, ones(v)))) = conv2d(1, 1, same, x, w)",
    "all but a ring": "r conv2d(1, 1, same, x, mul(w, enlarge(5, enlarge(3, ones(v))))) = conv2d(1, 1, same, x, w)",
    "windows of 3 and 5": "r maxpool(3, 1, same, x) = maxpool(5, 1, same, x)",
    "windows of 7 and 9": "r maxpool(7, 1, same, x) = maxpool(9, 1, same, x)",
    "windows of 3 and 2": "r avgpool(3, 2, same, x) = avgpool(2, 2, same, x)",
    "two windows in turn": "r maxpool(3, 1, same, maxpool(3, 1, same, x)) = maxpool(3, 1, same, x)",
    "a window that is not padded": "r maxpool(5, 5, valid, x) = maxpool(6, 5, valid, x)",
    "a turned image": "r maxpool(3, 2, same, transpose(x)) = maxpool(3, 2, same, x)",
    "strides that give as many": "r conv2d(1, 4, same, x, w) = conv2d(1, 3, same, x, w)",
    "a vector added to an image": "r maxpool(3, 1, same, bias(x, b)) = bias(avgpool(3, 1, same, x), b)",
    "columns in another order": "r merge(-1, transpose(unmerge(-1, n, x))) = x",
}


@pytest.mark.parametrize("name", TRUE)
def test_a_true_rule_about_large_windows_or_high_ranks_is_proved(name):
    assert verified(parse_rule(TRUE[name]), Prover(axioms(), cores=True)).status == "proved"


@pytest.mark.parametrize("name", HIDDEN)
def test_a_false_rule_that_holds_at_small_sizes_is_refuted(name):
    check = executed(parse_rule(HIDDEN[name]))
    assert check.status == "refuted", check
    assert check.counterexample is not None


@pytest.mark.parametrize(("size", "stride", "dilation", "base"), list(itertools.product((1, 2, 3, 5), (1, 2, 3), (1, 2), (1, 2))))
def test_the_least_size_for_a_number_of_windows(size, stride, dilation, base):
    """The number of windows without padding agrees with a count."""
    move = (size, stride, (0, 0), dilation, base)
    for windows in (1, 2, 3):
        fit = (n for n in range(1, 40) if len(range(0, (n - 1) * base + 1 - (size - 1) * dilation, stride)) >= windows)
        assert Window(1, 1, *move).least(windows) == next(fit)


def test_images_have_room_for_windows():
    rule = parse_rule("r conv2d(1, 1, valid, maxpool(3, 2, valid, x), w) = conv2d(1, 1, valid, maxpool(3, 2, valid, x), w)")
    assert least_side(rule.sides, 3) == (9, 2)  # two windows of 3 in 4, and 4 elements at stride 2 from 9
    assert least_side(rule.sides, 5) == (13, 2)
    assert max(i.types["x"].shape[-1] for i in small_instances(rule, (), (1, 2), 24)) >= 9

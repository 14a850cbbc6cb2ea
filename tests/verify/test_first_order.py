"""First-order proofs: consequences are proved, other rules stay open, and the axioms are sound, consistent and independent."""

import random
from dataclasses import replace

import pytest
from ci_cases import fewer, one_in

from unity.base.errors import IllTypedError
from unity.substitutions.language.axioms import axioms
from unity.substitutions.language.text import parse_rule
from unity.substitutions.language.typecheck import DIFFERENT, tensor, typecheck
from unity.verify.proofs.bounded import executed
from unity.verify.proofs.first_order import LOSE_SEAMS, Prover
from unity.verify.proofs.small_instances import small_instances

TRUE = {
    "r matmul(x, y) = combine(-2, a, matmul(partition(-2, a, x), replicate(a, y)))": (),
    "r (matmul(x, y), matmul(x, z)) = (split(-1, matmul(x, concat(-1, y, z))).0, split(-1, matmul(x, concat(-1, y, z))).1)": (
        "matmul-of-columns",
        "split-of-concat",
    ),
    "r matmul(transpose(x), y) = transpose(matmul(transpose(y), x))": ("matmul-of-transpose",),
    "r map(f, split(d, x).0) = split(d, map(f, x)).0": ("concat-of-split", "map-of-concat", "split-of-concat"),
    "r sub(add(x, y), y) = x": ("add-of-opposite", "sub-is-add"),
    "r matmul(x, sub(y, z)) = sub(matmul(x, y), matmul(x, z))": ("matmul-of-scale", "matmul-of-sums", "sub-is-add"),
    "r transpose(transpose(map(f, x))) = map(f, x)": ("transpose-twice",),
    "r x = transpose(transpose(x))": ("transpose-twice",),
    "r conv2d(1, 2, p, x, add(w, v)) = add(conv2d(1, 2, p, x, v), conv2d(1, 2, p, x, w))": ("add-commutes", "conv-of-kernels-sum"),
}
OPEN = [
    "r add(x, y) = mul(x, y)",
    "r matmul(x, y) = matmul(y, x)",
    "r map(relu, add(x, y)) = add(map(relu, x), map(relu, y))",
    "r bias(concat(d, x, y), b) = concat(d, bias(x, b), bias(y, b))",
    "r softmax(concat(-1, x, y)) = concat(-1, softmax(x), softmax(y))",
    "r conv2d(2, 1, same, concat(-3, x, y), concat(-4, w, v)) = concat(-3, conv2d(1, 1, same, x, w), conv2d(1, 1, same, y, v))",
]


@pytest.mark.parametrize("text", TRUE)
def test_a_consequence_is_proved(text):
    proof = Prover(axioms(), cores=True).prove(parse_rule(text))
    assert proof.status == "proved"
    assert set(TRUE[text]) <= set(proof.axioms)  # Z3 may use more than it must
    assert proof.work > 0 or not proof.axioms


@pytest.mark.parametrize("text", OPEN)
def test_a_rule_that_does_not_follow_is_open(text):
    assert Prover(axioms()).prove(parse_rule(text)).status == "open"


def test_a_condition_is_a_premise():
    text = OPEN[-1] + "   where x.-3 = y.-3, w.-4 = v.-4"
    assert Prover(axioms()).prove(parse_rule(text)).status == "proved"


def test_without_values_parallelization_operators_matter():
    """If parallelization operators are operators like others, only rules about them prove equations with them."""
    goal = parse_rule("g map(f, combine(-1, a, partition(-1, a, x))) = map(f, x)")
    assert Prover((), values=False).prove(goal).status == "open"
    rule = parse_rule("r combine(d, a, partition(d, a, x)) = x")
    assert Prover([rule], values=False).prove(goal).status == "proved"


def test_axioms_with_switches_can_be_left_out():
    prover = Prover(axioms(), switches=True)
    goal = parse_rule("g add(x, y) = add(y, x)")
    assert prover.prove(goal).status == "proved"
    assert prover.prove(goal, frozenset({"add-commutes"})).status == "open"
    assert prover.prove(goal).status == "proved"


NEEDED_ALONE = {"concat-of-concat", "sum-of-rows"}  # axioms.rules says why


def test_axioms_are_few_and_none_follows_from_the_others():
    assert len(axioms()) <= 78
    prover = Prover(axioms(), switches=True)
    assert {a.name for a in axioms() if prover.prove(a, frozenset({a.name})).status == "proved"} == NEEDED_ALONE


def joined(shape, number):
    """Return types of a tensor whose dimensions of three have a seam after one, after two, or none."""
    rng = random.Random(number)
    seams = tuple(rng.choice([None, (1, None, None), (2, None, None)]) if n == 3 else None for n in shape)
    return tensor(shape) if not any(seams) else replace(tensor(shape), seams=seams)


def loses_seams(axiom):
    """Return whether some operands make both sides well-typed, with different known seams."""
    for instance in small_instances(axiom, (), (3, 2), fewer(16)):
        rule = instance.rule
        for number in range(4):
            known = {n: joined(t.shape, number) if t.dtype == "float32" else t for n, t in instance.types.items()}
            try:
                types = typecheck(rule.sides, known)
            except IllTypedError:
                continue
            for left, right in zip(rule.left, rule.right, strict=True):
                pairs = ((types[left].seam(d), types[right].seam(d)) for d in range(len(types[left].shape)))
                if any(a != b and DIFFERENT not in (a, b) for a, b in pairs):
                    return True
    return False


def test_axioms_preserve_seams_except_those_known_to_lose_them():
    """An axiom that proves a rule with a split must not change seams: halves are other parts."""
    some = {*one_in(3, [a.name for a in axioms()]), *LOSE_SEAMS}
    assert {a.name for a in axioms() if a.name in some and loses_seams(a)} == LOSE_SEAMS


def test_a_contradiction_would_be_found():
    """Concatenation is not associative under a split: with that axiom, everything would be equal."""
    wrong = parse_rule("w concat(d, x, concat(d, y, z)) = concat(d, concat(d, x, y), z)")
    goal = parse_rule("g split(d, concat(d, x, concat(d, y, z))).0 = concat(d, x, y)")
    assert Prover([*axioms(), wrong]).prove(goal).status == "proved"
    assert Prover(axioms()).prove(goal).status == "open"
    assert executed(wrong).status == "ill-typed"  # the sides' seams differ


@pytest.mark.parametrize("axiom", axioms(), ids=lambda a: a.name)
def test_axioms_are_true(axiom):
    check = executed(axiom, limit=6)
    assert check.status == "proved", str(check.counterexample or check.why)
